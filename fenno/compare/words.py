"""A comparison as people and pipelines read it: the table, a sentence for each difference, JUnit's XML, the exit code."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from fenno import errors

_NAMES = {"qps": "QPS", "p95_ttft": "P95 TTFT", "memory": "memory", "availability": "availability"}
_UNITS = {"qps": (1.0, ""), "memory": (2**30, " GiB"), "availability": (0.01, " %")}


def header(document: dict[str, Any]) -> tuple[str, ...]:
    """The table's columns: each arm, and each but the first against it."""
    first, *others = document["arms"]
    return ("95 % intervals", *document["arms"], *(f"{other} against {first}" for other in others))


def rows(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table: QPS, P95 TTFT, memory, availability."""
    found = []
    for metric, name in _NAMES.items():
        figures = [show(metric, arm["figures"].get(metric)) for arm in document["arms"].values()]
        changes = [f"{change(f)}: {f['state']}" for f in document["findings"] if f["metric"] == metric]
        found.append((name, *figures, *(changes or ["—"] * (len(figures) - 1))))
    return found


def show(metric: str, figure: dict[str, Any] | None) -> str:
    """A figure with its interval, in the metric's unit."""
    if figure is None:
        return "—"
    scale, unit = _UNITS.get(metric.rpartition(":")[2], (1e-3, " ms"))
    value, low, high = (None if figure[key] is None else figure[key] / scale for key in ("value", "low", "high"))
    ends = f" ({low:.5g} to {high:.5g})" if low is not None and high is not None else ""
    return f"{value:.5g}{unit}{ends}"


def change(finding: dict[str, Any]) -> str:
    """A change with its interval, in percent, of availability in percentage points."""
    found = finding["change"]
    if found is None:
        return "—"
    ratio = finding["by"] == "ratio"
    value, low, high = (None if found[key] is None else 100 * (found[key] - ratio) for key in ("value", "low", "high"))
    if value is None or low is None or high is None:
        return "no ratio: failures, or nothing in some blocks"
    return f"{value:+.2f} {'%' if ratio else 'points'} ({low:+.2f} to {high:+.2f})"


def lines(document: dict[str, Any]) -> list[str]:
    """What else differs, how sure that is, and what was left out."""
    found = [
        f"{f['arm']}, {f['metric']}: {change(f)}, {f['state']}"
        for f in document["findings"]
        if not f["table"] and f["state"] in ("better", "worse")
    ]
    found += [
        f"{arm}, within its blocks: {f['metric']} {change(f)} from the first half to the second, {f['state']}"
        for arm, findings in document["creep"].items()
        for f in findings
        if f["state"] == "worse"
    ]
    found += [f"the server of {arm} died {len(whys)} time(s): {whys[0]}" for arm, whys in document["deaths"].items()]
    if document["gpus"]:
        found.append(_places(document))
    if document["interrupted"]:
        found.append(f"interrupted {document['interrupted']}: what is told is of those; all records: {document['records']}")
    if document["left_out"]:
        found.append(f"left out, or no measurement: {'; '.join(document['left_out'][:5])}")
    return [*found, sentence(document)]


def _places(document: dict[str, Any]) -> str:
    """Where the arms ran, and whether each was everywhere equally often."""
    rounds = next(iter(document["arms"].values()))["blocks"]
    uneven = rounds % len(document["arms"])
    seldom = f"; {rounds} rounds are no multiple of {len(document['arms'])}: not each was equally often on each" if uneven else ""
    return f"side by side, in turn on the GPUs {' and '.join(document['gpus'])}{seldom}"


def sentence(document: dict[str, Any]) -> str:
    """What it comes to."""
    first = next(iter(document["arms"]))
    if not document["valid"]:
        nothing = "nothing is said of a difference. Next: see why"
        if not document["paired"]:  # stored runs
            return f"INVALID: not each of these load tests was a measurement; {nothing}, and measure it again"
        return f"INVALID: too few blocks were measurements; {nothing} blocks were left out, and give more --rounds"
    said = [f"{arm} is {_against(verdict, first, document['margin'])}" for arm, verdict in document["verdict"].items()]
    if not said:
        said = [f"measured in {document['arms'][first]['blocks']} blocks"]
    if document["availability"]:
        said += [f"availability of {arm}: {state}" for arm, state in document["availability"].items()]
    return "; ".join(said)


def _against(verdict: str, first: str, margin: float) -> str:
    named = {
        "mixed": f"better than {first} in some of the table and worse in some",
        "equivalent": f"equivalent to {first}: within {100 * margin:g} %",
        "not measured": "not measured",
    }
    return named.get(verdict) or (f"{verdict} than {first}" if verdict in ("better", "worse") else f"{verdict} from {first}")


def exit_code(document: dict[str, Any]) -> int:
    """0 unless an arm is worse than the first in something, or misses the availability target; 4 for what cannot be said; whatever
    was found, that of an interruption."""
    if document["gone"]:
        return errors.ENGINE
    if document["interrupted"]:
        return errors.INTERRUPTED
    if not document["valid"]:
        return errors.INCONCLUSIVE
    _, *others = document["arms"]
    reached = [(document["availability"] or {}).get(arm) for arm in others]
    if set(document["verdict"].values()) & {"worse", "mixed"} or "missed" in reached:
        return errors.FAILED
    return errors.INCONCLUSIVE if "unclear" in reached else errors.OK


def junit(document: dict[str, Any]) -> str:
    """One test case for each metric of the table and arm, and for each availability target: failed when worse, or missed."""
    suite = ElementTree.Element("testsuite", name="fenno compare")
    if not document["valid"]:
        ElementTree.SubElement(_case(suite, "valid"), "error", message=sentence(document))
    for finding in (f for f in document["findings"] if f["table"]):
        case = _case(suite, f"{finding['arm']}: {finding['metric']}")
        if finding["state"] == "worse":
            ElementTree.SubElement(case, "failure", message=change(finding))
        elif finding["state"] == "not measured":
            ElementTree.SubElement(case, "skipped", message="not measured")
    for arm, state in (document["availability"] or {}).items():
        case = _case(suite, f"{arm}: availability target")
        if state != "met":
            ElementTree.SubElement(case, "failure" if state == "missed" else "skipped", message=state)
    for name, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(len(list(suite.iter(tag)))))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ElementTree.Element, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname="fenno.compare", name=name)
