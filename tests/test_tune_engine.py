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

from fenno import control, recipe
from fenno.engine import checkpoint, dummy, live
from fenno.load import run as load
from fenno.recipe import Recipe
from fenno.tune import bench, output, quality, trial
from fenno.tune import run as runs
from fenno.tune import space as spaces

pytestmark = pytest.mark.engine
FENNO = str(Path(sys.executable).with_name("fenno"))
# The limit of a hang, no measure: a host may stand still for a minute.
LONG = 300.0


def tune(out: Path, *options: str, chosen: str = "cpu-small") -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON document and standard error of `fenno tune` on a recipe, the embedded one unless given."""
    command = [FENNO, "-v", "tune", chosen, "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=out.parent)
    assert done.stdout.strip(), done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


def engines() -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if "grok2-small" in " ".join(p.info["cmdline"] or [])]


def test_a_target_that_can_be_met_is_met_and_confirmed_after_a_cold_start(tmp_path: Path) -> None:
    # Half the embedded rate of a tenth of its work, and a wide target: what is tested is the verdict, not this machine.
    light = yaml.safe_load(recipe.find("cpu-small").read_text())
    classes = [{"name": "light", "share": "100%", "prompt_tokens": [16, 48], "output_tokens": 4}]
    light["workload"] = {"rate": 4, "timeout": "120s", "classes": classes}
    (tmp_path / "light.yaml").write_text(yaml.safe_dump(light))
    asked = ("--target-p95", "20s", "--target-qps", "4", "--budget", "8m")
    code, document, log = tune(tmp_path / "studies", *asked, chosen=str(tmp_path / "light.yaml"))
    assert (code, document["verdict"]) == (0, "met"), log
    assert document["figures"]["p95_ttft"]["high"] <= 20.0
    assert "after a cold start with plain flags" in document["sentence"]
    assert document["outputs"]["state"] in ("unchanged", "blind"), document["outputs"]["sentence"]
    study = Path(tmp_path, document["study"])
    assert yaml.safe_load((study / "tuned.yaml").read_text())["targets"] == {"p95_ttft": "20.0s", "qps": 4.0, "memory": 0.85}
    assert recipe.load(study / "tuned.yaml").engine.model == "dummy:grok2-small"
    # More than two only where this host was so busy that it had to go on after the cold start.
    assert log.count("ready after") >= 2
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


def test_an_overload_leaves_nothing_to_the_next_trial_and_other_limits_change_no_output(tmp_path: Path) -> None:
    chosen = with_weights(recipe.load(recipe.find("cpu-small")).with_targets(qps=4.0, p95_ttft=3.0), tmp_path / "model")
    _, space = runs.known_space(chosen)
    with bench.Engines(chosen, tmp_path, space, Silent()).wide({}) as seat:
        engine = seat.engine

        def asked() -> control.Acknowledgement:
            """The scheduler's own answer, so of now: what `/metrics` says is old where the API server lags behind."""
            return live.change(engine.url, engine.control, {}, timeout=LONG)

        seat.move(space.defaults)
        before, defaults = asked(), seat.answers()

        seat.move({**space.defaults, spaces.CAP: 8, spaces.BUDGET: 256})
        limited = quality.compare(defaults, seat.answers())
        plan = replace(trial.plan_for(chosen, engine, arm="overload", seed=1), rate=None, users=40, duration=LONG, timeout=LONG)
        with load.running(plan, tmp_path / "overload") as overload:
            seen = [asked()]
            while seen[-1].waiting < 8 and not overload.poll():
                seen.append(asked())
            overload.stop()
        assert seen[-1].waiting >= 8
        assert max(now.running for now in seen) <= 8

        seat.move(space.defaults)
        after, again = asked(), quality.compare(defaults, seat.answers())
        live.settle(engine.url, LONG)
    for outputs in (limited, again):
        assert outputs.state == "same" and outputs.found and outputs.found.count > 500, outputs.sentence
    assert (after.running, after.waiting, after.reached) == (before.running, before.waiting, before.reached) == (0, 0, True)
    assert after.applied == before.applied
    caps = [name for name in before.counters if name.startswith("cap_")]
    assert caps and all(after.counters[name] == before.counters[name] for name in caps)


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
