"""Whether a wheel answers right: which calls show it, what their results come to, how it is told.

The calls themselves run under the interpreter that the wheel is for (`inside/verify.py`, `inside/bench.py`), from an unpacked copy:
nothing is installed for it.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fenno import process
from fenno.errors import BuildError
from fenno.fa2.lattice import DTYPES, Switch
from fenno.fa2.plan import Plan

INSIDE = Path(__file__).parent / "inside"
TIMEOUT = 900.0
# As upstream's own tests: at most so many times the error that plain torch makes in the same dtype.
MARGIN = 3.0
SMALL = 1e-5
NOTABLE = 50.0  # microseconds: what is shorter is timed, and not judged
DIED = "run it again; CUDA_LAUNCH_BLOCKING=1 names the place"
CAP, WINDOW = 30.0, 256
ON: Mapping[Switch, Mapping[str, Any]] = {"softcap": {"softcap": CAP}, "local": {"window": WINDOW}, "alibi": {"alibi": True}}


@dataclass(frozen=True)
class Case:
    """One call. `kind`: whole sequences of one length; uneven ones, packed; a cache, one with pages, one that is appended to.

    `queries` and `keys`: tokens of the longest sequence. `window`: tokens to the left that are seen, 0 for all.
    """

    kind: Literal["whole", "uneven", "cache", "paged", "append"]
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    causal: bool = True
    softcap: float = 0.0
    window: int = 0
    alibi: bool = False

    def __str__(self) -> str:
        extra = [f"soft cap {self.softcap:g}"] * (self.softcap > 0) + [f"window {self.window}"] * (self.window > 0)
        extra += ["ALiBi"] * self.alibi + ["not causal"] * (not self.causal)
        sizes = f"{self.batch} x {self.queries} over {self.keys}"
        return f"{self.kind} {sizes}, head size {self.head_dim} {self.dtype}{''.join(f', {word}' for word in extra)}"


def cases(plan: Plan) -> tuple[Case, ...]:
    """The calls whose outputs are compared: every mask and cache, for each head size, dtype and feature of the plan."""
    return tuple(
        replace(case, **change)
        for head in plan.need.sizes
        for dtype in plan.need.dtypes
        for case in _sizes(plan, head, dtype)
        for change in _features(plan)
    )


def _sizes(plan: Plan, head: int, dtype: str) -> Iterator[Case]:
    rest = (plan.need.heads, plan.need.kv_heads, head, dtype)
    yield Case("whole", 1, 1024, 1024, *rest)
    yield Case("whole", 2, 999, 999, *rest)
    yield Case("whole", 2, 999, 999, *rest, causal=False)
    yield Case("whole", 1, 113, 2048, *rest)
    yield Case("uneven", 5, 1000, 1000, *rest)
    yield Case("cache", 4, 5, 1500, *rest)
    yield Case("append", 8, 1, 3000, *rest)
    for batch, keys in ((1, 4096), (8, 3000), (64, 2048)):
        yield Case("cache", batch, 1, keys, *rest)
        yield Case("paged", batch, 1, keys, *rest)


def _features(plan: Plan) -> list[Mapping[str, Any]]:
    """What is changed about a call: nothing, each feature that the plan keeps, and all at once: Gemma-2 has a cap and a window."""
    kept = [change for switch, change in ON.items() if switch not in plan.off]
    together = {name: value for change in kept for name, value in change.items()}
    return [{}, *kept, *([together] if len(kept) > 1 else [])]


def refused(plan: Plan) -> tuple[Case, ...]:
    """Calls that the wheel has to refuse: a head size, a dtype and each feature that was left out."""
    # More keys than the window: upstream takes a wider one for none.
    tokens = 2 * WINDOW
    plain = Case("whole", 1, tokens, tokens, plan.need.heads, plan.need.kv_heads, plan.need.sizes[0], plan.need.dtypes[0])
    found = [replace(plain, head_dim=head) for head in plan.release.heads if head not in plan.heads][:1]
    found += [replace(plain, dtype=dtype) for dtype in DTYPES if dtype not in plan.need.dtypes]
    return (*found, *(replace(plain, **change) for switch, change in ON.items() if switch in plan.off))


def shapes(plan: Plan) -> tuple[Case, ...]:
    """The calls that are timed: prompts and steps of decoding as servers have them, with the model's soft cap."""
    head, dtype = plan.need.sizes[-1], plan.need.dtypes[0]
    rest = (plan.need.heads, plan.need.kv_heads, head, dtype, True, 0.0 if "softcap" in plan.off else CAP)
    prompts = [Case("whole", batch, tokens, tokens, *rest) for batch, tokens in ((1, 512), (1, 2048), (1, 8192), (8, 1024))]
    steps = [(1, 1024), (1, 8192), (8, 4096), (64, 1024), (64, 4096)]
    return (*prompts, *(Case("cache", batch, 1, keys, *rest) for batch, keys in steps))


def timed_shapes(plan: Plan) -> tuple[Case, ...]:
    """What is timed of a wheel; with a soft cap the same calls without it, too, since torch's own attention has none."""
    found = shapes(plan)
    return found if "softcap" in plan.off else (*(replace(case, softcap=0.0) for case in found), *found)


