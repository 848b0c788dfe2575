"""Other tile sizes: what the kernels' layout allows, the code that has them, and when one is kept."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from fa2_made import WHOLE, code_for, stand_in, tree, wheel_of
from test_fa2 import GEMMA_2, GROK_2, LLAMA_3_70B, planned
from test_fa2_build import answering, needs_compiler, words

from fenno import machine
from fenno.errors import BuildError, UsageError
from fenno.fa2 import build, tiles, trial, verify
from fenno.fa2.lattice import Tile, Unit
from fenno.fa2.source import Given

PROMPTS = Unit("fwd", 128, "bf16", True)
STOCK = Tile(128, 64, 4)


@pytest.mark.parametrize("head", [64, 128, 256])
@pytest.mark.parametrize("direction", ["fwd", "fwd_split"])
def test_upstreams_own_tiles_are_possible_and_every_warp_takes_whole_rows(direction: Any, head: int) -> None:
    found = tiles.possible(direction, head, "90")
    assert {tiles.upstreams(Unit(direction, head, "bf16", causal)) for causal in (False, True)} <= set(found)
    assert all(tile.rows % (16 * tile.warps) == 0 for tile in found)
    # The article's 32 rows are for two warps, never for four; its 16 columns are for none.
    assert (Tile(32, 32, 2) in found) == (direction == "fwd")
    assert not [tile for tile in found if (tile.rows == 32 and tile.warps > 2) or tile.columns < 32]


def test_split_kernels_have_room_for_their_partial_results_where_queries_keys_and_values_lay() -> None:
    # Upstream allots (rows + 2 columns) * head * 2 bytes and writes rows * head * 4: 128x32 would need 64 KiB of 48.
    for head in (64, 128):
        found = tiles.possible("fwd_split", head, "90")
        assert {Tile(64, 32, 4), Tile(128, 64, 4)} <= set(found)
        assert all(tile.rows <= 2 * tile.columns for tile in found)
        assert Tile(128, 32, 4) in tiles.possible("fwd", head, "90"), "the others write what they read: two bytes"


def test_a_gpu_with_less_shared_memory_has_fewer_tiles() -> None:
    assert set(tiles.possible("fwd", 128, "120")) < set(tiles.possible("fwd", 128, "80"))


def test_an_experiment_is_one_library_with_every_tile_of_three_units() -> None:
    made = tiles.experiment(planned(LLAMA_3_70B, archs=("90",)))
    files = tiles.sources(made)
    upstreams = [name for name, text in files.items() if text is None]
    assert sum(name.endswith(".cpp") for name in files) == len(made.tiles) == 3
    assert sum(name.endswith(".cu") for name in files) == sum(map(len, made.tiles.values())) + 1
    assert upstreams == ["csrc/flash_attn/src/flash_fwd_split_hdim128_bf16_causal_sm80.cu"]
    with pytest.raises(UsageError, match="measures one architecture"):
        tiles.experiment(planned(LLAMA_3_70B, archs=("80", "90")))
    with pytest.raises(UsageError, match=r"flash-attn 2\.8 and later"):
        tiles.experiment(planned(LLAMA_3_70B, version="2.7.4.post1"))


def test_every_file_that_is_compiled_is_counted_beforehand() -> None:
    plan = planned(LLAMA_3_70B, archs=("90",))
    for made in (plan, tiles.with_tiles(plan, {PROMPTS: (Tile(64, 64, 4),)}), tiles.experiment(plan)):
        assert sorted(tiles.estimates(made)) == sorted(Path(name).stem for name in build.files(made))


def test_a_library_with_many_tiles_takes_the_one_it_is_told_and_upstreams_otherwise() -> None:
    text = tiles.switch(PROMPTS, (STOCK, Tile(64, 64, 4)))
    assert text.count("void flash_fwd_hdim128_bf16_causal_64x64x4(Flash_fwd_params &params, cudaStream_t stream);") == 1
    assert 'std::getenv("FENNO_TILE_FWD_CAUSAL")' in text
    assert 'tile = "128x64x4";' in text
    assert "template<> void run_mha_fwd_<cutlass::bfloat16_t, 128, true>(" in text
    names = {tiles.variable(unit) for unit in tiles.experiment(planned(GROK_2, archs=("90",))).tiles}
    assert names == {"FENNO_TILE_FWD_CAUSAL", "FENNO_TILE_FWD", "FENNO_TILE_FWD_SPLIT"}


def test_a_kept_tile_is_a_unit_of_its_own_in_another_wheel() -> None:
    plan = planned(LLAMA_3_70B, archs=("90",))
    made = tiles.with_tiles(plan, {PROMPTS: (Tile(64, 64, 4),)})
    files = tiles.sources(made)
    name = "csrc/flash_attn/src/fenno_flash_fwd_hdim128_bf16_causal_64x64x4.cu"
    assert list(files) == [name if unit == PROMPTS else unit.file for unit in plan.units]
    assert "Flash_fwd_kernel_traits<128, 64, 64, 4, false, false, cutlass::bfloat16_t>, false, true>" in str(files[name])
    assert (plan.kernels, made.kernels) == (38, 35), "upstream's unit holds two tiles, three kernels each"
    assert made.local_version == "fenno.bf16.hd128.sm90.tiles"
    manifests = [build.manifest(each, WHOLE, "x") for each in (plan, made)]
    assert build.key(manifests[0], plan) != build.key(manifests[1], made)
    assert name in manifests[1]["sources"]
    assert set(build.files(made)) == {*files, "csrc/flash_attn/flash_api.cpp", "fenno_stubs.cpp"}


def test_generated_units_are_written_into_the_source(tmp_path: Path) -> None:
    made = tiles.with_tiles(planned(LLAMA_3_70B, archs=("90",)), {PROMPTS: (Tile(64, 64, 4),)})
    build.prepare(tree(tmp_path / "made"), made, build.manifest(made, WHOLE, "x"))
    written = [path for path, text in tiles.sources(made).items() if text]
    assert [(tmp_path / "made" / path).is_file() for path in written] == [True]


def row(**medians: float) -> dict[str, Any]:
    """A shape's times, each with quartiles one microsecond away."""
    times = {name.removeprefix("t"): {"low": m - 1, "median": m, "high": m + 1} for name, m in medians.items()}
    return {"shape": asdict(verify.shapes(planned(LLAMA_3_70B))[0]), "times": times}


