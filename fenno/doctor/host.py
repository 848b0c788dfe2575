"""Checks of the operating system: memory, shared memory, limits, processors, folders."""

from __future__ import annotations

from fenno.doctor.check import Check, Finding, check, fail, ok, skip, warn
from fenno.doctor.facts import Facts, Host

MIB, GIB = 2**20, 2**30
# vLLM's worker queues are ten chunks of 24 MiB each in /dev/shm (distributed/device_communicators/shm_broadcast.py).
QUEUE = 240 * MIB
# What one nvcc thread takes at most, as flash-attn's own setup.py reckons.
COMPILER = 5 * GIB
# vllm/utils/system_utils.py, set_ulimit
ENGINE_FILES = 65535


def there(facts: Facts) -> Host:
    assert facts.host is not None
    return facts.host


def size(value: float) -> str:
    return f"{value / GIB:.1f} GiB" if value >= GIB else f"{value / MIB:.0f} MiB"


@check(
    "host.system",
    "Operating system",
    expected="Linux on x86_64 or aarch64",
    why="vLLM has wheels for Linux alone; on Windows neither NCCL nor vLLM's processes run, and a GPU under macOS is not CUDA.",
    fix="Use a Linux host; on Windows, WSL 2 with the Windows driver.",
    needs=("host",),
)
def system(facts: Facts) -> Finding:
    host = there(facts)
    found = f"{host.system} {host.machine}, {host.release or 'kernel ' + host.kernel}"
    if host.system == "Windows":
        return fail(found + ": vLLM and NCCL do not run on Windows itself")
    if host.system != "Linux" or host.machine not in ("x86_64", "aarch64", "arm64"):
        return fail(found)
    return ok(found)


@check(
    "host.wsl",
    "Windows Subsystem for Linux",
    expected="Linux without Windows below it",
    why="Under WSL 2 pinned memory is limited (vLLM leaves it off unless told), and NVML answers in part.",
    fix="Good enough to try things on one GPU. Measure and serve on Linux itself.",
    needs=("host",),
)
def wsl(facts: Facts) -> Finding:
    return warn(f"WSL, kernel {there(facts).kernel}") if there(facts).wsl else ok("not WSL")


@check(
    "host.container",
    "Container",
    expected="no container, or one with the host's IPC and enough shared memory",
    why="GPUs in different IPC namespaces cannot open each other's memory: P2P is reported, and copies then fail or hang.",
    fix="Start the container with --ipc=host (Kubernetes: an emptyDir of medium Memory at /dev/shm, all ranks in one pod).",
    needs=("host",),
)
def container(facts: Facts) -> Finding:
    host = there(facts)
    if host.container is None:
        return ok("none")
    # Docker's own /dev/shm is 64 MiB: with the host's IPC it is the host's.
    if facts.tp > 1 and host.shm_total is not None and host.shm_total <= 64 * MIB:
        return warn(f"{host.container} with an IPC namespace of its own, and {facts.tp} ranks")
    return ok(host.container)


@check(
    "host.memory",
    "Main memory",
    expected="as much as the recipe's `host.memory`, within the cgroup's limit",
    why="A cgroup kills the engine in the middle of loading, and its log says nothing of it.",
    fix="Give the container or the slice more memory, or choose a smaller model.",
    needs=("host",),
)
def memory(facts: Facts) -> Finding:
    host = there(facts)
    need = (facts.recipe.host.memory if facts.recipe else None) or 0
    found = f"{size(host.memory)} may be used, {size(host.available)} free"
    if host.memory < need:
        return fail(found, expected=f"{size(need)} for this recipe")
    if host.available < need:
        return warn(found, "End what holds the memory now, or wait for it.", f"{size(need)} free for this recipe")
    return ok(found)


@check(
    "host.cpu",
    "Processor cores",
    expected="two cores, and one for each rank besides",
    why="vLLM runs a front end, an engine core and one worker a GPU; a cgroup quota below that shows as late first tokens, "
    "not as load.",
    fix="Raise the container's CPU limit or the affinity mask (`taskset -p`, `docker run --cpus`).",
    needs=("host",),
)
def cpu(facts: Facts) -> Finding:
    host = there(facts)
    usable = min(host.cores, host.quota) if host.quota else host.cores
    need = 2 + (facts.tp if facts.needs_gpu else 0)
    limit = f", limited to {host.quota:g} by a quota" if host.quota and host.quota < host.cores else ""
    found = f"{host.cores} cores{limit}"
    return ok(found) if usable >= need else warn(found, expected=f"{need} cores for {facts.tp} rank(s)")


