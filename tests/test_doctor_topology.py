"""What fenno says of whole hosts, against committed output: one recorded, the others SYNTHETIC, from vendors' documents."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doctor_facts import DRIVER, ENGINE, GOOD, HOST, STACK, recipe
from hypothesis import given
from hypothesis import strategies as st

from fenno import recipe as recipes
from fenno.doctor import checks, gpufacts, modelfacts, show, topology
from fenno.doctor.facts import Facts, Gpus, Topology

FOLDER = Path(__file__).with_name("topologies")
GIB = 2**30
PHB, NODE, SYS = 30, 40, 50
Link = Callable[[int, int], int | None]


def nvml(names: list[str], cc: list[int], memory: int, links: int, road: Link, **odd: dict[str, Any]) -> dict[str, Any]:
    """NVML's answers as the recorded ones have them. `road(a, b)`: None for NVLink, else the PCIe ancestor; `odd`: g3={...}."""
    gpus = [
        {
            "index": index,
            "name": name,
            "cc": cc,
            "mem": memory * GIB,
            "used": GIB // 4,
            "compute_mode": 0,
            "persistence": 1,
            "mig": [0, 0],
            "pcie_gen": [1, 4],
            "pcie_width": [16, 16],
            "numa": index // max(1, len(names) // 2),
            "throttle": 1,
            "uncorrected": 0,
            "remap": [0, 0, 0, 0],
            "power": [400000, 400000],
            "nvlink_active": [1] * links,
            **odd.get(f"g{index}", {}),
        }
        for index, name in enumerate(names)
    ]
    pairs = [pair(a, b, road(min(a, b), max(a, b))) for a in range(len(names)) for b in range(len(names)) if a != b]
    return {"driver": "580.1", "cuda": 13000, "gpus": gpus, "pairs": pairs}


def pair(a: int, b: int, ancestor: int | None) -> dict[str, Any]:
    """P2P over PCIe works below one host bridge, and is refused across sockets."""
    over_pcie = 0 if ancestor != SYS else 1
    states = {"read": over_pcie, "write": over_pcie, "nvlink": 0 if ancestor is None else 5, "atomics": 1, "pci": over_pcie}
    return {"a": a, "b": b, "ancestor": SYS if ancestor is None else ancestor, "p2p": states}


def nvlink(a: int, b: int) -> int | None:
    return None


def sockets(a: int, b: int) -> int:
    """Two GPUs below each of two host bridges."""
    return PHB if a // 2 == b // 2 else SYS


A100, H100, L40S = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA L40S"
HOSTS: dict[str, tuple[dict[str, Any] | Path, int]] = {
    "h200x2_nvml": (FOLDER / "h200x2_nvml.json", 2),
    "h200x2_topo_m": (FOLDER / "h200x2_topo_m.txt", 2),
    "hgx_h100x8": (FOLDER / "hgx_h100x8.txt", 8),
    "dgx1_v100x8": (FOLDER / "dgx1_v100x8.txt", 8),
    "hgx_a100x8": (nvml([A100] * 8, [8, 0], 80, 12, nvlink), 8),
    "pcie_l40sx4": (nvml([L40S] * 4, [8, 9], 45, 0, sockets), 4),
    "pcie_l40sx4_tp2": (nvml([L40S] * 4, [8, 9], 45, 0, sockets), 2),
    "one_link_down": (nvml([H100] * 8, [9, 0], 80, 18, nvlink, g3={"nvlink_active": [1] * 9 + [0] + [1] * 8}), 8),
    "one_gpu_off_nvlink": (
        nvml([H100] * 8, [9, 0], 80, 18, lambda a, b: NODE if 5 in (a, b) else None, g5={"nvlink_active": [0] * 18}),
        8,
    ),
    "mig": (nvml([A100] * 2, [8, 0], 80, 12, nvlink, g0={"mig": [1, 1]}), 2),
    "exclusive": (nvml([A100] * 8, [8, 0], 80, 12, nvlink, **{f"g{i}": {"compute_mode": 3} for i in range(8)}), 8),
    "mixed": (nvml([A100, A100, L40S, L40S], [8, 0], 80, 0, sockets, g2={"cc": [8, 9], "mem": 45 * GIB}, g3={"cc": [8, 9]}), 4),
}


