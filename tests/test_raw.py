"""Raw records on disk: lines as they come and Parquet of what is full hold the same, to the last bit, whatever is killed when."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from stub import runs

from fenno.errors import UsageError
from fenno.load import raw, record
from fenno.load import reply as replies
from fenno.load.record import Record
from fenno.load.sse import Response


def some(count: int = 50, first: int = 0) -> list[Record]:
    """Answers and failures, with stamps that are no round numbers and everything that may be missing."""
    good = [runs.answer(i, 10 + i / 7, ttft=0.1 + i / 300, gaps=tuple(1 / 3 + j / 7 for j in range(i % 5))) for i in range(count)]
    nothing = dict.fromkeys(("connected", "headers", "asked_prompt", "status"))
    bad = runs.failure(count, 20.1, cls="löng", **nothing, error="said: é, \n, \t, \0")
    return [record_ for record_ in (*good, bad) if int(record_.id.rpartition("-")[2]) >= first]


def write(path: Path, records: list[Record]) -> None:
    path.write_text("".join(record.dump(one) + "\n" for one in records))


def test_what_is_full_is_packed_and_every_record_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    mine = some()
    for number, part in enumerate((mine[:20], mine[20:40], mine[40:]), 1):
        write(raw.file(tmp_path, 77, number), part)
    raw.pack(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "records-77-000001.parquet",
        "records-77-000002.parquet",
        "records-77-000003.jsonl",
    ], "the newest is still written to"
    assert list(raw.records(tmp_path)) == mine


def test_a_file_that_is_read_while_it_grows_is_packed_once_it_was_read_whole(tmp_path: Path) -> None:
    mine, first, read = some(), raw.file(tmp_path, 77, 1), dict[Path, int]()
    write(first, mine[:10])
    seen = list(raw.new(tmp_path, read))
    write(first, mine[:20])  # the rest of it, and the next, after the look
    write(raw.file(tmp_path, 77, 2), mine[20:])
    raw.pack(tmp_path, read)
    assert first.exists()
    seen += raw.new(tmp_path, read)
    raw.pack(tmp_path, read)
    assert not first.exists() and raw.file(tmp_path, 77, 2).exists()
    seen += raw.new(tmp_path, read)
    assert seen == mine == list(raw.records(tmp_path))


def test_lines_and_parquet_are_the_same_table(tmp_path: Path) -> None:
    write(raw.file(tmp_path, 77, 1), some())
    before = raw.table(raw.file(tmp_path, 77, 1))
    write(raw.file(tmp_path, 77, 2), some(1))
    raw.pack(tmp_path)
    after = raw.table(raw.file(tmp_path, 77, 1))
    assert after.equals(before)
    assert raw.table(raw.file(tmp_path, 77, 1), ["sent"]).column_names == ["sent"]
    longest = [max(one.gaps) if one.gaps else None for one in some()]
    assert after[raw.GAP].to_pylist() == longest


def test_a_run_of_an_earlier_version_is_read_and_its_records_are_of_the_first_turn(tmp_path: Path) -> None:
    old = [{name: value for name, value in json.loads(record.dump(one)).items() if name != "turn"} for one in some()]
    path = tmp_path / "records-4711.jsonl"
    path.write_text("".join(json.dumps({**one, "of_a_later_version": 1}) + "\n" for one in old))
    assert raw.table(path)["turn"].to_pylist() == [1] * 51
    path.write_text("".join(json.dumps(one) + "\n" for one in old))
    raw.pack(tmp_path)
    assert list(raw.records(tmp_path)) == some()


def test_a_line_that_was_cut_short_costs_itself_alone(tmp_path: Path) -> None:
    write(raw.file(tmp_path, 77, 1), some())
    with raw.file(tmp_path, 77, 1).open("a") as file:
        file.write(record.dump(some()[0])[:100])
    assert list(raw.records(tmp_path)) == some()
    assert raw.table(raw.file(tmp_path, 77, 1)).num_rows == 51


@pytest.mark.parametrize("left", ["part", "both"])
def test_a_kill_while_a_file_is_packed_loses_nothing_and_doubles_nothing(tmp_path: Path, left: str) -> None:
    write(raw.file(tmp_path, 77, 1), some())
    write(raw.file(tmp_path, 77, 2), some(60, 51))
    lines = raw.file(tmp_path, 77, 1).read_bytes()
    raw.pack(tmp_path)
    raw.file(tmp_path, 77, 1).write_bytes(lines)  # not removed yet
    if left == "part":
        packed = raw.file(tmp_path, 77, 1).with_suffix(".parquet")
        packed.with_suffix(".part").write_bytes(packed.read_bytes()[:100])
        packed.unlink()
    for _ in range(2):
        assert list(raw.records(tmp_path)) == [*some(), *some(60, 51)]
        raw.pack(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_what_cannot_be_packed_stays_as_lines(tmp_path: Path) -> None:
    write(raw.file(tmp_path, 77, 1), some())
    write(raw.file(tmp_path, 77, 2), some(60, 51))
    raw.file(tmp_path, 77, 3).write_text("no record\n")
    raw.file(tmp_path, 77, 4).touch()
    raw.file(tmp_path, 77, 1).with_suffix(".part").mkdir()  # in the way of the first
    raw.pack(tmp_path)
    assert [path.name for path in raw.files(tmp_path)] == [
        *("records-77-000001.jsonl", "records-77-000002.parquet", "records-77-000003.jsonl", "records-77-000004.jsonl"),
    ]
    raw.file(tmp_path, 77, 3).unlink()
    assert list(raw.records(tmp_path)) == [*some(), *some(60, 51)]


def test_what_is_no_record_is_named_with_its_file_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "records-1.jsonl").write_text('{"id": "a line of something else"}\n')
    with pytest.raises(UsageError, match=r"records-1\.jsonl holds something else") as caught:
        list(raw.records(tmp_path))
    assert "move that file away" in caught.value.hint
    for text in ('{"id": "a line of something else"}\n', "\0" * 100 + "\n", "[1]\n"):
        (tmp_path / "records-1.jsonl").write_text(text)
        with pytest.raises(UsageError, match=r"records-1\.jsonl holds something else"):
            raw.table(tmp_path / "records-1.jsonl")
    raw.file(tmp_path, 2, 1).with_suffix(".parquet").write_bytes(b"PAR1")
    with pytest.raises(UsageError, match=r"000001\.parquet holds something else"):
        raw.table(raw.file(tmp_path, 2, 1))


def test_a_packed_file_that_was_damaged_is_named_whoever_reads_it(tmp_path: Path) -> None:
    """Its pages, which can no longer be inflated, or its end, which says where they are."""
    write(raw.file(tmp_path, 77, 1), some())
    raw.file(tmp_path, 77, 2).touch()
    raw.pack(tmp_path)
    path = raw.file(tmp_path, 77, 1).with_suffix(".parquet")
    good = path.read_bytes()
    end = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    for first, last in ((4, end), (end, len(good) - 8)):
        path.write_bytes(good[:first] + bytes(0xFF ^ byte for byte in good[first:last]) + good[last:])
        with pytest.raises(UsageError, match=r"000001\.parquet holds something else"):
            raw.table(path)
        with pytest.raises(UsageError, match=r"000001\.parquet holds something else"):
            list(raw.records(tmp_path))
    with pytest.raises(UsageError, match=r"000001\.parquet holds something else"):
        raw.count(path)


def test_what_is_packed_while_somebody_reads_is_read_once_all_the_same(tmp_path: Path) -> None:
    mine = some()
    for number, part in enumerate((mine[:20], mine[20:40], mine[40:]), 1):
        write(raw.file(tmp_path, 77, number), part)
    reading, found = raw.records(tmp_path), raw.files(tmp_path)
    first = next(reading)
    raw.pack(tmp_path)
    assert [path.exists() for path in found] == [False, False, True]
    assert [first, *reading] == mine
    assert sum(raw.table(path, ["sent"]).num_rows for path in found) == len(mine)


SENDER = """
import sys, gevent
from pathlib import Path
from functools import partial
from fenno.load import raw
from fenno.load.sender.spool import Spool
spool = Spool(partial(raw.file, Path(sys.argv[1]), 77), 2000)
for line in sys.stdin:
    spool.add(line.rstrip("\\n"))
    spool.flush(wait=True)
