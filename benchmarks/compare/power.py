"""How often `fenno compare` is wrong, and how often it finds what is there.

    python benchmarks/compare/power.py same --url http://127.0.0.1:8000 --recipe cpu-small --number 1
    python benchmarks/compare/power.py five-percent --number 1
    python benchmarks/compare/power.py sum

`same`: a server that runs, with itself: "different" is an error, and 5 % of them are allowed. `five-percent`: two calibration
servers of which one takes 5 % longer to its first token, whose time varies from request to request as a loaded engine's does; which
of the two is slower changes from one comparison to the next. One call makes one comparison, of a minute and a half, and adds a line
to results/KIND.jsonl, so that a busy host can be left alone in between. `sum` writes results/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fenno import machine, recipe
from fenno.compare import run
from fenno.compare.block import Arm, Making
from fenno.load import calibration, job
from fenno.load.calibration import Timing
from fenno.load.plan import Plan
from fenno.recipe import LengthClass, Recipe, Workload

RESULTS = Path(__file__).with_name("results")
BASE = Timing(ttft=0.1, itl=0.005, spread=0.2)
SLOWER = 1.05
ALIKE = ("not distinguishable", "equivalent")
SHORT = Workload(classes=(LengthClass(name="short", share=1.0, prompt_tokens=64, output_tokens=8),), users=40)


def compare(recipes: list[Recipe], plan: Plan, rounds: int, folder: Path) -> dict[str, Any]:
    arms = [Arm(letter, each.engine.url or "", each) for letter, each in zip("AB", recipes, strict=False)]
    return run.document(run.live(arms, Making(plan, folder), rounds, print), arms, None, folder)


def of_url(url: str, workload: Workload) -> Recipe:
    return job.of_url(url, None, workload.endpoint, None).model_copy(update={"workload": workload})


def same(number: int, url: str, name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """One server twice, with the recipe's traffic and targets. The seed is another one each time."""
    named = recipe.load(recipe.find(name))
    mine = of_url(url, named.workload).model_copy(update={"targets": named.targets})
    plan = job.plan(mine, duration=5.0, warmup=1.0, seed=1000 * number)
    return compare([mine, mine], plan, 6, folder), {"server": name}


def five_percent(number: int, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two calibration servers; the slower one is B when the number is even, else A."""
    slow = dataclasses.replace(BASE, ttft=BASE.ttft * SLOWER)
    clocks = (BASE, slow) if number % 2 == 0 else (slow, BASE)
    places = [folder / "first", folder / "second"]
    for place in places:
        place.mkdir()
    with calibration.serving(places[0], clocks[0]) as first, calibration.serving(places[1], clocks[1]) as second:
        recipes = [of_url(server.url, SHORT) for server in (first, second)]
        plan = job.plan(recipes[0], duration=4.0, warmup=0.5, seed=1000 * number)
        found = compare(recipes, plan, 7, folder / "blocks")
    return found, {"expected": "worse" if number % 2 == 0 else "better"}


def right(kind: str, row: dict[str, Any]) -> bool | None:
    """Whether a comparison said what is so; None when it was no measurement."""
    if not row["valid"]:
        return None
    return row["verdict"] in ALIKE if kind == "same" else row["table"]["p95_ttft"]["state"] == row["expected"]


def row_of(number: int, found: dict[str, Any], extra: dict[str, Any], seconds: float) -> dict[str, Any]:
    keys = ("state", "change", "p", "p_adjusted")
    table = {each["metric"]: {key: each[key] for key in keys} for each in found["findings"] if each["table"]}
    facts = {"number": number, "at": datetime.now(timezone.utc).isoformat(timespec="seconds"), "seconds": round(seconds, 1)}
    blocks = {name: arm["blocks"] for name, arm in found["arms"].items()}
    verdict = {"valid": found["valid"], "verdict": found["verdict"]["B"], "blocks": blocks, "left_out": found["left_out"]}
    return {**facts, **extra, **verdict, "table": table, "host": host()}


def host() -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in ("fenno", "locust", "gevent")}
    return {"cpu": machine.processor_name(), "cores": os.cpu_count(), "python": platform.python_version(), **versions}


def summary() -> str:
    """Both kinds, from their lines."""
    lines = ["# How often `fenno compare` is wrong, and how often it finds what is there", "", "Written by `power.py sum`."]
    for path in sorted(RESULTS.glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        told = [right(path.stem, row) for row in rows]
        lines += ["", f"## {path.stem}", "", f"{sum(map(bool, told))} right of {sum(each is not None for each in told)} measured; "]
        lines[-1] += f"{told.count(None)} were no measurement. {rows[0]['at']} to {rows[-1]['at']}, {json.dumps(rows[0]['host'])}."
        lines += ["", "| number | verdict on B | P95 TTFT of B against A | p, adjusted | blocks of each | seconds | |"]
        lines.append("| --- | --- | --- | --- | --- | --- | --- |")
        lines += [_line(row, good) for row, good in zip(rows, told, strict=True)]
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any], good: bool | None) -> str:
    ttft = row["table"].get("p95_ttft") or {}
    change = ttft.get("change")
    ends = [f"{100 * (change[key] - 1):+.1f}" for key in ("value", "low", "high")] if change and change["low"] else None
    shown = f"{ends[0]} % ({ends[1]} to {ends[2]}): {ttft['state']}" if ends else ttft.get("state", "—")
    said = {True: "right", False: "**wrong**", None: "no measurement"}[good]
    p = f"{ttft['p_adjusted']:.2g}" if ttft else "—"
    return f"| {row['number']} | {row['verdict']} | {shown} | {p} | {row['blocks']['A']} | {row['seconds']:.0f} | {said} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=["same", "five-percent", "sum"])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="same: the server")
    parser.add_argument("--recipe", default="cpu-small", help="same: whose workload it gets")
    parser.add_argument("--number", type=int, default=1)
    parser.add_argument("--no-write", action="store_true")
    args = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    if args.kind == "sum":
        (RESULTS / "README.md").write_text(summary())
        return
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        if args.kind == "same":
            found, extra = same(args.number, args.url, args.recipe, Path(place))
        else:
            found, extra = five_percent(args.number, Path(place))
    row = row_of(args.number, found, extra, time.monotonic() - began)
    print(json.dumps(row, indent=1), "right:", right(args.kind, row))
    if not args.no_write:
        with (RESULTS / f"{args.kind}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