def facts(name: str) -> Facts:
    """The facts of a host, with a recipe for all of its GPUs."""
    given_, tp = HOSTS[name]
    joined: Topology
    cards: Gpus | None
    if isinstance(given_, Path):
        joined, cards = gpufacts.from_file(given_)
    else:
        joined, cards = gpufacts.topology(json.loads(json.dumps(given_)), "NVML (synthetic)"), gpufacts.gpus(given_)
    asked = recipe({"tensor-parallel-size": tp}, host={"gpus": tp, "gpu_memory": "40GiB"})
    quiet = replace(DRIVER, kernel=None, switches=0)
    missing = {"gpus": "only a topology was given", "deep": "only with --deep"}
    return Facts(
        variables=GOOD.variables,
        host=replace(HOST, numa_balancing=False),
        driver=quiet,
        gpus=cards,
        topology=joined,
        recipe=asked,
        missing=missing,
    )


def said(name: str) -> str:
    found = facts(name)
    results = checks.run(checks.select(["gpu", "topology", "env.visible-devices"], []), found)
    return "\n".join([*show.lines(results, found, full=True), ""])


@pytest.mark.parametrize("name", HOSTS)
def test_a_whole_host_is_told_as_it_was(name: str) -> None:
    assert said(name) == (FOLDER / f"{name}.out").read_text(), "python tests/test_doctor_topology.py writes it anew"


def verdict(name: str, check: str) -> tuple[str, str]:
    ((_, finding),) = checks.run(checks.select([check], []), facts(name))
    return finding.status, finding.found


@pytest.mark.parametrize(
    ("name", "check", "status", "words"),
    [
        ("h200x2_nvml", "topology.links", "pass", "18 links each, all up"),
        ("hgx_a100x8", "topology.all-reduce", "pass", "TP 8: all pairs NVLink, custom all-reduce on"),
        ("hgx_h100x8", "topology.all-reduce", "pass", "TP 8: all pairs NVLink, custom all-reduce on"),
        ("dgx1_v100x8", "topology.all-reduce", "warn", "custom all-reduce off for all 8"),
        ("pcie_l40sx4", "topology.all-reduce", "warn", "no pair has NVLink (GPU0-GPU1 is PHB): custom all-reduce off for all 4"),
        ("pcie_l40sx4_tp2", "topology.all-reduce", "warn", "on over PCIe, if P2P really works"),
        ("one_link_down", "topology.links", "fail", "GPU 3: 17 of 18 links up"),
        ("one_gpu_off_nvlink", "topology.all-reduce", "warn", "one of 7 such pairs, all of them of GPU5"),
        ("mig", "gpu.mig", "fail", "on for GPU 0"),
        ("exclusive", "gpu.compute-mode", "fail", "EXCLUSIVE_PROCESS"),
        ("mixed", "gpu.same", "warn", "NVIDIA L40S (sm_89)"),
    ],
)
def test_the_cause_is_named(name: str, check: str, status: str, words: str) -> None:
    found = verdict(name, check)
    assert found[0] == status and words in found[1], found


@pytest.mark.parametrize("name", ["h200x2_nvml", "h200x2_topo_m", "hgx_a100x8", "hgx_h100x8"])
def test_a_sound_host_raises_no_alarm(name: str) -> None:
    results = checks.run(checks.select(["gpu", "topology"], []), facts(name))
    assert {finding.status for _, finding in results} <= {"pass", "skip"}


