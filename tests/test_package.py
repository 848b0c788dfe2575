"""What a user gets: the wheel, alone in an empty environment."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from fenno import __version__

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [pytest.mark.installs, pytest.mark.scenario]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fenno's wheel, built by the hatchling that is installed here."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def empty(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that holds the wheel and nothing else. Its dependencies are seen through a .pth file, after
    everything of its own, so that no network is needed; the checkout is not on its path."""
    folder = tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin/python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", wheel]
    subprocess.run(install, check=True)
    there = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True).strip()
    packages = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()])
    Path(there, "dependencies.pth").write_text("\n".join(packages))
    return folder / "bin"


def run(command: list[object], cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_every_recipe_and_patch(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("recipes", "patches"):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
        assert files
        assert {f"fenno/data/{folder}/{path.relative_to(ROOT / folder).as_posix()}" for path in files} <= inside


def test_the_wheel_holds_every_file_of_the_package_and_no_test(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    files = [path for path in (ROOT / "fenno").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.relative_to(ROOT).as_posix() for path in files} <= inside
    assert not [name for name in inside if not name.startswith(("fenno/", f"fenno-{__version__}.dist-info/"))]


def test_the_wheel_alone_runs(empty: Path, tmp_path: Path) -> None:
    where = run([empty / "python", "-c", "import fenno; print(fenno.__file__)"], tmp_path)
    assert Path(where.strip()).is_relative_to(empty.parent)
    assert run([empty / "fenno", "--version"], tmp_path) == f"fenno {__version__}\n"
    assert "recipe" in run([empty / "fenno", "--help"], tmp_path)
    names = [line.split("\t")[0] for line in run([empty / "fenno", "recipe", "list"], tmp_path).splitlines()]
    assert sorted(names) == sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