@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        ([row(t128x64x4=100, t64x64x4=90, sdpa=80)], Tile(64, 64, 4)),
        ([row(t128x64x4=100, t64x64x4=99)], None),
        ([row(t128x64x4=100, t64x64x4=90), row(t128x64x4=100, t64x64x4=110)], None),
        ([row(t128x64x4=100, t64x64x4=90), row(t128x64x4=100, t64x64x4=101)], Tile(64, 64, 4)),
        ([row(t128x64x4=100, t64x64x4=90, t128x32x4=85), row(t128x64x4=100, t64x64x4=90, t128x32x4=99)], Tile(64, 64, 4)),
        ([], None),
    ],
)
def test_a_tile_is_kept_when_it_is_faster_beyond_noise_somewhere_and_slower_nowhere(rows: Any, kept: Tile | None) -> None:
    assert tiles.kept(rows, STOCK) == kept


def test_the_table_tells_every_time_beside_upstreams_and_what_failed() -> None:
    tried = [trial.Tried(PROMPTS, STOCK, {"64x32x4": "wrong by 3"}, [row(t128x64x4=100, t64x64x4=90)], Tile(64, 64, 4))]
    told = trial.lines(tried)
    assert told[0] == "flash_fwd_hdim128_bf16_causal: upstream's 128x64x4, kept 64x64x4"
    assert told[1] == "  64x32x4: wrong by 3"
    assert re.fullmatch(r" +64x64x4 +90\.0 us \(89\.0 to 91\.0\), 0\.900 of upstream's", told[-1])
    assert trial.document(tried)[0]["kept"] == "64x64x4"
    plan = planned(LLAMA_3_70B, archs=("90",))
    assert trial.keep(plan, tried).tiles == {PROMPTS: (Tile(64, 64, 4),)}
    assert trial.keep(plan, []) is plan


def test_each_units_tiles_are_timed_and_checked_on_the_calls_that_run_in_it() -> None:
    plan = planned(GEMMA_2, archs=("90",))
    for unit in tiles.experiment(plan).tiles:
        assert trial.shapes(unit, plan)
        assert trial.checks(unit, plan)
    assert {case.causal for case in trial.checks(PROMPTS, planned(GROK_2))} == {True}


