"""Checks of what connects the GPUs, in the words of somebody who wants tensor parallelism."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import combinations

from fenno.doctor.check import Check, Finding, check, fail, ok, skip, warn
from fenno.doctor.facts import Facts, Topology
from fenno.doctor.host import MIB

# vllm/distributed/device_communicators/custom_all_reduce.py; 16 since 0.32, on one host never.
CUSTOM = (2, 4, 6, 8)
# NVLinks of GPUs that come as modules, by NVML's name (NVIDIA's data sheets).
LINKS = {
    **dict.fromkeys(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"), 12),
    **dict.fromkeys(("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200"), 18),
}


def there(facts: Facts) -> Topology:
    assert facts.topology is not None
    return facts.topology


def group(facts: Facts) -> tuple[int, ...]:
    """The GPUs that tensor parallelism would take: the first ones that are visible; all when no recipe says how many."""
    gpus = there(facts).gpus
    text = facts.variables.get("CUDA_VISIBLE_DEVICES", "")
    chosen = [int(entry) for entry in text.split(",") if entry.strip().isdigit()]
    visible = tuple(index for index in chosen if index in gpus) or gpus
    return visible[: facts.tp] if facts.tp > 1 else visible


def pairs(gpus: Iterable[int]) -> list[tuple[int, int]]:
    listed = sorted(gpus)
    return [(a, b) for i, a in enumerate(listed) for b in listed[i + 1 :]]


def draw(topology: Topology) -> list[str]:
    """The matrix in lines: what connects each pair, a dot for a GPU with itself."""
    width = max(4, *(len(cell) for cell in topology.cells.values())) if topology.cells else 4
    head = "      " + " ".join(f"{f'GPU{b}':>{width}}" for b in topology.gpus)

    def cell(a: int, b: int) -> str:
        return "·" if a == b else topology.cells.get((min(a, b), max(a, b)), "?")

    return [head, *(f"GPU{a:<3}" + " ".join(f"{cell(a, b):>{width}}" for b in topology.gpus) for a in topology.gpus)]


@check(
    "topology.all-reduce",
    "Road of the all-reduce",
    expected="NVLink between all pairs of the tensor-parallel group, so that vLLM's custom all-reduce is on",
    why="Every layer ends in two all-reduces. vLLM's own kernel does one in a few microseconds where all pairs have "
    "NVLink, or where there are just two GPUs with working P2P; else NCCL does it, over PCIe or through main memory, "
    "which costs most at small batches.",
    fix="Choose GPUs that are all joined by NVLink (CUDA_VISIBLE_DEVICES), a smaller tensor-parallel-size with pipeline "
    "parallelism across the gap, or accept NCCL and say --disable-custom-all-reduce.",
    needs=("topology",),
)
def all_reduce(facts: Facts) -> Finding:
    topology, gpus = there(facts), group(facts)
    size = len(gpus)
    if size < 2:
        return ok("one GPU: nothing to reduce")
    if facts.tp > size:
        return fail(f"TP {facts.tp} on {size} visible GPUs", f"tensor-parallel-size {size} or less, or more visible GPUs")
    off = [pair for pair in pairs(gpus) if not topology.nvlink.get(pair, False)]
    if facts.flag("disable-custom-all-reduce") is True and not off:
        return warn(f"TP {size}: all pairs NVLink, and the recipe turns it off", "Drop disable-custom-all-reduce.")
    if facts.flag("disable-custom-all-reduce") is True:
        return ok(f"TP {size}: NCCL, as the recipe says")
    if size not in CUSTOM:
        return warn(f"TP {size}: custom all-reduce off, it takes 2, 4, 6 or 8 GPUs; NCCL instead")
    if off:
        return _not_all(facts, size, off)
    if mute := [pair for pair in pairs(gpus) if topology.peers.get(pair) is False]:
        a, b = mute[0]
        return warn(f"TP {size}: all pairs NVLink, GPU{a}-GPU{b} without P2P: custom all-reduce off, NCCL instead")
    return ok(f"TP {size}: all pairs NVLink, custom all-reduce on")


def _not_all(facts: Facts, size: int, off: list[tuple[int, int]]) -> Finding:
    """The verdict where some pairs have no NVLink."""
    topology = there(facts)
    a, b = off[0]
    cell = topology.cells.get((a, b), "?")
    if size == 2 and topology.peers.get((a, b)):
        said = f"TP 2: GPU{a}-GPU{b} is {cell}, custom all-reduce on over PCIe, if P2P really works"
        return warn(said, "fenno doctor --deep tries a copy")
    if size == 2:
        return warn(f"TP 2: GPU{a}-GPU{b} is {cell} without P2P, custom all-reduce off: NCCL through main memory")
    return warn(f"TP {size}: {_which(off, size, cell)}: custom all-reduce off for all {size}, NCCL instead", _instead(facts, size))


def _which(off: list[tuple[int, int]], size: int, cell: str) -> str:
    """The pairs that spoil it, and the GPU that is in all of them where there is one."""
    if len(off) == size * (size - 1) // 2:
        return f"no pair has NVLink (GPU{off[0][0]}-GPU{off[0][1]} is {cell})"
    said = f"GPU{off[0][0]}-GPU{off[0][1]} is {cell}, not NVLink"
    worst, times = Counter(index for pair in off for index in pair).most_common(1)[0]
    if len(off) == 1:
        return said
    return f"{said}, one of {len(off)} such pairs" + (f", all of them of GPU{worst}" if times == len(off) else "")


def _instead(facts: Facts, size: int) -> str:
    """The largest smaller group that is joined throughout and divides the heads, as what to do; empty where there is none."""
    topology = there(facts)
    heads = (facts.model.config.get("num_attention_heads") if facts.model else None) or 64
    for fewer in (n for n in reversed(CUSTOM) if n < size and heads % n == 0):
        for gpus in combinations(topology.gpus, fewer):
            if all(topology.nvlink.get(pair, False) for pair in pairs(gpus)):
                listed = ",".join(map(str, gpus))
                return f"GPUs {listed} are all joined by NVLink: CUDA_VISIBLE_DEVICES={listed} and tensor-parallel-size {fewer}"
    return ""


@check(
    "topology.links",
    "NVLinks up",
    expected="every NVLink of every GPU up (18 on H100 and H200, 12 on A100 SXM)",
    why="A link that is down takes its share of the bandwidth; on HGX boards it takes the same share between all GPUs.",
    fix="nvidia-smi nvlink -s and -e; dmesg for Xid 74; then the host's vendor",
    needs=("gpus",),
)
def links(facts: Facts) -> Finding:
    assert facts.gpus is not None
    up = {card.index: sum(1 for state in card.links if state == 1) for card in facts.gpus.cards}
    if not any(up.values()):
        return ok("no NVLink is in use here")
    # How many links a board uses is known for modules alone; bridged cards are held to each other.
    full = max(max(up.values()), *(LINKS.get(card.name, 0) for card in facts.gpus.cards))
    short = {index: links for index, links in up.items() if links < full}
    if short:
        index = min(short, key=lambda i: short[i])
        return fail(f"GPU {index}: {up[index]} of {full} links up" + (f"; {len(short)} GPUs lack some" if len(short) > 1 else ""))
    return ok(f"{full} links each, all up")


@check(
    "topology.p2p",
    "Peer-to-peer between GPUs",
    expected="P2P reads and writes work for each pair, and nothing on the way redirects them",
    why="The driver reports P2P as possible and does not try it. With the IOMMU translating, with ACS redirecting on a "
    "PCIe switch, or in a container with an IPC namespace of its own, such copies hang or bring wrong bytes.",
    fix="iommu=pt on the kernel's command line, ACS off in the BIOS, --ipc=host; until then NCCL_P2P_DISABLE=1 for GPUs "
    "without NVLink",
    needs=("topology",),
)
def p2p(facts: Facts) -> Finding:
    topology, gpus = there(facts), group(facts)
    if len(gpus) < 2:
        return ok("one GPU: no peers")
    shut = [pair for pair in pairs(gpus) if topology.peers.get(pair) is False]
    unknown = [pair for pair in pairs(gpus) if topology.peers.get(pair) is None]
    plain = [pair for pair in pairs(gpus) if not topology.nvlink.get(pair, False)]
    if shut:
        return warn(f"GPU{shut[0][0]}-GPU{shut[0][1]}: the driver reports no P2P" + _more(shut))
    host = facts.host
    if host and plain and host.iommu == "translated":
        return warn(f"reported for {len(plain)} pair(s) over PCIe, and the IOMMU is in translated mode")
    if facts.driver and facts.driver.redirects and plain:
        bridges = facts.driver.redirects
        which = f"{len(bridges)} bridge(s): " + ", ".join(bridges[:3])
        return warn(f"reported for {len(plain)} pair(s) over PCIe, and ACS redirects them on {which}")
    contained = host is not None and host.container is not None and host.shm_total is not None and host.shm_total <= 64 * MIB
    if plain and contained:
        return warn(f"reported for {len(plain)} pair(s) over PCIe, and this container has an IPC namespace of its own")
    return ok("not in this file") if unknown else ok(f"reported for all {len(pairs(gpus))} pair(s)")


def _more(listed: list[tuple[int, int]]) -> str:
    return f", and {len(listed) - 1} more pair(s)" if len(listed) > 1 else ""


@check(
    "topology.sockets",
    "GPUs on one socket",
    expected="a group without NVLink on one NUMA node",
    why="Without NVLink, traffic between GPUs of two sockets crosses the link between the processors: NCCL halves its "
    "bandwidth there.",
    fix="CUDA_VISIBLE_DEVICES with GPUs of one node; `nvidia-smi topo -m` names it",
    needs=("topology",),
)
def sockets(facts: Facts) -> Finding:
    topology, gpus = there(facts), group(facts)
    far = [pair for pair in pairs(gpus) if topology.cells.get(pair) == "SYS" and not topology.nvlink.get(pair, False)]
    if not far:
        return ok("no pair crosses sockets without NVLink")
    return warn(f"GPU{far[0][0]}-GPU{far[0][1]} crosses sockets" + _more(far))


@check(
    "topology.copies",
    "Peer copies, tried",
    expected="every pair copies right, NVLink pairs at 80 % or more of the fastest",
    why="That a copy really arrives, unchanged and at the speed of the others, no table of the driver says.",
    fix="See topology.p2p for copies that fail, topology.links for slow ones.",
    needs=("deep",),
)
def copies(facts: Facts) -> Finding:
    assert facts.deep is not None
    tried = facts.deep.copies
    if not tried:
        return skip("fewer than two GPUs were seen by torch")
    wrong = [pair for pair, (right, _) in tried.items() if not right]
    if wrong:
        return fail(f"{wrong[0]}: the bytes that arrived are not those that were sent")
    best = max(rate for _, rate in tried.values())
    slow = {pair: rate for pair, (_, rate) in tried.items() if rate < 0.8 * best}
    found = f"{len(tried)} copies right, {min(r for _, r in tried.values()):.0f} to {best:.0f} GB/s"
    return warn(f"{found}; slowest {min(slow, key=lambda p: slow[p])}") if slow else ok(found)


CHECKS: tuple[Check, ...] = (links, p2p, copies, sockets, all_reduce)