@pytest.mark.parametrize("name", ["h200x2_nvml", "h200x2_topo_m"])
def test_the_custom_all_reduce_of_two_h200s_is_predicted_as_vllm_decided_it_there(name: str) -> None:
    decided = json.loads((FOLDER.parents[1] / "benchmarks/kv/results/2026-11-30-two-h200-all-reduce.json").read_text())
    assert decided["custom_all_reduce"] and decided["used"] and decided["right"]
    found = facts(name)
    assert found.topology is not None and all(found.topology.nvlink.values()) == decided["fully_connected"]
    assert verdict(name, "topology.all-reduce") == ("pass", "TP 2: all pairs NVLink, custom all-reduce on")


def test_a_smaller_group_that_is_joined_throughout_is_named() -> None:
    ((_, finding),) = checks.run(checks.select(["topology.all-reduce"], []), facts("dgx1_v100x8"))
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3 and tensor-parallel-size 4" in finding.fix


# What the article says that cannot be so, whatever the host: check -> words of its finding.
ARTICLE = {
    "engine.block-size": "--block-size 8",
    "recipe.engine-version": "vLLM 0.4.2 has no Grok1ForCausalLM",
    "recipe.soft-cap": "flash-attn 2.5.8, and the model's soft cap is 30",
    "recipe.old-flags": "--scheduler-policy",
    "recipe.memory-rule": "90% is taken, 85% is the target",
    "recipe.rope-base": "--rope-theta 5000",
    "recipe.gpu-mode": "nvidia-smi -r",
    "recipe.tokenizer": "torch.compile(tokenizer",
    "recipe.build-command": "--cuda_version=12.1",
    "recipe.arguments": "kv_cache_contiguous",
    "recipe.training-steps": "gradient_checkpointing",
    "recipe.packages": "torch 2.3.0+cu121: here 2.13.0+cu130",
    "recipe.python": "3.10: here 3.12.4",
    "recipe.cuda": "12.1: here torch 13.0",
    "python.flash-attention-used": "vLLM does not import it",
}


def article() -> Facts:
    """The article's recipe on eight A100s with today's stack."""
    asked = recipes.load(recipes.find("grok-article-a100x8"))
    model = modelfacts.model(asked, Path("/none"))
    return replace(facts("exclusive"), recipe=asked, stack=STACK, engine=ENGINE, model=model)


def test_what_the_article_says_that_cannot_be_so_is_told_line_by_line() -> None:
    results = {check.id: finding for check, finding in checks.run(checks.CHECKS, article())}
    assert {name: words for name, words in ARTICLE.items() if words not in results[name].found} == {}
    assert all(results[name].status in ("warn", "fail") for name in ARTICLE)
    assert results["gpu.compute-mode"].status == "fail"
    assert results["model.weights-fit"].status == "pass", "eight A100s hold the weights, barely"


WORDS = st.sampled_from(["NV1", "NV18", "PIX", "PXB", "PHB", "NODE", "SYS"])


@given(
    st.integers(1, 8).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(WORDS, min_size=n * (n - 1) // 2, max_size=n * (n - 1) // 2))
    )
)
def test_any_matrix_is_read_back_as_it_was_drawn(given_: tuple[int, list[str]]) -> None:
    size, words = given_
    cells = dict(zip([(a, b) for a in range(size) for b in range(a + 1, size)], words, strict=True))
    row = lambda a: "\t".join(" X " if a == b else cells[min(a, b), max(a, b)] for b in range(size))  # noqa: E731
    head = "\t" + "\t".join(f"GPU{i}" for i in range(size)) + "\tCPU Affinity"
    text = "\n".join([head, *(f"GPU{a}\t{row(a)}\t0-3" for a in range(size))])
    found = gpufacts.matrix(text, "x")
    assert found.cells == cells and found.gpus == tuple(range(size))
    assert len(topology.draw(found)) == size + 1


if __name__ == "__main__":
    for host_name in HOSTS:
        (FOLDER / f"{host_name}.out").write_text(said(host_name))
