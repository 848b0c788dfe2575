"""The plan beside what the compilers make of it: one trimmed device unit, the host's unit and the stubs, really compiled.

The source is FLASH_ATTN_SOURCE (an unpacked release), or comes from the package index; without it, nvcc or g++ they are skipped.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from test_fa2 import LLAMA_3_70B, planned

from fenno.errors import BuildError
from fenno.fa2 import source, stubs, tiles, wheel
from fenno.fa2.lattice import Tile, Unit, kernels, units
from fenno.fa2.plan import CXX_FLAGS, NVCC_FLAGS, STUBS_FILE, Plan
from fenno.fa2.releases import RELEASES
from fenno.patches import series, work

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
RELEASE = RELEASES["2.8.3.post2"]
SMALL = {**LLAMA_3_70B, "hidden_size": 2048, "num_attention_heads": 32}  # heads of 64: the cheapest that models have
UNIT = Unit("fwd", 64, "bf16", True)
TILE = Tile(128, 64, 4)  # upstream has it for dropout alone


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source of the release."""
    named = Path(os.environ.get("FLASH_ATTN_SOURCE", "/nowhere"))
    if (named / "setup.py").is_file():
        return named
    made = tmp_path_factory.mktemp("source")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_RETRIES", "1")
        patch.setenv("PIP_TIMEOUT", "20")
        try:
            archive = source.fetch(RELEASE, sys.executable, made)
        except BuildError as error:
            pytest.skip(f"the source of flash-attn is not to be had here: {error}")
    source.check(archive, RELEASE)
    source.unpack(archive, made / "tree")
    return made / "tree"


def torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("there is no torch here")
    return Path(spec.origin).parent


def options(folder: Path, extra: Path) -> list[str]:
    """Headers of the source, of torch (a CPU one too) and of CUDA, and the C++ that torch's own builder would ask for."""
    nvcc = shutil.which("nvcc")
    homes = (Path("/usr/local/cuda"), Path(nvcc or "/x/y/z").resolve().parents[1])
    cuda = [path for path in homes if (path / "include/cuda.h").is_file()]
    if not cuda or not nvcc or not shutil.which("g++"):
        pytest.skip("there is no nvcc, no g++, or no header of CUDA here")
    torch = torch_folder()
    # The CPU torch has the headers that say "CUDA", but for the one that its build writes.
    (extra / "c10/cuda/impl").mkdir(parents=True, exist_ok=True)
    (extra / "c10/cuda/impl/cuda_cmake_macros.h").write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
    folders = [folder / "csrc/flash_attn", folder / "csrc/flash_attn/src", folder / "csrc/cutlass/include", extra]
    folders += [torch / "include", torch / "include/torch/csrc/api/include"]
    folders += [cuda[0] / "include", Path(sysconfig.get_path("include"))]
    standard = re.search(r"-std=c\+\+\d\d", (torch / "utils/cpp_extension.py").read_text())
    name = "-DTORCH_EXTENSION_NAME=flash_attn_2_cuda"
    return [standard[0] if standard else "-std=c++17", name, *(f"-I{path}" for path in folders)]


def symbol(unit: Unit, plan: Plan) -> str:
    """The function that a unit defines, as `nm -C` shows it up to its arguments."""
    scope = "flash::" if plan.release.namespaced else ""
    return f"void {scope}{stubs.FUNCTIONS[unit.direction]}<{stubs.TYPES[unit.dtype]}, {unit.head}, {str(unit.causal).lower()}>"


def test_the_plan_is_what_the_compilers_make(folder: Path, tmp_path: Path) -> None:
    made = planned(SMALL)
    (tmp_path / STUBS_FILE).write_text(stubs.text(made))
    files = {"unit.o": folder / UNIT.file, "api.o": folder / "csrc/flash_attn/flash_api.cpp", "stubs.o": tmp_path / STUBS_FILE}
    listing = compiled(files, folder, tmp_path)
    # The device's unit: as many kernels as planned, fewer than stock, and the one function that the host wants of it.
    assert wheel.kernels(listing["unit.o"]) == len(kernels(UNIT, RELEASE, made.off)) == 3
    assert defined(listing["unit.o"]) == {symbol(UNIT, made)}
    # The host's unit wants every function of the release; the stubs and the plan's units define each once.
    wanted, stubbed = set(wheel.undefined(listing["api.o"])), defined(listing["stubs.o"])
    planned_units = {symbol(unit, made) for unit in made.units}
    assert (len(wanted), len(stubbed), len(planned_units)) == (72, 68, 4)
    assert wanted == stubbed | planned_units
    assert not stubbed & planned_units