print("written", flush=True)
gevent.sleep(600)
"""


def test_a_sender_goes_on_to_the_next_file_and_a_kill_takes_nothing_of_what_was_written(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", SENDER, str(tmp_path)]
    sender = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert sender.stdin and sender.stdout
    with sender:
        sender.stdin.write("".join(record.dump(one) + "\n" for one in some()))
        sender.stdin.close()
        assert sender.stdout.readline() == "written\n"
        sender.kill()
    assert len(raw.files(tmp_path)) > 5
    assert all(path.stat().st_size >= 2000 for path in raw.files(tmp_path)[:-1])
    raw.pack(tmp_path)
    assert [path.suffix for path in raw.files(tmp_path)][-2:] == [".parquet", ".jsonl"]
    assert list(raw.records(tmp_path)) == some()


@pytest.mark.parametrize(("said", "kept"), [("3", 3), ('"3"', None), ("3.0", None), ("-1", None), ("true", None), ("9" * 12, None)])
def test_a_count_that_is_none_and_half_a_character_do_not_come_into_the_records(
    tmp_path: Path, said: str, kept: int | None
) -> None:
    """A server may say anything; what it says is read again from Parquet in three days."""
    response, reply = Response(), replies.Reply()
    usage = f'{{"prompt_tokens": 1, "completion_tokens": {said}}}'
    events = (r'{"error": {"message": "half \ud83d of one"}}', f'{{"choices": [], "usage": {usage}}}')
    response.status, response.body = 200, [(1.0, "".join(f"data: {event}\n\n" for event in events).encode())]
    list(replies.read(response, reply))
    assert (reply.prompt_tokens, reply.completion_tokens) == (1, kept)
    one = runs.failure(1, 12.0, error=reply.error, completion_tokens=reply.completion_tokens)
    write(raw.file(tmp_path, 77, 1), [one])
    assert raw.table(raw.file(tmp_path, 77, 1))["error"].to_pylist() == ["half ? of one"]
    assert list(raw.records(tmp_path)) == [one]
    response.status, response.body = 500, [(1.0, rb'"half \udc00 of one"')]
    list(replies.read(response, reply))
    assert reply.error == "half ? of one"
