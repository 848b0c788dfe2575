"""Load tests on disk: what lies there tells everything again, and is read once."""

from __future__ import annotations

import os
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stub import runs

from fenno.compare import block, run
from fenno.compare.block import Arm
from fenno.errors import UsageError
from fenno.load import export, loadtest, raw, stored


def test_a_comparison_of_stored_runs_reads_each_of_their_files_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [runs.run(tmp_path / name, [runs.answer(i, 10 + i / 10) for i in range(100)]) for name in ("one", "two")]
    opened: Counter[str] = Counter()
    plain = Path.open

    def counting(self: Path, *args: Any, **how: Any) -> Any:
        opened[f"{self.parent.name}/{self.name}"] += 1
        return plain(self, *args, **how)

    monkeypatch.setattr(Path, "open", counting)
    found = run.from_disk([Arm(letter, str(folder), None, folder) for letter, folder in zip("AB", folders, strict=True)])
    assert [len(blocks) for blocks in found.arms.values()] == [block.PIECES, block.PIECES]
    assert [block["requests"] for block in found.arms["A"]] == [10] * block.PIECES
    assert opened["one/records-0.jsonl"] == 1
    assert set(opened.values()) == {1}


def test_a_run_that_was_interrupted_is_told_as_far_as_it_came(tmp_path: Path) -> None:
    folder = runs.run(tmp_path / "cut", [runs.answer(i, 10 + i / 10) for i in range(30)], ended=False)
    found = loadtest.document(stored.read(folder))
    assert found["ended"] == {"how": "interrupted", "why": "the load test was ended before its time"}
    assert found["completed"] == 30
    assert found["seconds"] == pytest.approx(3.05), "the window ends with the last answer"


def test_a_folder_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no load test"):
        stored.read(tmp_path)
    runs.run(tmp_path / "rate-0", [runs.answer(0, 10)])
    with pytest.raises(UsageError, match="holds no load test") as found:
        stored.read(tmp_path)
    assert str(tmp_path / "rate-0") in found.value.hint, "what `--find-capacity` leaves is a folder for each rate"


def packed(folder: Path) -> Path:
    """The run whose records are Parquet."""
    (folder / "records-0.jsonl").rename(raw.file(folder, 0, 1))
    raw.file(folder, 0, 2).touch()
    raw.pack(folder)
    return folder


def held(work: Callable[[], object]) -> int:
    """The most bytes that Python objects held at once while `work` ran."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.scenario
def test_a_long_run_is_told_in_a_few_hundred_bytes_a_request_and_exported_in_none(tmp_path: Path) -> None:
    sizes = (2100, 6000)
    folders = [packed(runs.run(tmp_path / str(n), [runs.answer(i, 10 + i / 4000) for i in range(n)])) for n in sizes]
    loadtest.document(stored.read(folders[0]))  # what is imported and cached is no request's
    told = [held(lambda folder=folder: loadtest.document(stored.read(folder))) for folder in folders]  # type: ignore[misc]
    assert (told[1] - told[0]) / (sizes[1] - sizes[0]) < 350
    rows = [held(lambda folder=folder: written(folder)) for folder in folders]  # type: ignore[misc]
    assert rows[1] - rows[0] < 300_000


def written(folder: Path) -> None:
    with Path(os.devnull).open("w") as file:
        export.write_csv(stored.records(folder), stored.start(folder), file)
