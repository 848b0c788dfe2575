"""Other tile sizes tried on this host's GPU: one library that has them all is built, checked, timed, and what is faster is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fenno.errors import BuildError
from fenno.fa2 import build, tiles, verify
from fenno.fa2.lattice import Tile, Unit
from fenno.fa2.plan import Plan, capacity, most_jobs, wall
from fenno.fa2.source import Given
from fenno.fa2.toolchain import Toolchain
from fenno.fa2.verify import Case
from fenno.units import show_duration


@dataclass(frozen=True)
class Tried:
    """One unit's tiles. `wrong`: those that failed, and how; `rows`: for each shape the times of the others, with upstream's.
    `calls`: what their first calls and their launches cost, as `inside/bench.py` says it."""

    unit: Unit
    stock: Tile
    wrong: dict[str, str]
    rows: list[dict[str, Any]]
    kept: Tile | None
    calls: Mapping[str, Any] = field(default_factory=dict)


def run(
    plan: Plan, found: Toolchain, python: str, given: Given, out: Path, folder: Path, say: Callable[[str], None], jobs: int | None
) -> list[Tried]:
    """Try every possible tile. `folder`: an empty one. Raises `BuildError`, `DiskError`, `UsageError`."""
    made = tiles.experiment(plan)
    made = replace(made, jobs=jobs or most_jobs(len(tiles.estimates(made)), **capacity()))
    many, time = sum(map(len, made.tiles.values())), wall(list(tiles.estimates(made).values()), made.jobs)
    say(f"{many} tiles in one library, for {len(made.tiles)} units: about {show_duration(round(time))}")
    built = build.build(made, found, python, given, out, say)
    library = verify.unpack(built.wheel, folder)
    return [one(unit, wanted, plan, python, library) for unit, wanted in made.tiles.items()]


def one(unit: Unit, wanted: Sequence[Tile], plan: Plan, python: str, library: Path) -> Tried:
    """Check and time the tiles of one unit; those that answer wrong are not timed."""
    variants = {str(tile): {tiles.variable(unit): str(tile)} for tile in wanted}
    stock = tiles.upstreams(unit)
    results = checked(python, library.parent, checks(unit, plan), list(variants.values()))
    wrong: dict[str, str] = {}
    for tile, variant in variants.items():
        faults = verify.faults([row for row in results if row.get("variant") == variant])
        wrong |= {tile: faults[0]} if faults else {}
    right = {tile: variant for tile, variant in variants.items() if tile not in wrong}
    timed = verify.time_shapes(python, dict.fromkeys(right, library), shapes(unit, plan), right) if right else []
    rows = [row for row in timed if "shape" in row]
    calls = next((row for row in timed if "first_call_ms" in row), {})
    return Tried(unit, stock, wrong, rows, tiles.kept(rows, stock) if str(stock) in right else None, calls)


def checked(python: str, unpacked: Path, cases: Sequence[Case], variants: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """What every variant answers. An illegal access takes the GPU from the process it happens in: those after it are asked in
    another one. Raises `BuildError`."""
    results: list[dict[str, Any]] = []
    left = list(variants)
    while left:
        found = verify.compare(python, unpacked, cases, variants=left)
        asked = sum(any(row.get("variant") == variant for row in found) for variant in left)
        if not asked:
            raise BuildError(f"torch sees no GPU under {python}", "does CUDA_VISIBLE_DEVICES hide it?")
        results, left = results + found, left[asked:]
    return results


def shapes(unit: Unit, plan: Plan) -> list[Case]:
    """What is timed for a unit: prompts run with a mask; decoding without one, and split where there are few sequences."""
    prompts, steps = ([case for case in verify.shapes(plan) if case.kind == kind] for kind in ("whole", "cache"))
    if unit.direction == "fwd_split":
        return [case for case in steps if case.batch < 64]
    return prompts if unit.causal else [case for case in steps if case.batch >= 64]


def checks(unit: Unit, plan: Plan) -> list[Case]:
    """The calls whose outputs are compared for each tile of a unit."""
    alike = [case for case in verify.cases(plan) if case.head_dim == plan.need.sizes[-1] and case.dtype == unit.dtype]
    if unit.direction == "fwd":
        return [case for case in alike if case.kind in ("whole", "uneven") and case.causal == unit.causal]
    return [case for case in alike if case.kind in ("cache", "paged", "append") and case.queries == 1]


def keep(plan: Plan, tried: Sequence[Tried]) -> Plan:
    """The plan with the tiles that are kept; the plan itself when upstream's stay."""
    wanted = {each.unit: (each.kept,) for each in tried if each.kept}
    return tiles.with_tiles(plan, wanted) if wanted else plan


def document(tried: Sequence[Tried]) -> list[dict[str, Any]]:
    """What was tried, as JSON."""
    return [
        {
            "unit": tiles.name(each.unit),
            "upstream": str(each.stock),
            "kept": str(each.kept or each.stock),
            "wrong": each.wrong,
            "calls": dict(each.calls),
            "shapes": [{"shape": str(Case(**row["shape"])), "times": row["times"]} for row in each.rows],
        }
        for each in tried
    ]


def lines(tried: Sequence[Tried]) -> list[str]:
    """The table for people: medians in microseconds, upstream's tile first, the others by their time on the first shape."""
    told = []
    for each in tried:
        told.append(f"{tiles.name(each.unit)}: upstream's {each.stock}, kept {each.kept or 'that'}")
        told += [f"  {tile}: {fault}" for tile, fault in each.wrong.items()]
        told += verify.timing_lines(each.calls)
        for row in each.rows:
            own = row["times"][str(each.stock)]
            told.append(f"  {Case(**row['shape'])}")
            told += [f"    {name:>10} {cell(time, own)}" for name, time in ordered(row["times"], each.stock)]
    return told


def ordered(times: Mapping[str, Any], stock: Tile) -> list[tuple[str, Any]]:
    return sorted(times.items(), key=lambda pair: (pair[0] != str(stock), pair[1]["median"]))


def cell(time: Mapping[str, float], own: Mapping[str, float]) -> str:
    return f"{time['median']:9.1f} us ({time['low']:.1f} to {time['high']:.1f}), {time['median'] / own['median']:.3f} of upstream's"