def against_stock(timed: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The wheel's median over that with stock flags, lowest and highest of the shapes of 50 us and more; None without any."""
    pairs = [(row["times"]["fenno"]["median"], row["times"]["stock"]["median"]) for row in timed if "stock" in row.get("times", ())]
    ratios = [fenno / stock for fenno, stock in pairs if stock >= NOTABLE]
    return {"shapes": len(ratios), "lowest": min(ratios), "highest": max(ratios)} if ratios else None


def faults(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong, by the lines that `inside/verify.py` printed; none for a wheel that answers right."""
    found = []
    for row in results:
        if "error" in row and not row["error"] <= MARGIN * row["plain"] + SMALL:
            found.append(f"{Case(**row['case'])}: wrong by {row['error']:.2g}, where plain torch is by {row['plain']:.2g}")
        elif "failed" in row:
            found.append(f"{Case(**row['case'])}: {row['failed']}")
        elif "said" in row and row["said"] is None:
            found.append(f"{Case(**row['refused'])}: was left out, and yet it answers")
    return found


def summary(results: Sequence[Mapping[str, Any]], timed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a verification came to, as JSON."""
    head = results[0]
    compared = [row for row in results if "error" in row]
    return {
        **{key: head[key] for key in ("gpu", "torch", "flash_attn")},
        "compared": len(compared),
        "refused": sum("said" in row and row["said"] is not None for row in results),
        "worst": max((row["error"] / max(row["plain"], SMALL) for row in compared), default=None),
        "faults": faults(results),
        "timings": [dict(row) for row in timed],
        "against_stock": against_stock(timed),
    }


def lines(found: Mapping[str, Any]) -> list[str]:
    """A verification for people."""
    if found["gpu"] is None:
        return ["verified: it imports, and its library is whole; outputs and times are skipped: torch sees no GPU here"]
    worst = found["worst"]
    allowed = f"as far off as plain torch in the same dtype ({MARGIN:g} is allowed)"
    how = "" if worst is None else f", the worst {worst:.2f} times {allowed}"
    told = [
        f"verified on {found['gpu']}: {found['compared']} outputs against float64{how}; "
        f"{found['refused']} calls of what was left out raise",
        *(f"  WRONG: {fault}" for fault in found["faults"]),
    ]
    told += [line for row in found["timings"] for line in timing_lines(row)]
    ratio = found["against_stock"]
    if ratio:
        span = f"{ratio['lowest']:.3f} to {ratio['highest']:.3f} of their time"
        told += [f"  beside the same units with stock flags: {span}, on the {ratio['shapes']} shapes of {NOTABLE:g} us and more"]
    return told


def timing_lines(row: Mapping[str, Any]) -> list[str]:
    """One line of times: microseconds a call, medians and quartiles of interleaved replays."""
    if "shape" in row:
        case = Case(**row["shape"])
        times = ", ".join(f"{name} {t['median']:.1f} us ({t['low']:.1f} to {t['high']:.1f})" for name, t in row["times"].items())
        return [f"  {case}: {times.replace('sdpa', 'sdpa without the cap') if case.softcap else times}"]
    return [
        f"  {name}: first call {row['first_call_ms'][name]:.1f} ms, launch {row['launch_us'][name]:.1f} us"
        for name in row.get("first_call_ms", {})
    ]


def unpack(wheel: Path, folder: Path) -> Path:
    """A wheel's files in a folder; its library's path."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return next(folder.glob("flash_attn_2_cuda*.so"))


def run(plan: Plan, wheel: Path, python: str, folder: Path, stock: Callable[[], Path] | None = None) -> dict[str, Any]:
    """Verify a wheel; its summary. `folder`: an empty one for this. `stock` makes a wheel of the same units with stock flags, to be
    timed beside it. Raises `BuildError` when it cannot be imported or dies."""
    libraries = {"fenno": unpack(wheel, folder / "wheel")}
    results = compare(python, folder / "wheel", cases(plan), refused(plan))
    # A wheel that is wrong is not timed: it may well die of it, and that would hide what is wrong.
    if results[0]["gpu"] is None or faults(results):
        return summary(results, [])
    if stock:
        libraries["stock"] = unpack(stock(), folder / "stock")
    return summary(results, time_shapes(python, libraries, timed_shapes(plan)))


def compare(
    python: str, unpacked: Path, wanted: Sequence[Case], refused: Sequence[Case] = (), variants: Sequence[Mapping[str, str]] = ({},)
) -> list[dict[str, Any]]:
    """Call an unpacked wheel; what `inside/verify.py` says of each call. Raises `BuildError` when it dies."""
    results = _ask(python, "verify.py", {"cases": wanted, "refused": refused, "variants": variants}, unpacked)
    if results[-1].get("done") is not True:
        last = Case(**results[-1]["case"]) if "case" in results[-1] else "the import"
        raise BuildError(f"the verification died after {last}", DIED)
    return results


def time_shapes(
    python: str, libraries: Mapping[str, Path], wanted: Sequence[Case], variants: Mapping[str, Mapping[str, str]] | None = None
) -> list[dict[str, Any]]:
    """Time calls of several libraries against each other and torch's own attention. Raises `BuildError` when it dies."""
    asked = {"libraries": {name: str(path) for name, path in libraries.items()}, "shapes": wanted, "variants": variants or {}}
    results = _ask(python, "bench.py", asked, None)
    if results[-1].get("done") is not True:
        raise BuildError("the timing died", DIED)
    return results[:-1]


def _ask(python: str, script: str, asked: Mapping[str, Any], path: Path | None) -> list[dict[str, Any]]:
    """The lines that a script prints. Raises `BuildError` with the last line of its errors when there is none."""
    text = json.dumps(asked, default=asdict)
    before = process.environment(None).get("PYTHONPATH")
    env = {"PYTHONPATH": ":".join(filter(None, [str(path), before]))} if path else {}
    done = process.run([python, str(INSIDE / script)], timeout=TIMEOUT, env={"PYTHONSAFEPATH": "1", **env}, text_input=text)
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not found:
        last = process.last_line(done.stderr)
        raise BuildError(f"the wheel does not run under {python}: {last}", "is this the interpreter it was built for?")
    return found
