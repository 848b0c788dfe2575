"""What happens to the GPUs while a run lasts: errors, clocks held back, links lost, Xids. Told once, when it changes."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fenno.doctor.facts import Card, Gpus
from fenno.doctor.gpus import SLOW

XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)(?:, (.*))?")
# What NVIDIA's catalogue of Xids says of those that end a server.
XIDS = {
    13: "a kernel read or wrote where it must not",
    31: "a page fault on the GPU: usually the program",
    43: "a program was stopped, the GPU is well",
    48: "a memory error that could not be corrected",
    63: "a memory row waits to be remapped",
    64: "remapping a memory row failed",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    94: "a contained memory error: the program that met it ended",
    95: "an uncontained memory error: reset the GPU",
    119: "the GPU's own processor (GSP) does not answer",
}


def watch(ask: Callable[[], Gpus | None], kernel: Callable[[], list[str]], interval: float) -> Iterator[str]:
    """One line for each thing that happens, without end. `ask` looks at the GPUs, `kernel` gives the new lines of its log."""
    before = ask()
    yield f"watching {len(before.cards)} GPU(s)" if before else "NVML does not answer"
    while True:
        time.sleep(interval)
        now = ask()
        yield from changes(before, now)
        yield from xids(kernel())
        before = now


def changes(before: Gpus | None, now: Gpus | None) -> list[str]:
    """What is worse, or well again, between two looks."""
    if before is None or now is None:
        return (
            [] if (before is None) == (now is None) else ["NVML does not answer any more" if now is None else "NVML answers again"]
        )
    there = {card.index: card for card in now.cards}
    gone = [f"GPU {card.index}: gone" for card in before.cards if card.index not in there]
    return gone + [line for card in before.cards if card.index in there for line in _card(card, there[card.index])]


def _card(before: Card, now: Card) -> list[str]:
    """What changed on one card."""
    said = []
    if (now.uncorrected or 0) > (before.uncorrected or 0):
        said.append(f"{(now.uncorrected or 0) - (before.uncorrected or 0)} more uncorrected memory error(s)")
    if now.remap and before.remap and now.remap != before.remap:
        said.append(
            "memory rows: " + ("remapping failed" if now.remap[3] else "one waits to be remapped" if now.remap[2] else "remapped")
        )
    for bit, word in SLOW.items():
        if (now.throttle or 0) & bit and not (before.throttle or 0) & bit:
            said.append(f"{word} begins")
        elif (before.throttle or 0) & bit and not (now.throttle or 0) & bit:
            said.append(f"{word} is over")
    up = [sum(1 for state in card.links if state == 1) for card in (before, now)]
    if up[0] != up[1]:
        said.append(f"{up[1]} NVLinks up, there were {up[0]}")
    if (now.link_errors or 0) > (before.link_errors or 0) and before.link_errors is not None:
        said.append(f"{(now.link_errors or 0) - before.link_errors} more error(s) on its NVLinks")
    if before.pcie_width and now.pcie_width and before.pcie_width[0] != now.pcie_width[0]:
        said.append(f"PCIe x{now.pcie_width[0]}, it was x{before.pcie_width[0]}")
    return [f"GPU {now.index}: {line}" for line in said]


def xids(lines: list[str]) -> list[str]:
    """The NVIDIA driver's error numbers in the kernel's log, with what they mean."""
    found = [match for line in lines if (match := XID.search(line))]
    return [f"Xid {m[2]} on {m[1]}: {XIDS.get(int(m[2]), m[3] or 'see the catalogue of Xids')}" for m in found]


@contextlib.contextmanager
def kernel_log(path: Path = Path("/dev/kmsg")) -> Iterator[Callable[[], list[str]]]:
    """The lines that the kernel's log gets while the block lasts; none where it may not be read (it takes root, or CAP_SYSLOG)."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        yield list
        return
    try:
        with contextlib.suppress(OSError):
            os.lseek(file, 0, os.SEEK_END)
        yield lambda: _lines(file)
    finally:
        os.close(file)


def _lines(file: int) -> list[str]:
    """What can be read now; the kernel gives one record a read."""
    found: list[str] = []
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        while data := os.read(file, 8192):
            found += data.decode(errors="replace").splitlines()
    return found
