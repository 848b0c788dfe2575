"""Checks of environment variables: unknown ones, ones that contradict each other, and ones that cost speed or break a start."""

from __future__ import annotations

import difflib
import re

from fenno.doctor.check import Check, Finding, check, fail, ok, skip, warn
from fenno.doctor.facts import Facts

# The variables of NVIDIA's page on NCCL's environment, without the prefix. A name that is close to none of them is left alone.
NCCL = frozenset(
    """
    SOCKET_IFNAME SOCKET_FAMILY SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC SOCKET_POLL_TIMEOUT_MSEC SOCKET_NTHREADS NSOCKS_PERTHREAD
    CROSS_NIC IB_HCA IB_TIMEOUT IB_RETRY_CNT IB_GID_INDEX IB_ADDR_FAMILY IB_ADDR_RANGE IB_ROCE_VERSION_NUM IB_SL IB_TC IB_FIFO_TC
    IB_RETURN_ASYNC_EVENTS OOB_NET_ENABLE OOB_NET_IFNAME UID_STAGGER_THRESHOLD UID_STAGGER_RATE NET NET_PLUGIN TUNER_PLUGIN
    TUNER_CONFIG_PATH PROFILER_PLUGIN ENV_PLUGIN IGNORE_CPU_AFFINITY CONF_FILE DEBUG DEBUG_FILE DEBUG_SUBSYS DEBUG_TIMESTAMP_FORMAT
    DEBUG_TIMESTAMP_LEVELS COLLNET_ENABLE COLLNET_NODE_THRESHOLD CTA_POLICY NETDEVS_POLICY TOPO_FILE TOPO_DUMP_FILE SET_THREAD_NAME
    P2P_DISABLE P2P_LEVEL P2P_DIRECT_DISABLE SHM_DISABLE BUFFSIZE NTHREADS MAX_NCHANNELS MIN_NCHANNELS MAX_CTAS MIN_CTAS
    CHECKS_DISABLE CHECK_POINTERS LAUNCH_MODE IB_DISABLE IB_AR_THRESHOLD IB_QPS_PER_CONNECTION IB_SPLIT_DATA_ON_QPS IB_CUDA_SUPPORT
    IB_PCI_RELAXED_ORDERING IB_ADAPTIVE_ROUTING IB_ECE_ENABLE IB_MERGE_NICS MEM_SYNC_DOMAIN CUMEM_ENABLE CUMEM_HOST_ENABLE
    NET_GDR_LEVEL NET_GDR_C2C NET_GDR_READ NET_SHARED_BUFFERS NET_SHARED_COMMS SINGLE_RING_THRESHOLD LL_THRESHOLD TREE_THRESHOLD
    ALGO PROTO NVB_DISABLE PXN_DISABLE P2P_PXN_LEVEL RUNTIME_CONNECT GRAPH_REGISTER LOCAL_REGISTER LEGACY_CUDA_REGISTER WIN_ENABLE
    SET_STACK_SIZE GRAPH_MIXING_SUPPORT DMABUF_ENABLE P2P_NET_CHUNKSIZE P2P_LL_THRESHOLD ALLOC_P2P_NET_LL_BUFFERS COMM_BLOCKING
    CGA_CLUSTER_SIZE NVLS_ENABLE MNNVL_ENABLE MNNVL_UUID MNNVL_CLIQUE_ID RAS_ENABLE RAS_ADDR RAS_TIMEOUT_FACTOR
    LAUNCH_ORDER_IMPLICIT LAUNCH_RACE_FATAL IPC_USE_ABSTRACT_SOCKET HOSTID COMM_ID WORK_FIFO_DEPTH NET_DISABLE_INTRA
    """.split()
)
# What became of variables that guides still name, where the installed vLLM has them no more.
GONE = {
    "VLLM_USE_V1": "V1 is the only engine now: unset it",
    "VLLM_ATTENTION_BACKEND": "it is the flag --attention-backend now",
}
# Set by other programs, and read by none of vLLM: Kubernetes names its services so, containers their image.
NOT_OURS = re.compile(r"VLLM_(?:.*_)?(?:SERVICE_HOST|SERVICE_PORT.*|PORT_\d+_.*|PORT)$")
TRUE = {"1", "true", "yes", "on"}


