"""The one-way street of docs/structure.md, the size of things, and how light `fenno --help` is."""

from __future__ import annotations

import ast
import graphlib
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import heavy, pytest_runtest_setup
from stub.harness import Again, side_by_side

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fenno"
MODULES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
LISTED = re.findall(r"^\| `([a-z0-9_/.]+)` \|", (ROOT / "docs/structure.md").read_text(), re.MULTILINE)
ROOMS = [name for name in LISTED if "/" not in name.rstrip("/")]

# Imported only where they are the point: inside the engine, in the traffic's own process, in a user's own program.
HEAVY = {"torch", "vllm", "locust", "gevent", "transformers", "flash_attn"}
GUESTS = re.compile(r"vllm_plugin/|.*/inside/|load/(sender/.*|locustfile\.py)|kv/(contiguous|transfer)\.py")
LAZY = {"optuna", "git", "numpy", "pyarrow"}


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere in `tree`, as a dotted name; `from fenno import x` counts as fenno.x."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute in fenno"
            base = node.module or ""
            yield from (f"{base}.{alias.name}" for alias in node.names)


def file_of(dotted: str) -> str | None:
    """The file that `fenno.a.b` is, or is a name of; None for what is not fenno's, and for names of fenno/__init__.py."""
    parts = dotted.split(".")
    if parts[0] != "fenno":
        return None
    for size in range(len(parts), 1, -1):
        stem = "/".join(parts[1:size])
        for name in (f"{stem}.py", f"{stem}/__init__.py"):
            if name in MODULES:
                return name
    return None


def room(name: str) -> str:
    return re.sub("/.*", "/", name)


def own(tree: ast.AST) -> set[str]:
    return {found for dotted in imports(tree) if (found := file_of(dotted))}


def test_every_module_has_a_sentence_in_the_structure_page_and_every_sentence_a_module() -> None:
    there = {name for name in MODULES if not name.endswith("__init__.py")}
    there |= {name.removesuffix("__init__.py") for name in MODULES if name.endswith("/__init__.py")}
    assert there - set(LISTED) == set(), "add a sentence to docs/structure.md"
    assert set(LISTED) - there == set(), "take the sentence out of docs/structure.md"


@pytest.mark.parametrize("name", [name for name in MODULES if name != "__init__.py"])
def test_a_room_imports_only_from_rooms_above_it(name: str) -> None:
    above = ROOMS[: ROOMS.index(room(name)) + 1]
    assert [other for other in sorted(own(MODULES[name])) if room(other) not in above] == []


def test_inside_a_room_there_are_no_cycles() -> None:
    list(graphlib.TopologicalSorter({name: own(tree) - {name} for name, tree in MODULES.items()}).static_order())


