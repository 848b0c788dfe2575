"""The main job on a real vLLM on the CPU: the three verdicts; no trial leaves anything to the next, no limit changes an output."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from fenno import recipe
from fenno.engine import checkpoint, dummy, live, metrics
from fenno.load import run as load
from fenno.recipe import Recipe
from fenno.tune import bench, output, quality, trial
from fenno.tune import run as runs
from fenno.tune import space as spaces

pytestmark = pytest.mark.engine
FENNO = str(Path(sys.executable).with_name("fenno"))


def tune(out: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON document and standard error of `fenno tune` on the embedded recipe."""
    done = subprocess.run(
        [FENNO, "-v", "tune", "cpu-small", "--out", str(out), *options], capture_output=True, text=True, timeout=600, cwd=out.parent
    )
    assert done.stdout.strip(), done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


def engines() -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if "grok2-small" in " ".join(p.info["cmdline"] or [])]


def test_a_target_that_can_be_met_is_met_and_confirmed_after_a_cold_start(tmp_path: Path) -> None:
    # Half the embedded rate and a wide target: what is tested is the verdict, not this machine.
    code, document, log = tune(tmp_path / "studies", "--target-p95", "3s", "--target-qps", "4", "--budget", "8m")
    assert (code, document["verdict"]) == (0, "met"), log
    assert document["figures"]["p95_ttft"]["high"] <= 3.0
    assert "after a cold start with plain flags" in document["sentence"]
    assert document["outputs"]["state"] in ("unchanged", "blind"), document["outputs"]["sentence"]
    study = Path(tmp_path, document["study"])
    assert yaml.safe_load((study / "tuned.yaml").read_text())["targets"] == {"p95_ttft": "3.0s", "qps": 4.0, "memory": 0.85}
    assert recipe.load(study / "tuned.yaml").engine.model == "dummy:grok2-small"
    assert log.count("ready after") == 2
    assert not engines()


def test_a_target_below_what_one_request_alone_takes_is_infeasible(tmp_path: Path) -> None:
    code, document, log = tune(tmp_path / "studies", "--target-p95", "1ms")
    assert (code, document["verdict"]) == (3, "infeasible"), log
    assert "alone on the engine" in document["sentence"]
    assert log.count("ready after") == 1
    assert not engines()


def test_a_budget_that_ends_first_is_inconclusive(tmp_path: Path) -> None:
    code, document, log = tune(tmp_path / "studies", "--budget", "20s")
    assert (code, document["verdict"]) == (4, "inconclusive"), log
    assert "budget" in document["sentence"]
    assert not engines()


def with_weights(chosen: Recipe, folder: Path) -> Recipe:
    """The same recipe on a model whose weights are large enough for one token to be likelier than another."""
    checkpoint.make(dummy.SHAPES["grok2-tiny"], folder, python=sys.executable, std=0.1)
    flags = {name: value for name, value in chosen.engine.flags.items() if name != "load-format"}
    return chosen.model_copy(update={"engine": chosen.engine.model_copy(update={"model": str(folder), "flags": flags})})


class Silent:
    """Events that nobody watches."""

    def say(self, text: str) -> None: ...
    def stage(self, text: str) -> None: ...
    def watch(self, share: float, text: str) -> None: ...


def test_a_light_trial_after_an_overloaded_one_is_as_light_as_before_and_other_limits_change_no_output(tmp_path: Path) -> None:
    chosen = with_weights(recipe.load(recipe.find("cpu-small")).with_targets(qps=4.0, p95_ttft=3.0), tmp_path / "model")
    _, space = runs.known_space(chosen)
    with bench.Engines(chosen, tmp_path, space, Silent()).wide({}) as seat:
        engine = seat.engine
        plan = trial.plan_for(chosen, engine, arm="before", seed=1)
        seat.move(space.defaults)
        before = trial.measure(chosen, engine, plan, tmp_path / "before")
        defaults = seat.answers()

        seat.move({**space.defaults, spaces.CAP: 8, spaces.BUDGET: 256})
        outputs = quality.compare(defaults, seat.answers())
        with load.running(replace(plan, rate=80.0, arm="overload", timeout=60.0), tmp_path / "overload") as overload:
            waited = 0.0
            while waited < 8 and not overload.poll():
                now = metrics.scrape(engine.url, timeout=60.0)
                assert (now.running or 0) <= 8
                waited = now.waiting or 0.0
            overload.stop()
        assert waited >= 8

        seat.move(space.defaults)
        after = trial.measure(chosen, engine, replace(plan, arm="after"), tmp_path / "after")
        live.settle(engine.url)
    assert outputs.state == "same" and outputs.found and outputs.found.count > 500, outputs.sentence
    first, second = (m.judgement.findings[0].figure for m in (before, after))
    assert first is not None
    assert second is not None
    assert before.summary["availability"] == after.summary["availability"] == 1.0
    # The same arrivals with other prompts: the intervals of both P95 meet, or the medians are within a half.
    medians = [m.summary["ttft"]["p50"] for m in (before, after)]
    assert (second.low or 0) <= (first.high or 0) or medians[1] <= 1.5 * medians[0], (
        before.summary["ttft"],
        after.summary["ttft"],
    )


PARSE = """
import json, sys
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

root = FlexibleArgumentParser()
ServeSubcommand().subparser_init(root.add_subparsers(required=True, dest="subparser"))
print("parsed:" + json.dumps([{k: str(v) for k, v in vars(root.parse_args(words)).items()} for words in json.loads(sys.argv[1])]))
"""


def test_vllm_reads_the_same_from_its_config_file_as_from_the_command_line(tmp_path: Path) -> None:
    flags = {
        "enable-prefix-caching": False,
        "max-num-seqs": 64,
        "gpu-memory-utilization": 0.5,
        "cudagraph-capture-sizes": [1, 2],
        "compilation-config": '{"cudagraph_mode": "NONE"}',
    }
    small = recipe.load(recipe.find("cpu-small"))
    chosen = small.model_copy(
        update={
            "engine": small.engine.model_copy(
                update={"flags": {**small.engine.flags, **flags}, "scheduler": "token_aware", "trust_remote_code": True}
            )
        }
    )
    known, _ = runs.known_space(chosen)
    without = output.without_fenno(chosen, known, tmp_path)
    (tmp_path / output.CONFIG).write_text(without.config)
    lines = [[*words[words.index("serve") :]] for words in (shlex.split(without.serve), shlex.split(without.serve_config))]
    done = subprocess.run(
        [sys.executable, "-c", PARSE, json.dumps(lines)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    line, file = json.loads(done.stdout.rpartition("parsed:")[2])
    # What `vllm serve` then does: a positional model wins over the flag.
    assert line.pop("model_tag") == file.pop("model")
    assert (line.pop("model"), file.pop("model_tag")) != (None, None)
    assert line == file
    assert (file["enable_prefix_caching"], file["max_num_seqs"], file["cudagraph_capture_sizes"]) == ("False", "64", "[1, 2]")
    assert (file["enforce_eager"], file["trust_remote_code"], file["host"], file["port"]) == ("True", "True", "127.0.0.1", "8000")
