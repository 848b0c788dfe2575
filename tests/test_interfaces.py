"""What fenno's plugin needs of vLLM is there in vLLM's sources: read, not imported.

Reads the vLLM of this Python, and every folder in VLLM_SOURCES (that of a wheel, unpacked; several with colons between).
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[1] / "fenno" / "vllm_plugin"
MODULES = sorted(path.name for path in PLUGIN.glob("*.py") if "vllm" in path.read_text())
SCHEDULER = "vllm.v1.core.sched.scheduler"


def roots() -> list[Path]:
    given = [Path(folder) for folder in os.environ.get("VLLM_SOURCES", "").split(os.pathsep) if folder]
    spec = importlib.util.find_spec("vllm")
    own = Path(next(iter(spec.submodule_search_locations))).parent if spec and spec.submodule_search_locations else None
    return [*given, *([own] if own else [])]


pytestmark = pytest.mark.skipif(not roots(), reason="no vLLM in this Python, and no folder in VLLM_SOURCES")


@pytest.fixture(params=roots(), ids=lambda path: path.name)
def root(request: pytest.FixtureRequest) -> Path:
    return request.param


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def source(root: Path, module: str) -> Path | None:
    path = root.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def find(root: Path, module: str, name: str) -> ast.AST | None:
    """What defines `name` in `module`, wherever it comes from; None if nothing does."""
    file = source(root, module)
    if file is None:
        return None
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and name in [one.asname or one.name for one in node.names]:
            real = next(one.name for one in node.names if (one.asname or one.name) == name)
            return find(root, imported(module, file, node), real)
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return node
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            found = find(root, imported(module, file, node), name)
            if found is not None:
                return found
        # A lazy package keeps a table of where each name lives.
        if isinstance(node, ast.Dict) and name in [key.value for key in node.keys if isinstance(key, ast.Constant)]:
            return node
    return source(root, f"{module}.{name}") and ast.Module([], [])


def imported(module: str, file: Path, node: ast.ImportFrom) -> str:
    """The absolute name of the module that `node` imports from."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + (file.name == "__init__.py")]
    return ".".join([*parts, *([node.module] if node.module else [])])


def of_vllm(name: str) -> dict[str, tuple[str, str]]:
    """What a module of the plugin imports from vLLM: the name it has there -> module and name."""
    nodes = [node for node in ast.walk(tree(PLUGIN / name)) if isinstance(node, ast.ImportFrom) and not node.level]
    return {
        one.asname or one.name: (node.module, one.name)
        for node in nodes
        if node.module and node.module.partition(".")[0] == "vllm"
        for one in node.names
    }


def members(root: Path, module: str, name: str) -> set[str]:
    """Methods and fields of a class and of its bases, and what its methods set on `self`."""
    found = find(root, module, name)
    assert isinstance(found, ast.ClassDef), f"{module}.{name}"
    names: set[str] = set()
    for node in ast.walk(found):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            names.add(node.attr)
    for base in found.bases:
        if isinstance(base, ast.Name) and isinstance(find(root, module, base.id), ast.ClassDef):
            names |= members(root, module, base.id)
    return names


def read_of(tree_: ast.AST, names: set[str]) -> set[str]:
    """The attributes that are read of variables called one of `names`."""
    return {
        node.attr
        for node in ast.walk(tree_)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and isinstance(node.value, ast.Name)
        and node.value.id in names
    }


@pytest.mark.parametrize("name", MODULES)
def test_whatever_the_plugin_imports_is_there(root: Path, name: str) -> None:
    wanted = of_vllm(name)
    assert {spelt for spelt, (module, real) in wanted.items() if find(root, module, real) is None} == set()


