"""Builds units of FlashAttention-2 with the release's own flags, to hold the trimmed ones against; one line of JSON.

usage: stock.py MODEL_DIR ARCH ARCHIVE OUT same|others    (fenno on PYTHONPATH, run by the interpreter that has torch)

"same": the units that `fenno build-fa2` compiles for the model, as its --stock would build them. "others": three more units,
two of them backward, whose times stand for the rest of the release. Stopped by SIGTERM, it tells what is through.
"""

import contextlib
import dataclasses
import json
import signal
import sys
from pathlib import Path

from fenno.errors import FennoError
from fenno.fa2 import build, lattice, need, plan, releases, toolchain
from fenno.fa2.source import Given

OTHERS = tuple(lattice.Unit(direction, head, "bf16", True) for direction, head in (("fwd", 64), ("bwd", 64), ("bwd", 128)))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(model: str, arch: str, archive: str, out: str, which: str) -> None:
    config = json.loads(Path(model, "config.json").read_text())
    trimmed = plan.make(
        need.of(config, "stock"),
        releases.release(releases.NEWEST),
        plan.codes(arch),
        **plan.capacity(),
        consumer="transformers",
    )
    units = trimmed.units if which == "same" else OTHERS
    counts = {Path(unit.file).stem: len(lattice.kernels(unit, trimmed.release)) for unit in units}
    made = plan.with_stock_flags(dataclasses.replace(trimmed, units=units))
    found = toolchain.look(sys.executable)
    wheel = None
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt, FennoError):
        wheel = build.build(made, found, sys.executable, Given(Path(archive)), Path(out), say).wheel
    times = [build.timed(tree) for tree in Path(out).glob("*/flash_attn-*")]
    known = {name: seconds for each in times for name, seconds in each.items() if name in counts}
    print(json.dumps({"wheel": str(wheel) if wheel else None, "seconds": known, "kernels": {name: counts[name] for name in known}}))


if __name__ == "__main__":
    main(*sys.argv[1:])