@check(
    "host.shm",
    "Shared memory (/dev/shm)",
    expected="240 MiB free for each queue between ranks, 1 GiB to be at ease",
    why="vLLM's queues between processes and NCCL's buffers lie in /dev/shm; where it is too small the start fails, or a "
    "rank dies of SIGBUS under load.",
    fix="docker run --shm-size=8g (or --ipc=host); on a host: mount -o remount,size=8g /dev/shm",
    needs=("host",),
)
def shm(facts: Facts) -> Finding:
    host = there(facts)
    if host.shm_total is None or host.shm_free is None:
        return warn("there is no /dev/shm")
    found = f"{size(host.shm_free)} of {size(host.shm_total)} free"
    if facts.tp > 1 and host.shm_free < QUEUE:
        return fail(found, expected=f"{size(QUEUE)} free with {facts.tp} ranks")
    return ok(found) if host.shm_free >= GIB or facts.tp == 1 else warn(found)


@check(
    "host.files",
    "Open files",
    expected="65535, which vLLM raises its own limit to, or twice the users of the load test",
    why="Every streaming request is a socket on both sides; at the limit, connections are refused while the GPU idles.",
    fix="ulimit -n 65535 (systemd: LimitNOFILE=65535; docker: --ulimit nofile=65535)",
    needs=("host",),
)
def files(facts: Facts) -> Finding:
    host = there(facts)
    users = (facts.recipe.workload.users or 0) if facts.recipe else 0
    # vLLM sets its own limit to 65535 where the hard limit allows that, and otherwise leaves it alone.
    limit = ENGINE_FILES if host.files_hard >= ENGINE_FILES else host.files
    need = max(4096, 2 * users + 512)
    found = f"{host.files}, may be raised to {host.files_hard}"
    if limit < 2 * users:
        return fail(found, expected=f"{need} for {users} users")
    return ok(found) if limit >= need else warn(found, expected=f"{need}")


@check(
    "host.locked-memory",
    "Locked memory",
    expected="no limit where InfiniBand or RoCE is used",
    why="RDMA registers its buffers in locked memory: with the usual limit of 8 MiB NCCL over InfiniBand fails at its "
    "first connection.",
    fix="ulimit -l unlimited (docker: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity)",
    needs=("host",),
)
def locked(facts: Facts) -> Finding:
    host = there(facts)
    found = "no limit" if host.locked is None else size(host.locked)
    if not host.infiniband:
        return ok(found + ", and nothing here does RDMA")
    return ok(found) if host.locked is None else warn(found + " with InfiniBand devices")


@check(
    "host.huge-pages",
    "Reserved huge pages",
    expected="at most a tenth of the memory reserved as huge pages",
    why="Reserved huge pages are taken from the memory that everybody else may use; neither vLLM nor PyTorch asks for them.",
    fix="sysctl vm.nr_hugepages=0, unless another program on this host needs them",
    needs=("host",),
)
def huge_pages(facts: Facts) -> Finding:
    host = there(facts)
    found = f"{size(host.huge_pages)} reserved" if host.huge_pages else "none reserved"
    return ok(found) if host.huge_pages <= host.memory / 10 else warn(found + f" of {size(host.memory)}")


@check(
    "host.governor",
    "CPU frequency governor",
    expected="performance",
    why="Between two steps the engine's core sleeps: under `powersave` or `ondemand` it wakes at a low clock, and every "
    "step waits for it.",
    fix="cpupower frequency-set -g performance",
    needs=("host",),
)
def governor(facts: Facts) -> Finding:
    slow = sorted(set(there(facts).governors) - {"performance"})
    if not there(facts).governors:
        return skip("this kernel shows no frequency governor (usual in virtual machines)")
    return warn(", ".join(slow)) if slow else ok("performance")


