"""`fenno doctor --report`, `--deep` and `--watch`: nothing secret leaves, a crash is a finding, an event is told once."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest
from doctor_facts import CARD, GOOD, GPUS
from doctor_stack import Environment
from hypothesis import given
from hypothesis import strategies as st

from fenno import documents
from fenno.doctor import checks, deepfacts, document, report, watch
from fenno.doctor.facts import Facts, Gpus
from fenno.doctor.inside import nvml


def bundle(facts: Facts) -> str:
    results = checks.run(checks.CHECKS, facts)
    return documents.lines(report.bundle(document.make(results, facts, 0.1), facts))


SECRETS = {
    "HF_TOKEN": "hf_abcdefghijklmnop",
    "VLLM_API_KEY": "correct horse battery",
    "NVIDIA_API_KEY": "nvapi-0123456789",
    "HF_ENDPOINT": "https://somebody:opensesame@hub.example.org",
    "VLLM_QUEUE": "redis://:sesame-too@queue",
    "hf_token": "not its value",
    "VLLM_BASIC_AUTH": "an authority",
    "VLLM_HOST_IP": "10.20.30.40",
    "CUDA_VISIBLE_DEVICES": "GPU-01234567-89ab-cdef-0123-456789abcdef",
    "AWS_SECRET_ACCESS_KEY": "not even the name",
}


def test_a_report_holds_what_matters_and_nothing_secret() -> None:
    text = bundle(
        replace(GOOD, variables={**GOOD.variables, **SECRETS, "HOME": "/home/jane-doe", "VLLM_CACHE_ROOT": "/home/jane-doe/c"})
    )
    hidden = ["hf_abc", "correct horse", "nvapi", "opensesame", "sesame-too", "its value", "an authority", "not even", "AWS_"]
    hidden += ["10.20.30.40", "01234567-89ab", "jane-doe"]
    assert [word for word in hidden if word in text] == []
    assert '"VLLM_API_KEY": "<set>"' in text and '"VLLM_BASIC_AUTH": "<set>"' in text and '"VLLM_CACHE_ROOT": "~/c"' in text
    found = json.loads(text)["facts"]
    assert found["gpus"]["cards"][1]["name"] == "NVIDIA H200" and found["topology"]["cells"] == {"0-1": "NV18"}
    assert "torch==2.13.0+cu130" in found["stack"]["packages"] and found["recipe"]["name"] == "synthetic"


@given(
    st.sampled_from(["HF_TOKEN", "VLLM_API_KEY", "HF_HUB_SECRET", "HF_CREDENTIALS", "VLLM_API_KEY_2"]),
    st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=12),
)
def test_the_value_of_a_secret_is_nowhere(name: str, value: str) -> None:
    facts = Facts(variables={name: value, "VLLM_PLUGINS": f"x {value}"})
    made = document.make([], facts, 0)
    assert value not in documents.lines(report.bundle(made, facts))


def test_an_address_and_a_mail_are_taken_out_and_versions_stay() -> None:
    said = report.redact("from jane@example.org at 192.168.1.7, torch 2.13.0, driver 580.159.04, 127.0.0.1:8000", {})
    assert said == "from <mail> at <address>, torch 2.13.0, driver 580.159.04, 127.0.0.1:8000"


@pytest.mark.scenario
def test_the_commands_report_is_one_json_document(tmp_path: Path) -> None:
    env = {**os.environ, "HF_TOKEN": "hf_0123456789abcdef", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "fenno", "doctor", "cpu-small", "--report"], capture_output=True, text=True, env=env
    )
    assert done.returncode in (0, 1), done.stderr
    assert json.loads(done.stdout)["document"]["schema"] == 1 and "hf_0123" not in done.stdout
    assert next(iter(json.loads(done.stdout))) == "schema"


def deep(environment: Environment, files: dict[str, str]) -> Any:
    for path, text in files.items():
        (environment.site / path).parent.mkdir(parents=True, exist_ok=True)
        (environment.site / path).write_text(text)
    return deepfacts.deep(str(environment.python), os.environ, gpus=False)


SERVE = {
    "torch/__init__.py": "",
    "vllm/entrypoints/__init__.py": "",
    "vllm/entrypoints/cli/__init__.py": "",
    "vllm/entrypoints/cli/serve.py": "",
}
PLUGINS = "def load_plugins_by_group(group):\n    return {'fenno': None, 'mine': None}\n"
DIES = "import os\nos.kill(os.getpid(), 11)\n"


@pytest.mark.parametrize(
    ("files", "torch", "engine", "plugins"),
    [
        ({**SERVE, "vllm/plugins.py": PLUGINS}, None, None, ("fenno", "mine")),
        (
            {"torch/__init__.py": "raise OSError('libcudart.so.13: cannot open')"},
            "OSError: libcudart.so.13: cannot open",
            None,
            None,
        ),
        ({"torch/__init__.py": DIES}, "import torch ended the process (signal 11)", None, None),
        ({**SERVE, "vllm/__init__.py": "import nothing_there"}, None, "ModuleNotFoundError: No module named 'nothing_there'", None),
        ({**SERVE, "vllm/__init__.py": DIES}, None, "import vllm ended the process (signal 11)", None),
    ],
)
def test_what_an_import_comes_to_is_told(
    tmp_path: Path, files: dict[str, str], torch: str | None, engine: str | None, plugins: tuple[str, ...] | None
) -> None:
    found = deep(Environment(tmp_path / "env"), files)
    assert (found.torch, found.engine, found.plugins) == (torch, engine, plugins)


def test_copies_are_kept_when_a_later_step_ends_the_process() -> None:
    lines = [["torch", None], ["copies", {"GPU0-GPU1": [True, 390.5]}]]
    text = "\n".join(deepfacts.MARK + json.dumps(line) for line in lines)
    found = deepfacts.answered(f"noise\n{text}\n", -6, "terminate called")
    assert found.copies == {"GPU0-GPU1": (True, 390.5)} and found.engine == "import vllm ended the process (signal 6)"


def other(**changes: Any) -> Gpus:
    return replace(GPUS, cards=(CARD, replace(CARD, index=1, **changes)))


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (GPUS, GPUS, []),
        (GPUS, other(uncorrected=2), ["GPU 1: 2 more uncorrected memory error(s)"]),
        (GPUS, other(remap=(0, 1, 1, 0)), ["GPU 1: memory rows: one waits to be remapped"]),
        (GPUS, other(throttle=0x41), ["GPU 1: hardware thermal slowdown begins"]),
        (other(throttle=0x41), GPUS, ["GPU 1: hardware thermal slowdown is over"]),
        (GPUS, other(throttle=0x4), []),
        (GPUS, other(links=(1,) * 16 + (0, 0)), ["GPU 1: 16 NVLinks up, there were 18"]),
        (other(link_errors=3), other(link_errors=8), ["GPU 1: 5 more error(s) on its NVLinks"]),
        (GPUS, other(link_errors=3), []),
        (GPUS, other(pcie_width=(4, 16)), ["GPU 1: PCIe x4, it was x16"]),
        (GPUS, replace(GPUS, cards=(CARD,)), ["GPU 1: gone"]),
        (GPUS, None, ["NVML does not answer any more"]),
        (None, GPUS, ["NVML answers again"]),
        (None, None, []),
    ],
)
def test_a_change_is_told(before: Gpus | None, now: Gpus | None, said: list[str]) -> None:
    assert watch.changes(before, now) == said


@pytest.mark.parametrize(("links", "said"), [(2, 2 * (0 + 1 + 2 + 3)), (0, "NVMLError_NotSupported")])
def test_errors_of_all_links_are_counted_where_the_card_counts_them(
    links: int, said: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counter(handle: object, link: int, kind: int) -> int:
        if link >= links:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return kind

    monkeypatch.setattr(pynvml, "nvmlDeviceGetNvLinkErrorCounter", counter)
    assert nvml.link_errors(None) == said


def test_an_xid_is_told_with_its_meaning() -> None:
    lines = ["6,1,2,-;NVRM: Xid (PCI:0000:41:00): 79, pid=1, GPU has fallen off the bus.", "6,1,3,-;usb 1-1: new device"]
    assert watch.xids(lines) == ["Xid 79 on 0000:41:00: the GPU has fallen off the bus"]
    assert watch.xids(["NVRM: Xid (PCI:0000:41:00): 999, something new"]) == ["Xid 999 on 0000:41:00: something new"]


def test_the_kernels_log_is_read_from_now_on(tmp_path: Path) -> None:
    pipe = tmp_path / "kmsg"
    os.mkfifo(pipe)
    with watch.kernel_log(pipe) as new:
        assert new() == []
        with pipe.open("w") as writer:
            writer.write("one\ntwo\n")
            writer.flush()
            assert new() == ["one", "two"]
            assert new() == []
    with watch.kernel_log(tmp_path / "none") as new:
        assert new() == []


def test_a_change_is_told_once() -> None:
    looks = itertools.chain([GPUS, other(uncorrected=1)], itertools.repeat(other(uncorrected=1)))
    lines = watch.watch(lambda: next(looks), lambda: [], 0.0)
    assert next(lines) == "watching 2 GPU(s)"
    assert next(lines) == "GPU 1: 1 more uncorrected memory error(s)"
    quiet = watch.watch(lambda: GPUS, iter([[], ["NVRM: Xid (PCI:0): 31"]]).__next__, 0.0)
    assert [next(quiet), next(quiet)] == ["watching 2 GPU(s)", "Xid 31 on 0: a page fault on the GPU: usually the program"]


@pytest.mark.scenario
def test_watching_ends_with_ctrl_c() -> None:
    running = subprocess.Popen([sys.executable, "-m", "fenno", "doctor", "--watch"], stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    first = running.stderr.readline()
    assert "watching" in first or "NVML does not answer" in first
    running.send_signal(signal.SIGINT)
    assert running.wait(120) == 130
    running.stderr.close()
