"""What a person gets for bad input: one sentence with what to do next, the documented exit code, and nothing left behind."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from stub.harness import Done, Place, side_by_side

pytestmark = pytest.mark.scenario

OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.15 GiB."


@dataclass
class Case:
    """A command, the exit code it must have, what its error must say, and how many engines it may start."""

    command: Callable[[Place], list[object]]
    code: int
    says: tuple[str, ...]
    starts: int = 0


def tune(*options: object, **parts: Any) -> Callable[[Place], list[object]]:
    return lambda place: ["tune", place.recipe(**parts), *options]


def flag(name: str, value: object) -> Callable[[Place], list[object]]:
    return tune(engine={"flags": {name: value}})


def written(text: bytes, *command: object) -> Callable[[Place], list[object]]:
    """A command on a file of prompts."""

    def make(place: Place) -> list[object]:
        (place.folder / "prompts").write_bytes(text)
        return [*command, place.recipe(), "--prompts", "prompts", "--rate", 5]

    return make


def url(command: str) -> Callable[[Place], list[object]]:
    """A command on a recipe whose engine is not started by fenno."""
    return lambda place: [command, place.recipe(engine={"model": None, "python": None, "url": "http://127.0.0.1:9"})]


USAGE = {
    "unknown-key": Case(tune(taregts={}), 2, ("stub.yaml:27: unknown key `taregts`; did you mean `targets`?", "recipe schema")),
    "gone-flag": Case(flag("swap-space", 4), 2, ("stub: vLLM 0.32.0 has no flag `swap-space`", "instead of swapping")),
    "renamed-flag": Case(flag("max-num-sequences", 4), 2, ("has no flag `max-num-sequences`", "did you mean `max-num-seqs`?")),
    "served-flag": Case(
        lambda p: ["serve", p.recipe(engine={"flags": {"dtype": "fp12"}})], 2, ("`dtype` cannot be 'fp12'", "bfloat16")
    ),
    "no-recipe": Case(lambda p: ["tune", "cpu-smal"], 2, ("there is no recipe 'cpu-smal'", "did you mean cpu-small?")),
    "no-yaml": Case(lambda p: ["recipe", "lint", p.python], 2, ("a recipe is a mapping of keys", "fenno recipe show")),
    "linted-search": Case(
        lambda p: ["recipe", "lint", p.recipe(search={"restart": {"max-num-sequences": [4]}})],
        2,
        ("search.restart: vLLM 0.32.0 has no flag `max-num-sequences`", "did you mean `max-num-seqs`?"),
    ),
    "linted-knob": Case(
        lambda p: ["recipe", "lint", p.recipe(search={"live": {"max_num_seqs": [4]}})], 2, ("is no live knob", "live knobs are")
    ),
    "tuned-folder": Case(lambda p: ["tune", p.folder], 2, ("is a folder, not a recipe",)),
    "served-address": Case(lambda p: ["serve", "localhost:8000"], 2, ("no recipe 'localhost:8000'", "http://localhost:8000")),
    "target": Case(tune("--target", "p95=800ms"), 2, ("there is no target `p95`; did you mean `p95_ttft`?", "qps, goodput")),
    "tuned-url": Case(url("tune"), 2, ("cannot change it", "fenno loadtest")),
    "served-url": Case(url("serve"), 2, ("runs already", "http://127.0.0.1:9")),
    "p95": Case(tune("--target-p95", "800q"), 2, ("'800q' is not a duration such as 800ms",)),
    "qps": Case(tune("--target-qps", "-1"), 2, ("`qps`", "greater than 0")),
    "budget": Case(tune("--budget", "x"), 2, ("'x' is not a duration such as 800ms, 0.8s, 15m or 2h",)),
    "no-budget": Case(tune("--budget", "0"), 2, ("more than nothing",)),
    "memory": Case(tune("--max-memory", "140%"), 2, ("'140%' is not a share such as 85%",)),
    "option": Case(tune("--bogus", "1"), 2, ("No such option", "--bogus")),
    "no-prompts": Case(tune(workload={"prompts": "/no/prompts.json"}), 2, ("cannot read /no/prompts.json", "readable file")),
    "broken-prompts": Case(written(b'{"body": 1}\n', "loadtest"), 2, ("prompts:1: no `body`", "OpenAI batch")),
    "tuned-trace": Case(tune(workload={"trace": "t.csv", "rate": None}), 2, ("this workload has `trace`", "fenno loadtest")),
    "tuned-turns": Case(tune(workload={"endpoint": "chat", "turns": 2}), 2, ("this workload has `turns`", "fenno loadtest")),
    "capacity-of-a-ramp": Case(
        lambda p: ["loadtest", p.recipe(), "--find-capacity", "--ramp", "1:2"], 2, ("this workload has `ramp`", "fenno loadtest")
    ),
    "capacity-of-a-goodput": Case(
        lambda p: ["loadtest", p.recipe(), "--find-capacity", "--target", "goodput=4", "--target", "p95_ttft=1s"],
        2,
        ("--find-capacity under a goodput target", "fenno tune --maximize goodput"),
    ),
    "capacity-by-no-step": Case(
        lambda p: ["loadtest", p.recipe(), "--find-capacity", "--step", "1"], 2, ("--step is 1", "more than 1")
    ),
    "capacity-by-endless-steps": Case(
        lambda p: ["loadtest", p.recipe(), "--find-capacity", "--step", "inf"], 2, ("--step is inf", "more than 1")
    ),
    "step-of-nothing": Case(lambda p: ["loadtest", p.recipe(), "--step", "2"], 2, ("--step is for --find-capacity", "give both")),
    "no-trace": Case(lambda p: ["loadtest", p.recipe(), "--trace", "/no/trace"], 2, ("cannot read /no/trace: No such file",)),
    "two-ways": Case(lambda p: ["loadtest", p.recipe(), "--users", "2", "--ramp", "1:2"], 2, ("--users and --ramp exclude",)),
    "ramp": Case(lambda p: ["loadtest", p.recipe(), "--ramp", "2-40"], 2, ("--ramp is '2-40'", "such as 2:40")),
    "duration": Case(lambda p: ["loadtest", p.recipe(), "--duration", "30q"], 2, ("'30q' is not a duration",)),
    "no-log": Case(lambda p: ["explain", "nothing.log"], 2, ("there is no log nothing.log",)),
    "out": Case(tune("--out", "/dev/null/x"), 1, ("cannot keep a study in /dev/null/x", "Not a directory", "--out")),
    "no-interpreter": Case(tune(engine={"python": "/no/python"}), 5, ("cannot run /no/python: No such file", "engine.python")),
    "no-vllm": Case(tune(engine={"python": "/bin/true"}), 5, ("vLLM under /bin/true cannot be imported",)),
}
STUBBORN = {"STUB_HANG": 1, "STUB_STUBBORN": 1}
ENGINES = {
    "hangs": Case(
        lambda p: ["serve", p.recipe(env=STUBBORN, engine={"ready_timeout": "2s"})],
        5,
        ("not ready after 2 s", "the model's config", "engine.ready_timeout"),
        1,
    ),
    "dies": Case(tune(env={"STUB_DIE": "start", "STUB_WORDS": OUT_OF_MEMORY}), 5, ("the engine ended: ", "GPU", "engine.log"), 1),
    "refuses": Case(
        lambda p: ["serve", p.recipe(env={"STUB_STATUS": 500})], 5, ("refused a one-token request", "500", "engine.log"), 1
    ),
}
CASES = {**ENGINES, **USAGE}


@dataclass
class Came:
    """What came of a case."""

    done: Done
    starts: int
    left: bool
    files: set[str] = field(default_factory=set)


def play(case: Case) -> Callable[[Place], Came]:
    def run(place: Place) -> Came:
        command = case.command(place)
        before = {path.name for path in place.folder.iterdir()}
        done = place.fenno(*command)
        after = {path.name for path in place.folder.iterdir()} - {"cache", "calls", "0.err"}
        return Came(done, len(place.starts()), not place.empty(), after - before)

    return run


@pytest.fixture(scope="module")
def came(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Came]]:
    with side_by_side({name: play(case) for name, case in CASES.items()}, tmp_path_factory.mktemp, workers=4) as tell:
        yield tell


@pytest.mark.parametrize("name", CASES)
def test_bad_input_gets_a_sentence_and_its_exit_code(came: Callable[[str], Came], name: str) -> None:
    case, got = CASES[name], came(name)
    said = " ".join(got.done.err.split())
    assert got.done.code == case.code, got.done.err
    assert all(words in said for words in case.says), got.done.err
    assert (got.starts, got.left, got.done.out) == (case.starts, False, "")
    assert not any(word in got.done.err for word in ("Traceback", "unexpected", "\x1b")), got.done.err


@pytest.mark.parametrize("name", USAGE)
def test_bad_input_leaves_no_files(came: Callable[[str], Came], name: str) -> None:
    assert came(name).files == set()


LOST = """
import os, signal, time
from fenno import cli

class Late:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000): pass  # the signal's handler runs here, and what it raises is ignored by Python

def command(**_):
    late = Late()
    del late
    time.sleep(30)

cli.app = command
cli.main()
"""


def test_an_interruption_that_falls_on_the_clearing_away_of_an_object_is_not_lost() -> None:
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=55, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (130, False), done.stderr