@check(
    "host.numa",
    "NUMA nodes",
    expected="automatic NUMA balancing off, and cores of every node that has a GPU",
    why="A process bound to the other socket reaches its GPU over the link between sockets; automatic balancing unmaps "
    "pages to watch them, which stalls the engine.",
    fix="sysctl kernel.numa_balancing=0; start the engine under numactl --cpunodebind=NODE --membind=NODE",
    needs=("host",),
)
def numa(facts: Facts) -> Finding:
    host = there(facts)
    found = f"{len(host.nodes)} node(s)"
    if len(host.nodes) < 2:
        return ok(found)
    cards = facts.gpus.cards if facts.gpus else ()
    far = sorted({c.numa for c in cards if c.numa is not None and not host.nodes.get(c.numa, host.affinity) & host.affinity})
    if far:
        return warn(f"{found}; this process may use no core of node {far[0]}, which has a GPU")
    return warn(f"{found}, automatic balancing on") if host.numa_balancing else ok(found)


@check(
    "host.folders",
    "Folders an engine writes to",
    expected="home, caches and temporary files can be written, with 1 GiB free",
    why="vLLM, Triton and torch compile into caches below the home folder; where that is read-only the start fails after "
    "the weights were loaded, or everything is compiled again at every start.",
    fix="Make the folder writable, or point VLLM_CACHE_ROOT, TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR and HF_HOME elsewhere.",
    needs=("host",),
)
def folders(facts: Facts) -> Finding:
    found = there(facts).folders
    shut = [f"{use}: {folder.path}" for use, folder in found.items() if not folder.writable]
    if shut:
        return fail("cannot be written: " + "; ".join(shut))
    full = [f"{use}: {size(folder.free)} in {folder.path}" for use, folder in found.items() if folder.free < GIB]
    if full:
        return warn("nearly full: " + "; ".join(full), "Free some space there.")
    return ok(f"writable, {size(min((folder.free for folder in found.values()), default=0))} free or more")


@check(
    "host.compiler",
    "C compiler",
    expected="gcc or clang, and Python's headers",
    why="Triton compiles a launcher in C at the first request, torch.compile on a CPU compiles C++: without a compiler or "
    "Python.h the engine dies when it is warm.",
    fix="apt-get install gcc g++ python3-dev (the headers of the engine's own Python version)",
    needs=("host",),
)
def compiler(facts: Facts) -> Finding:
    host = there(facts)
    found = ", ".join(host.compilers) or "none"
    lazy = not facts.needs_gpu and facts.flag("enforce-eager") is True
    if not host.compilers:
        return ok("none, and this recipe compiles nothing") if lazy else fail("neither cc, gcc nor clang")
    if facts.stack and not facts.stack.headers and not lazy:
        return fail(f"{found}, but no Python.h for Python {facts.stack.python}")
    return ok(found)


@check(
    "host.build-memory",
    "Memory for a build",
    expected="MAX_JOBS x NVCC_THREADS x 5 GiB free, within the cgroup's limit",
    why="Every nvcc thread of a FlashAttention build takes 4 to 5 GiB. Ninja starts one job a core unless told, the kernel "
    "kills one of them late, and the build says no more than `Killed`.",
    fix="MAX_JOBS=N NVCC_THREADS=1 pip install --no-build-isolation flash-attn, with the N given here",
    needs=("host", "driver"),
)
def build_memory(facts: Facts) -> Finding:
    host = there(facts)
    assert facts.driver is not None
    if facts.driver.nvcc is None:
        return skip("no nvcc: nothing is built here")
    jobs, threads = _whole(facts.variables.get("MAX_JOBS")), _whole(facts.variables.get("NVCC_THREADS")) or 4
    most = max(1, int(min(host.available, host.memory) // (COMPILER * threads)))
    room = f"{size(min(host.available, host.memory))} free are enough for {most} job(s) of {threads} thread(s)"
    if jobs is None:
        return ok(f"{room}; set MAX_JOBS={most} before a build") if most < host.cores else ok(room)
    return ok(room) if jobs <= most else warn(f"MAX_JOBS={jobs}, and {room}", f"MAX_JOBS={most} NVCC_THREADS={threads}")


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() and int(text) else None


CHECKS: tuple[Check, ...] = (
    system, wsl, container, memory, cpu, shm, files, locked, huge_pages, governor, numa, folders, compiler, build_memory,
)  # fmt: skip