def test_whatever_fenno_itself_imports_is_among_its_dependencies() -> None:
    """And not only there because somebody else needs it: `pip install .` has to be enough."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[^A-Za-z0-9-]", line, maxsplit=1)[0].lower().replace("-", "_") for line in project["dependencies"]}
    declared |= {"yaml", "git", "pynvml"}  # what pyyaml, gitpython and nvidia-ml-py are imported as
    engines = {"torch", "vllm", "transformers", "flash_attn", "safetensors", "setuptools", "torchvision"}
    mine = {name: tree for name, tree in MODULES.items() if not re.match(r"vllm_plugin/|.*/inside/|kv/", name)}
    used = {dotted.split(".")[0]: name for name, tree in mine.items() for dotted in imports(tree)}
    foreign = {package: name for package, name in used.items() if package not in {*sys.stdlib_module_names, "fenno", *engines}}
    assert {package: name for package, name in foreign.items() if package not in declared} == {}


def test_the_guard_and_the_control_file_need_nothing_but_the_standard_library() -> None:
    for name in ("guard.py", "control.py"):
        assert {dotted.split(".")[0] for dotted in imports(MODULES[name])} <= sys.stdlib_module_names, name
    assert not [name for name, tree in MODULES.items() if "guard.py" in own(tree)]


def test_inside_the_engine_there_is_only_what_the_engine_has() -> None:
    # transformers and safetensors come with every vLLM.
    there = sys.stdlib_module_names | {"fenno", "vllm", "torch", "prometheus_client", "transformers", "safetensors"}
    there |= {"arguments"}  # engine/inside/arguments.py, for the scripts beside it
    for name, tree in MODULES.items():
        if name.startswith(("vllm_plugin/", "engine/inside/")):
            assert {dotted.split(".")[0] for dotted in imports(tree)} <= there, name
            assert {room(other) for other in own(tree)} <= {"control.py", room(name)}, name


@pytest.mark.parametrize("name", [name for name in MODULES if not GUESTS.match(name)])
def test_nothing_heavy_is_imported_outside_its_own_process(name: str) -> None:
    assert {dotted.split(".")[0] for dotted in imports(MODULES[name])} & HEAVY == set()


def test_a_function_can_be_seen_at_once() -> None:
    # The body, that is: a command's signature is the table of its options.
    lengths = {
        f"{name}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.body[0].lineno + 1
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {where: lines for where, lines in lengths.items() if lines > 40} == {}


def catches_everything(handler: ast.ExceptHandler) -> bool:
    """To tidy up and raise again is not to catch."""
    named = {word.id for word in ast.walk(handler.type) if isinstance(word, ast.Name)} if handler.type else {"Exception"}
    last = handler.body[-1]
    return bool(named & {"Exception", "BaseException"}) and not (isinstance(last, ast.Raise) and last.exc is None)


def test_the_one_handler_that_catches_everything_is_the_command_lines() -> None:
    handlers = [(name, node) for name, tree in MODULES.items() for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    assert [name for name, handler in handlers if catches_everything(handler)] == ["cli.py"]


HELP = """
import sys
sys.argv = ["fenno", "--help"]
from fenno.cli import main
try:
    main()
except SystemExit as end:
    print("\\nheavy:", *sorted({name.split(".")[0] for name in sys.modules} & set(%r)))
    raise
"""


def test_help_imports_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", HELP % sorted(HEAVY | LAZY)], capture_output=True, text=True, check=True)
    assert "Usage: fenno" in done.stdout
    assert done.stdout.splitlines()[-1].split() == ["heavy:"]


def test_help_is_there_in_a_third_of_a_second() -> None:
    fenno = str(Path(sys.executable).with_name("fenno"))

    def seconds() -> float:
        """Of processor time, since other programs on this host are not fenno's fault."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([fenno, "--help"], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(7)) <= 0.35


@pytest.mark.parametrize(
    "argv",
    [
        ["vllm", "serve", "m"],
        [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"],
        [sys.executable, "-I", "-S", "fenno/guard.py", "10", "-", sys.executable, "fenno/engine/inside/launch.py", "serve"],
        [sys.executable, "-m", "pip", "install", "x"],
        ["/usr/local/cuda/bin/nvcc", "--version"],
    ],
)
def test_a_fast_test_cannot_start_what_is_slow(argv: list[str], tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="not marked for it"):
        subprocess.run(argv, check=False)


def test_a_stand_in_may_be_started(tmp_path: Path) -> None:
    assert heavy([tmp_path / "vllm", "serve"], tmp_path) is None
    assert heavy(["git", "grep", "vllm"], tmp_path) is None


def test_a_test_that_is_tried_again_has_its_scenarios_run_again(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Again, "now", Again.now)
    with side_by_side({"one": str}, tmp_path_factory.mktemp, place=Path) as tell:
        told = []
        for tries in (1, 1, 2, 2, 3):
            pytest_runtest_setup(SimpleNamespace(nodeid="a test", execution_count=tries))  # type: ignore[arg-type]
            told.append(tell("one"))
    assert told[0] == told[1] != told[2] == told[3] != told[4]