def calls(name: str) -> Iterator[tuple[str, set[str]]]:
    wanted = of_vllm(name)
    for node in ast.walk(tree(PLUGIN / name)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in wanted:
            yield node.func.id, {one.arg for one in node.keywords if one.arg}


def taken(root: Path, module: str, name: str) -> set[str] | None:
    """The names of the arguments of a function or class; None where it takes anything or only running it would tell."""
    found = find(root, module, name)
    if isinstance(found, ast.ClassDef):
        inits = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        if not inits:
            return None
        found = inits[0]
    if not isinstance(found, ast.FunctionDef) or found.args.kwarg:
        return None
    return {one.arg for one in [*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs]}


@pytest.mark.parametrize("name", MODULES)
def test_every_argument_that_grok_gives_to_vllms_layers_is_taken(root: Path, name: str) -> None:
    wanted, refused, seen = of_vllm(name), {}, 0
    for called, keywords in calls(name):
        known = taken(root, *wanted[called])
        seen += known is not None
        if known is not None and keywords - known:
            refused[called] = keywords - known
    assert refused == {}
    assert seen >= 8 or name != "grok.py"


def test_every_argument_of_the_experts_is_taken(root: Path) -> None:
    given = next(
        {one.arg for one in node.keywords}
        for node in ast.walk(tree(PLUGIN / "grok.py"))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "fused_experts"
    )
    package = "vllm.model_executor.layers.fused_moe"
    names = [
        name for name in ("FusedMoEFactory", "FusedMoE") if isinstance(find(root, package, name), ast.ClassDef | ast.FunctionDef)
    ]
    known = taken(root, package, names[0])
    assert known is not None
    assert given - known <= {"ckpt_names"}


@pytest.mark.parametrize("base", ["Scheduler", "AsyncScheduler"])
def test_whatever_the_scheduler_touches_of_its_base_is_there(root: Path, base: str) -> None:
    own = next(
        node for node in ast.walk(tree(PLUGIN / "scheduler.py")) if isinstance(node, ast.ClassDef) and node.name == "Steered"
    )
    set_here = {node.attr for node in ast.walk(own) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    defined = {node.name for node in own.body if isinstance(node, ast.FunctionDef)}
    module = SCHEDULER if base == "Scheduler" else "vllm.v1.core.sched.async_scheduler"
    there = members(root, module, base)
    versions = read_of(tree(PLUGIN / "versions.py"), {"scheduler"})
    assert versions >= {"running", "max_num_running_reqs"}
    assert (read_of(own, {"self"}) - defined - set_here) | versions <= there
    # What it overrides is really called by vLLM, and with what it passes on.
    overridden = {"schedule", "add_request", "_preempt_request", "reset_prefix_cache"}
    assert overridden <= defined & there


def test_whatever_is_read_of_requests_and_configurations_is_there(root: Path) -> None:
    request = read_of(tree(PLUGIN / "scheduler.py"), {"request", "r"}) - {"order"}
    assert request >= {"arrival_time", "priority", "max_tokens"}
    assert request <= members(root, "vllm.v1.request", "Request")
    config = read_of(tree(PLUGIN / "versions.py"), {"config"})
    assert config >= {"long_prefill_token_threshold", "get_scheduler_cls"}
    assert config <= members(root, "vllm.config.scheduler", "SchedulerConfig")
    assert {"data_parallel_index", "data_parallel_size"} <= members(root, "vllm.config.parallel", "ParallelConfig")


def test_requests_are_compared_by_their_priority_first(root: Path) -> None:
    less = next(
        node
        for node in ast.walk(find(root, "vllm.v1.request", "Request") or ast.Module([], []))
        if isinstance(node, ast.FunctionDef) and node.name == "__lt__"
    )
    attributes = [node.attr for node in ast.walk(less) if isinstance(node, ast.Attribute)]
    assert attributes[0] == "priority"


def test_a_request_waits_in_a_queue_that_fenno_knows(root: Path) -> None:
    from fenno.vllm_plugin import versions

    created = {
        target.attr
        for node in ast.walk(find(root, SCHEDULER, "Scheduler") or ast.Module([], []))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if isinstance(target, ast.Attribute) and getattr(node.value.func, "id", "") == "create_request_queue"
    }
    assert "waiting" in created
    assert created <= set(versions.QUEUES)