@pytest.mark.skipif("FLASH_ATTN_SOURCE" not in os.environ, reason="FLASH_ATTN_SOURCE names no source: CI has no time for this one")
def test_units_with_other_tiles_define_what_upstreams_unit_does(folder: Path, tmp_path: Path) -> None:
    made = planned(SMALL)
    (tmp_path / "tile.cu").write_text(tiles.text(UNIT, TILE, tiles.specialised(UNIT)))
    (tmp_path / "switch.cpp").write_text(tiles.switch(UNIT, (tiles.upstreams(UNIT), TILE)))
    listing = compiled({"tile.o": tmp_path / "tile.cu", "switch.o": tmp_path / "switch.cpp"}, folder, tmp_path)
    assert [defined(text) for text in listing.values()] == [{symbol(UNIT, made)}] * 2
    assert wheel.kernels(listing["tile.o"]) == 3
    assert "Flash_fwd_kernel_traits<64, 128, 64, 4," in listing["tile.o"]
    for tile in (tiles.upstreams(UNIT), TILE):
        assert f" U flash::{tiles.name(UNIT, tile)}(flash::Flash_fwd_params&" in listing["switch.o"]


def test_the_patch_of_a_tile_fits_the_releases_own_file_and_leaves_it_as_it_was(folder: Path, tmp_path: Path) -> None:
    name, where = f"{tiles.FOLDER}/flash_fwd_launch_template.h", (work.shipped(),)
    for path in ("PKG-INFO", name):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / path, tmp_path / path)
    before = (tmp_path / name).read_text()
    assert work.apply(series.source(tmp_path, where), where)["state"] == "patched"
    added = (tmp_path / name).read_text().replace(before[: before.index("run_mha_fwd_hdim128(")], "")
    assert added.index("<Headdim, 32, 64, 2,") < added.index("<Headdim, 128, 64, 4,")
    work.revert(series.source(tmp_path, where))
    assert (tmp_path / name).read_text() == before


def compiled(files: dict[str, Path], folder: Path, objects: Path) -> dict[str, str]:
    """Compile files side by side with the plan's flags; what `nm` says of each object."""
    made, also = planned(SMALL), options(folder, objects / "extra")
    host = ["g++", *made.cxx_flags, "-O0", "-fPIC", *also, "-c"]
    device = ["nvcc", *made.nvcc_flags, "-Xcompiler", "-fPIC", *also, "-c"]
    commands = {name: [*(device if path.suffix == ".cu" else host), str(path)] for name, path in files.items()}
    running = [subprocess.Popen([*words, "-o", objects / name]) for name, words in commands.items()]
    assert [child.wait() for child in running] == [0] * len(commands)
    return {name: symbols(objects / name) for name in commands}


def symbols(path: Path) -> str:
    return subprocess.run(["nm", "-C", path], capture_output=True, text=True, check=True).stdout


def defined(listing: str) -> set[str]:
    return set(re.findall(r"^[0-9a-f]+ T (void (?:\w+::)?run_mha_\w+<[^>]+>)", listing, re.MULTILINE))


def test_the_flags_and_units_are_those_of_the_releases_own_setup(folder: Path) -> None:
    text = (folder / "setup.py").read_text()
    assigned = {
        target.id: node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    own = ast.literal_eval(assigned["nvcc_flags"])
    assert [flag for flag in own if not flag.startswith("-std")] == list(NVCC_FLAGS)
    assert CXX_FLAGS == ("-O3",)
    named = re.findall(r"csrc/flash_attn/src/flash_\w+\.cu", text)
    assert set(named) == {unit.file for unit in units(RELEASE.heads)}
