"""Checks of the NVIDIA driver and the CUDA toolkit."""

from __future__ import annotations

import re

from fenno.doctor.check import Check, Finding, check, fail, ok, skip, warn
from fenno.doctor.facts import Driver, Facts

# The oldest driver that runs any CUDA release of that major version (NVIDIA's page on minor version compatibility).
OLDEST = {11: (450, 80), 12: (525, 60), 13: (580, 0)}


def there(facts: Facts) -> Driver:
    assert facts.driver is not None
    return facts.driver


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "12.8.1+x" -> (12, 8, 1)."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", version)[0])))


@check(
    "driver.nvml",
    "NVML answers",
    expected="NVML lists the GPUs",
    why="vLLM, DCGM and fenno ask NVML what is there; where it does not answer, vLLM decides that this is not a CUDA platform.",
    fix="nvidia-smi; in a container: --gpus all and the NVIDIA container toolkit. After a driver update: reboot, or reload "
    "the modules.",
)
def nvml(facts: Facts) -> Finding:
    if facts.gpus is not None:
        count = f"{len(facts.gpus.cards)} GPU(s), driver {facts.gpus.driver}"
        return warn(f"{count}; {facts.gpus.crash}", "Update the driver or nvidia-ml-py.") if facts.gpus.crash else ok(count)
    reason = facts.missing.get("gpus", "not asked")
    if facts.needs_gpu:
        assert facts.recipe is not None
        return fail(reason, expected=f"{facts.recipe.host.gpus} GPU(s) for this recipe")
    kernel = facts.driver.kernel if facts.driver else None
    return fail(f"{reason}, and the kernel has the NVIDIA module {kernel}") if kernel else skip(reason)


@check(
    "driver.versions-agree",
    "Kernel module and library",
    expected="the kernel's module and the library of the same version",
    why="An unattended update replaces the library under a running module: everything that runs goes on, everything new "
    "fails with `Driver/library version mismatch`.",
    fix="Reboot, or stop all that uses the GPUs and: rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && modprobe nvidia",
    needs=("driver", "gpus"),
)
def versions_agree(facts: Facts) -> Finding:
    assert facts.gpus is not None
    kernel, library = there(facts).kernel, facts.gpus.driver
    if kernel is None:
        return ok(f"library {library}; the module's version is not shown here")
    return ok(library) if kernel == library else fail(f"module {kernel}, library {library}")


@check(
    "driver.device-files",
    "Device files",
    expected="/dev/nvidiactl, /dev/nvidia-uvm and one /dev/nvidiaN a GPU",
    why="Without /dev/nvidia-uvm NVML still lists the GPUs and CUDA fails with `unknown error`; usual after a boot where "
    "nothing loaded the module, and in containers started before it.",
    fix="nvidia-modprobe -u -c0 on the host, then start the container again",
    needs=("driver", "gpus"),
)
def device_files(facts: Facts) -> Finding:
    nodes = there(facts).nodes
    if facts.host is not None and facts.host.wsl:
        return skip("WSL has /dev/dxg instead")
    lacking = [name for name in ("nvidiactl", "nvidia-uvm") if name not in nodes]
    return fail("missing: " + ", ".join(f"/dev/{name}" for name in lacking)) if lacking else ok(f"{len(nodes)} files")


@check(
    "driver.cuda",
    "Driver for torch's CUDA",
    expected="a driver that runs the CUDA that torch was built for",
    why="torch brings its CUDA runtime, the driver has to know it. Inside one major version an older driver runs a newer "
    "runtime, except for kernels that are compiled from PTX at load.",
    fix="Update the driver, install a torch for an older CUDA, or the cuda-compat package on data-centre GPUs.",
    needs=("gpus", "stack"),
)
def cuda(facts: Facts) -> Finding:
    assert facts.gpus is not None and facts.stack is not None
    if facts.stack.torch_cuda is None:
        return skip("torch here is not built for CUDA")
    built = numbers(facts.stack.torch_cuda)
    able, driver = facts.gpus.cuda, numbers(facts.gpus.driver)
    found = f"driver {facts.gpus.driver} (CUDA {able[0]}.{able[1]}), torch for CUDA {facts.stack.torch_cuda}"
    if built[0] > able[0] or driver < OLDEST.get(built[0], (0,)):
        return fail(found)
    return ok(found) if built[:2] <= able else warn(found + ": by minor version compatibility alone")


@check(
    "driver.toolkit",
    "CUDA toolkit for builds",
    expected="nvcc of the major version that torch was built for, where something is built here",
    why="torch's extension builder refuses an nvcc of another major version; flash-attn's setup then looks for a wheel "
    "and, with none, gives up. FlashInfer compiles with nvcc at the first request.",
    fix="Install the toolkit of torch's CUDA version and set CUDA_HOME to it.",
    needs=("driver", "stack"),
)
def toolkit(facts: Facts) -> Finding:
    assert facts.stack is not None
    nvcc, built = there(facts).nvcc, facts.stack.torch_cuda
    if built is None:
        return skip("torch here is not built for CUDA")
    if nvcc is None:
        wants = str(facts.flag("attention-backend")).upper() == "FLASHINFER"
        ready = facts.stack.packages.keys() & {"flashinfer-jit-cache", "flashinfer-cubin"}
        return fail("no nvcc, and FlashInfer compiles here") if wants and not ready else ok("no nvcc; nothing here needs one")
    found = f"nvcc {nvcc} ({there(facts).nvcc_path}), torch for CUDA {built}"
    if numbers(nvcc)[:1] != numbers(built)[:1]:
        return warn(found)
    return ok(found)


@check(
    "driver.fabric-manager",
    "Fabric manager",
    expected="nvidia-fabricmanager running where there are NVSwitches, and every GPU's fabric state completed",
    why="On HGX boards with switches CUDA does not start (error 802, system not yet initialized) before the fabric manager "
    "has set them up; its version must be the driver's.",
    fix="systemctl enable --now nvidia-fabricmanager (the package of exactly the driver's version)",
    needs=("driver", "gpus"),
)
def fabric_manager(facts: Facts) -> Finding:
    assert facts.gpus is not None
    pending = [card.index for card in facts.gpus.cards if card.fabric in (1, 2)]
    if pending:
        return fail(f"the fabric is not set up for GPU {', '.join(map(str, pending))}")
    driver = there(facts)
    if not driver.switches:
        return ok("no switches are seen from here")
    if driver.fabric_manager or any(card.fabric == 3 for card in facts.gpus.cards):
        return ok(f"{driver.switches} switches, set up")
    # From inside a container the host's processes are not seen.
    contained = facts.host is not None and facts.host.container is not None
    return (warn if contained else fail)(f"{driver.switches} switches, and no nv-fabricmanager among the processes")


CHECKS: tuple[Check, ...] = (nvml, versions_agree, device_files, cuda, toolkit, fabric_manager)