def is_on(facts: Facts, name: str) -> bool:
    return facts.variables.get(name, "").strip().lower() in TRUE


@check(
    "env.vllm-variables",
    "VLLM_* variables",
    expected="only variables that the installed vLLM reads",
    why="vLLM warns once of a variable it does not know and goes on: a setting that is believed to hold does not.",
    fix="Correct the name, or unset it.",
    needs=("engine",),
)
def vllm_variables(facts: Facts) -> Finding:
    assert facts.engine is not None
    known = facts.engine.variables
    if not known:
        return skip("the list of variables was not found in this vLLM")
    strange = [n for n in sorted(facts.variables) if n.startswith("VLLM_") and n not in known and not NOT_OURS.match(n)]
    if not strange:
        return ok(f"all known to vLLM {facts.engine.version}")
    return warn(f"vLLM {facts.engine.version} does not read " + ", ".join(strange), _instead(strange[0], known))


def _instead(name: str, known: frozenset[str]) -> str:
    if name in GONE:
        return f"{name}: {GONE[name]}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return f"{name}: did you mean {near[0]}?" if near else f"unset {name}"


@check(
    "env.nccl-variables",
    "NCCL_* variables",
    expected="none that is misspelt, and none that turns a fast path off",
    why="NCCL ignores a name it does not know without a word. What was set to get round a fault long ago (P2P, shared "
    "memory or InfiniBand disabled) often stays, and halves the speed.",
    fix="Unset it; `NCCL_DEBUG=INFO` for one start shows what NCCL chose.",
)
def nccl_variables(facts: Facts) -> Finding:
    names = sorted(name for name in facts.variables if name.startswith("NCCL_"))
    for name in names:
        short = name.removeprefix("NCCL_")
        near = difflib.get_close_matches(short, NCCL, n=1, cutoff=0.85)
        if short not in NCCL and near:
            return warn(f"NCCL does not know {name}", f"Did you mean NCCL_{near[0]}?")
    slow = [name for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE") if is_on(facts, name)]
    if slow and (facts.tp > 1 or slow != ["NCCL_IB_DISABLE"]):
        return warn(", ".join(f"{name}=1" for name in slow))
    return ok(", ".join(names) or "none set")


@check(
    "env.contradictions",
    "Variables that contradict each other or the recipe",
    expected="variables and flags that can hold together",
    why="Of two settings that exclude each other one is ignored, and which one depends on the library.",
    fix="Keep one of the two.",
)
def contradictions(facts: Facts) -> Finding:
    v = facts.variables
    hub_off = is_on(facts, "HF_HUB_OFFLINE") or is_on(facts, "TRANSFORMERS_OFFLINE")
    cases = [
        (hub_off and facts.model is not None and not facts.model.local, "the Hub is offline, and the model is not on this host"),
        (is_on(facts, "NCCL_P2P_DISABLE") and bool(v.get("NCCL_P2P_LEVEL")), "NCCL_P2P_DISABLE and NCCL_P2P_LEVEL"),
        (is_on(facts, "NCCL_IB_DISABLE") and bool(v.get("NCCL_IB_HCA")), "NCCL_IB_DISABLE and NCCL_IB_HCA"),
        (v.get("NCCL_CUMEM_ENABLE") == "0" and v.get("NCCL_NVLS_ENABLE") == "1", "NCCL_NVLS_ENABLE=1 needs NCCL_CUMEM_ENABLE=1"),
        (
            bool(v.get("CUDA_VISIBLE_DEVICES")) and bool(v.get("NVIDIA_VISIBLE_DEVICES") == "void"),
            "CUDA_VISIBLE_DEVICES names GPUs, NVIDIA_VISIBLE_DEVICES=void hides them all",
        ),
        (
            "expandable_segments:true" in v.get("PYTORCH_CUDA_ALLOC_CONF", "").lower() and bool(facts.flag("kv-transfer-config")),
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True and --kv-transfer-config: vLLM refuses the two together",
        ),
        (
            is_on(facts, "VLLM_SKIP_P2P_CHECK") and facts.host is not None and facts.host.iommu == "translated" and facts.tp > 1,
            "VLLM_SKIP_P2P_CHECK=1 trusts the driver's word on P2P, and the IOMMU is in translated mode",
        ),
    ]
    found = [text for true, text in cases if true]
    return fail("; ".join(found)) if found else ok("none found")


@check(
    "env.debugging",
    "Variables left over from debugging",
    expected="none",
    why="They make every kernel wait, or write a line for every call: first tokens come late while nothing looks wrong.",
    fix="Unset it before measuring or serving.",
)
def debugging(facts: Facts) -> Finding:
    v = facts.variables
    on = ("CUDA_LAUNCH_BLOCKING", "VLLM_TRACE_FUNCTION", "TORCH_SHOW_CPP_STACKTRACES")
    left = [f"{name}={v[name]}" for name in on if is_on(facts, name)]
    left += [f"{name}={v[name]}" for name in ("NCCL_DEBUG",) if v.get(name, "").upper() in ("INFO", "TRACE")]
    left += [f"{name}={v[name]}" for name in ("VLLM_LOGGING_LEVEL",) if v.get(name, "").upper() == "DEBUG"]
    left += [
        f"{name}={v[name]}" for name in ("TORCH_LOGS", "TORCH_DISTRIBUTED_DEBUG") if v.get(name, "").upper() not in ("", "OFF")
    ]
    return warn(", ".join(left)) if left else ok("none set")


@check(
    "env.visible-devices",
    "Visible GPUs",
    expected="CUDA_VISIBLE_DEVICES unset, or as many GPUs of this host as the recipe's ranks",
    why="CUDA reads the list up to the first entry it does not know and ignores the rest: a wrong number hides the GPUs behind it.",
    fix="unset CUDA_VISIBLE_DEVICES, or name GPUs that `nvidia-smi -L` lists",
    needs=("gpus",),
)
def visible_devices(facts: Facts) -> Finding:
    assert facts.gpus is not None
    text = facts.variables.get("CUDA_VISIBLE_DEVICES")
    count = len(facts.gpus.cards)
    if text is None:
        return ok(f"all {count}")
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    wrong = [entry for entry in entries if re.fullmatch(r"-?\d+", entry) and not 0 <= int(entry) < count]
    if wrong:
        return fail(f"CUDA_VISIBLE_DEVICES={text}: there is no GPU {wrong[0]} among {count}")
    if len(set(entries)) < max(facts.tp, (facts.recipe and facts.recipe.host.gpus) or 0):
        return fail(f"CUDA_VISIBLE_DEVICES={text!r} shows {len(set(entries))} GPU(s)", expected=f"{facts.tp} for this recipe")
    return ok(f"{len(entries)} of {count}")


@check(
    "env.library-path",
    "LD_LIBRARY_PATH and LD_PRELOAD",
    expected="no cuDNN, NCCL or other CUDA release before the ones that torch brings",
    why="torch brings CUDA, cuDNN and NCCL in its wheels; LD_LIBRARY_PATH comes before them, and the versions mix: symbols "
    "are missing, or cuDNN refuses to load.",
    fix="unset LD_LIBRARY_PATH for the engine; vLLM takes another NCCL by VLLM_NCCL_SO_PATH alone",
    needs=("host",),
)
def library_path(facts: Facts) -> Finding:
    assert facts.host is not None
    preload = facts.variables.get("LD_PRELOAD", "")
    if "nccl" in preload.lower():
        return warn(f"LD_PRELOAD={preload}")
    mixed = [path for path in facts.host.libraries if _mixes(path, facts.stack.torch_cuda if facts.stack else None)]
    return warn(f"LD_LIBRARY_PATH brings {mixed[0]} first") if mixed else ok("nothing that torch brings too")


def _mixes(path: str, built: str | None) -> bool:
    """Whether a library would be taken for torch's own: cuDNN and NCCL have one name for all, CUDA's one for a major release."""
    name = path.rpartition("/")[2]
    if built is None or name.startswith(("libcudnn", "libnccl")):
        return built is not None
    release = re.search(r"/cuda-(\d+\.\d+)/", path)
    return name.endswith(f".so.{built.partition('.')[0]}") and release is not None and release[1] != built


@check(
    "env.proxy",
    "Proxies",
    expected="no proxy for 127.0.0.1",
    why="With a proxy set and no exception for the own host, a load client sends its requests to the proxy: they fail, or "
    "the proxy's time is measured with the engine's.",
    fix="export no_proxy=127.0.0.1,localhost",
)
def proxy(facts: Facts) -> Finding:
    v = {name.lower(): value for name, value in facts.variables.items()}
    set_ = [name for name in ("http_proxy", "all_proxy") if v.get(name)]
    if not set_:
        return ok("none for http")
    but = {part.strip() for part in v.get("no_proxy", "").split(",")}
    return ok(f"{set_[0]}, not for 127.0.0.1") if but & {"127.0.0.1", "*"} else warn(f"{set_[0]} is set, without an exception")


@check(
    "env.threads",
    "CPU threads",
    expected="OMP_NUM_THREADS unset, or more than 1 for an engine on the CPU",
    why="OMP_NUM_THREADS=1 is what many launchers set: the CPU engine then computes on one core.",
    fix="unset OMP_NUM_THREADS; VLLM_CPU_OMP_THREADS_BIND chooses the cores",
    needs=("engine", "host"),
)
def threads(facts: Facts) -> Finding:
    assert facts.engine is not None and facts.host is not None
    text = facts.variables.get("OMP_NUM_THREADS", "")
    if facts.engine.platform == "cpu" and text == "1" and facts.host.cores > 2:
        return warn(f"OMP_NUM_THREADS=1 on {facts.host.cores} cores")
    return ok(f"OMP_NUM_THREADS={text}" if text else "not set")


@check(
    "env.build-archs",
    "Architectures that a build is told",
    expected="TORCH_CUDA_ARCH_LIST and FLASH_ATTN_CUDA_ARCHS unset, or with this host's GPUs",
    why="A kernel that is built for other GPUs only fails at its first launch: no kernel image is available for execution "
    "on the device.",
    fix="unset TORCH_CUDA_ARCH_LIST, or name the GPU's own architecture",
    needs=("gpus",),
)
def build_archs(facts: Facts) -> Finding:
    assert facts.gpus is not None
    for name, dot in (("TORCH_CUDA_ARCH_LIST", "."), ("FLASH_ATTN_CUDA_ARCHS", "")):
        listed = re.split(r"[;,\s]+", facts.variables.get(name, ""))
        lacking = sorted({f"{c.capability[0]}{dot}{c.capability[1]}" for c in facts.gpus.cards})
        given = [re.sub(r"[a-z+].*$", "", entry) for entry in listed if entry]
        # Machine code runs on later minor versions of the same major one.
        wrong = [
            arch for arch in lacking if given and not any(_runs(entry.replace(".", ""), arch.replace(".", "")) for entry in given)
        ]
        if wrong and not any("PTX" in entry for entry in listed):
            return warn(f"{name}={facts.variables[name]}, and a GPU here is {wrong[0]}")
    return ok("as the GPUs are")


def _runs(built: str, gpu: str) -> bool:
    return built[:-1] == gpu[:-1] and built[-1:] <= gpu[-1:]


@check(
    "env.hub-token",
    "Hub token",
    expected="a token where the model has to be fetched and may be gated",
    why="A gated model answers 401 after the engine has started; the token is looked for in HF_TOKEN and in the Hub's own file.",
    fix="hf auth login, or export HF_TOKEN; a public model needs none",
    needs=("model", "host"),
)
def hub_token(facts: Facts) -> Finding:
    assert facts.model is not None and facts.host is not None
    if facts.model.local:
        return ok("not needed: the model is on this host")
    if facts.variables.get("HF_TOKEN") or facts.variables.get("HUGGING_FACE_HUB_TOKEN"):
        return ok("in the environment")
    if facts.host.hub_token:
        return ok("in the Hub's file")
    return warn(f"none, and {facts.model.name} is not on this host")


CHECKS: tuple[Check, ...] = (
    vllm_variables,
    nccl_variables,
    contradictions,
    debugging,
    visible_devices,
    library_path,
    proxy,
    threads,
    build_archs,
    hub_token,
)