@pytest.mark.parametrize("option", ["--tiles", "--stock"])
def test_without_a_gpu_nothing_is_built_that_would_be_measured_there(option: str, tmp_path: Path) -> None:
    if machine.read_gpus()[0]:
        pytest.skip("there is a GPU here")
    tree(tmp_path / "made")
    done = subprocess.run(words(tmp_path, answering(tmp_path, "exit 1"), option), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"{option} measures on a GPU, and there is none here" in done.stderr
    assert not (tmp_path / "out").exists()


# In place of the interpreter: with one tile an illegal access, which ends that process for the tiles after it too.
LOSES = """
import json, sys
asked = json.load(sys.stdin)
print(json.dumps({"gpu": "a GPU", "torch": "x", "flash_attn": "x"}))
for variant in asked["variants"]:
    for case in asked["cases"]:
        if "64x32x4" in variant.values():
            print(json.dumps({"case": case, "variant": variant, "failed": "an illegal memory access"}))
            print(json.dumps({"done": True}))
            sys.exit()
        print(json.dumps({"case": case, "variant": variant, "error": 0.001, "plain": 0.001}))
print(json.dumps({"done": True}))
"""


def test_a_tile_that_takes_the_gpu_from_its_process_is_wrong_and_those_after_it_are_asked_in_another(tmp_path: Path) -> None:
    (tmp_path / "answers.py").write_text(LOSES)
    python = stand_in(tmp_path / "python", f"echo x >> {tmp_path}/asked; exec {sys.executable} {tmp_path}/answers.py")
    cases = trial.checks(PROMPTS, planned(LLAMA_3_70B, archs=("90",)))
    variants = [{"FENNO_TILE_FWD_CAUSAL": name} for name in ("128x64x4", "64x32x4", "64x64x4")]
    found = trial.checked(python, tmp_path, cases, variants)
    failed = [row["variant"] for row in found if "failed" in row]
    right = [row["variant"] for row in found if "error" in row]
    assert failed == [variants[1]]
    assert right == [variants[0]] * len(cases) + [variants[2]] * len(cases)
    assert len((tmp_path / "asked").read_text().splitlines()) == 2


def test_where_torch_sees_no_gpu_no_tile_is_found_right(tmp_path: Path) -> None:
    rows = [{"gpu": None, "torch": "x", "flash_attn": "x"}, {"done": True}]
    python = stand_in(tmp_path / "python", "cat > /dev/null; " + "; ".join(f"echo '{json.dumps(row)}'" for row in rows))
    with pytest.raises(BuildError, match="torch sees no GPU"):
        trial.checked(python, tmp_path, trial.checks(PROMPTS, planned(LLAMA_3_70B, archs=("90",))), [{"A": "64x64x4"}])


# In place of the interpreter: builds a wheel, finds one tile wrong, and times the others by their rows, more rows being faster.
ANSWERS = """
import json, sys
asked = json.load(sys.stdin)
if "verify.py" in sys.argv[1]:
    print(json.dumps({"gpu": "a GPU", "torch": "x", "flash_attn": "x"}))
    for variant in asked["variants"]:
        for case in asked["cases"]:
            error = 9.0 if "64x32x2" in variant.values() else 0.001
            print(json.dumps({"case": case, "variant": variant, "error": error, "plain": 0.001}))
else:
    assert all(len(variant) == 1 and set(variant.values()) == {name} for name, variant in asked["variants"].items())
    names = asked["libraries"]
    print(json.dumps({"first_call_ms": dict.fromkeys(names, 7.0), "launch_us": dict.fromkeys(names, 9.0)}))
    for case in asked["shapes"]:
        times = {name: 1000.0 / int(name.split("x")[0]) for name in asked["libraries"]}
        print(json.dumps({"shape": case, "times": {n: {"low": t - 0.1, "median": t, "high": t + 0.1} for n, t in times.items()}}))
print(json.dumps({"done": True}))
"""


@pytest.mark.scenario
@needs_compiler
def test_an_experiment_builds_once_checks_times_and_keeps_what_is_faster(tmp_path: Path) -> None:
    tree(tmp_path / "made")
    (tmp_path / "answers.py").write_text(ANSWERS)
    step = f'*/setup.py) {wheel_of(tmp_path, code_for(90))};; *) exec {sys.executable} {tmp_path}/answers.py "$1";;'
    python, said = stand_in(tmp_path / "python", f'case "$1" in {step} esac'), list[str]()
    plan, out = planned(LLAMA_3_70B, archs=("90",)), tmp_path / "out"
    (tmp_path / "empty").mkdir()
    tried = trial.run(plan, WHOLE, python, Given(tmp_path / "made"), out, tmp_path / "empty", said.append, 1)
    assert [tiles.name(each.unit) for each in tried] == [
        *["flash_fwd_hdim128_bf16_causal", "flash_fwd_hdim128_bf16", "flash_fwd_split_hdim128_bf16"]
    ]
    assert [each.kept and each.kept.rows for each in tried] == [256, 256, 128]
    assert [list(each.wrong) for each in tried] == [["64x32x2"], ["64x32x2"], []]
    assert "64x32x2" not in tried[0].rows[0]["times"]
    assert "  64x64x4: first call 7.0 ms, launch 9.0 us" in trial.lines(tried)
    assert said[0].startswith("41 tiles in one library, for 3 units")
    assert len(list(out.glob("*/*.whl"))) == 1
