"""Pictures as inline SVG. Places are in percent across and in pixels down, so that one picture suits a phone and a wide screen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fenno.report.markup import Html, tag
from fenno.tune.judge import Figure

Say = Callable[[float], str]

# Every state has a shape of its own: colour alone tells nothing to many people.
_SHAPES = {
    "met": tag("circle", r=5, class_="solid"),
    "missed": tag("path", d="M0-7 7 0 0 7-7 0z", class_="solid"),
    "unclear": tag("path", d="M0-6 6 5-6 5z", class_="solid"),
    "invalid": tag("circle", r=4.5, class_="hollow"),
    "failed": tag("path", d="M-5-5 5 5M5-5-5 5", class_="hollow"),
}


@dataclass(frozen=True)
class Mark:
    """One trial in a picture over time. A `value` of None was not measured; `ticks` are further values."""

    number: int
    value: float | None
    state: str
    cold: bool
    text: str
    bounds: tuple[float, float] | None = None
    ticks: tuple[float, ...] = ()


@dataclass(frozen=True)
class Line:
    """Points of a line from left to right; None where there is no value."""

    name: str
    points: tuple[tuple[float, float | None], ...]


def percent(share: float) -> str:
    return f"{share:.2f}%"


def glyph(state: str, cold: bool = False) -> Html:
    """The sign of a state around (0, 0); a cold start stands in a square."""
    frame = (tag("rect", x=-10, y=-10, width=20, height=20, rx=3, class_="hollow"),) if cold else ()
    return tag("g", _SHAPES[state], *frame, class_=state)


def legend(state: str, words: str, cold: bool = False) -> Html:
    sign = tag("svg", glyph(state, cold), viewBox="-12 -12 24 24", class_="sign", aria_hidden="true")
    return tag("span", sign, words, class_="key")


def intervals(rows: Sequence[tuple[str, str, Figure]], limit: float, more_is_better: bool, say: Say, label: str) -> Html:
    """Figures with their intervals, one below the other, against the side of `limit` that is good. `rows`: name, state, figure."""
    numbers = [n for _, _, f in rows for n in (f.value, f.low, f.high) if n is not None and math.isfinite(n)]
    low, high = _extent([limit, *numbers])

    def at(value: float) -> float:
        return 19 + 78 * min(max((value - low) / (high - low), 0.0), 1.0)

    bottom = 22 + 24 * len(rows)
    edge, right = at(limit), at(high)
    good = (edge, right - edge) if more_is_better else (at(low), edge - at(low))
    return tag(
        "svg",
        tag("rect", x=percent(good[0]), y=16, width=percent(good[1]), height=bottom - 16, class_="good"),
        tag("line", x1=percent(at(low)), x2=percent(right), y1=bottom, y2=bottom, class_="axis"),
        tag("line", x1=percent(edge), x2=percent(edge), y1=16, y2=bottom, class_="limit"),
        _text(edge, 11, f"limit {say(limit)}", "end" if edge > 58 else "start"),
        _text(at(low), bottom + 14, say(low), "start"),
        _text(right, bottom + 14, say(high), "end"),
        *(part for i, (name, state, f) in enumerate(rows) for part in _interval_row(32 + 24 * i, name, state, f, at)),
        height=bottom + 20,
        role="img",
        aria_label=label,
    )


def _interval_row(y: float, name: str, state: str, figure: Figure, at: Callable[[float], float]) -> list[Html]:
    parts = [tag("text", name, x=0, y=y + 4)]
    if figure.low is not None and figure.high is not None:
        parts.append(_whisker(at(figure.low), at(figure.high), y, open_=math.isinf(figure.high)))
    dot = tag("svg", glyph(state), x=percent(at(figure.value)), y=y, overflow="visible")
    return [tag("g", *parts, dot, class_=state)]


def _whisker(low: float, high: float, y: float, open_: bool) -> Html:
    line = tag("line", x1=percent(low), x2=percent(high), y1=y, y2=y, class_="interval open" if open_ else "interval")
    ends = (low,) if open_ else (low, high)
    return tag("g", line, *(tag("line", x1=percent(x), x2=percent(x), y1=y - 5, y2=y + 5, class_="interval") for x in ends))


def _extent(numbers: Sequence[float]) -> tuple[float, float]:
    """The ends of an axis: from zero, unless everything lies far from it."""
    least, most = min(numbers), max(numbers)
    room = (most - least) * 0.2 or most * 0.2 or 1.0
    return (0.0, most + room) if least < 0.8 * most else (max(0.0, least - room), most + room)


def over_time(marks: Sequence[Mark], limit: float, say: Say, label: str, *, height: int, left: float) -> Html:
    """Trials in their order on a logarithmic scale, with a line at `limit`; every mark leads to its row of the table.

    `left`: the percentage of the width that the scale's own words take.
    """
    low, high = _log_extent([limit, *(n for mark in marks for n in _numbers(mark) if n > 0 and math.isfinite(n))])
    # Above the scale: what has no figure, or one that is infinite.
    top, bottom = 26 if any(_off(m) for m in marks) else 8, height - 22

    def y(value: float) -> float:
        share = (math.log(max(value, low)) - math.log(low)) / (math.log(high) - math.log(low))
        return round(bottom - (bottom - top) * min(share, 1.0), 1)

    def x(place: int) -> float:
        return left + (98 - left) * (place + 0.5) / max(1, len(marks))

    every = math.ceil(len(marks) / 16)
    grid = [part for value in _ticks(low, high) for part in _grid_line(y(value), left, say(value))]
    return tag(
        "svg",
        *grid,
        tag("line", x1=percent(left), x2="98%", y1=y(limit), y2=y(limit), class_="limit"),
        *(_text(x(i), height - 5, str(m.number), "middle") for i, m in enumerate(marks) if i % every == 0),
        *(_mark(mark, x(i), y, 12.0) for i, mark in enumerate(marks)),
        height=height,
        role="group",
        aria_label=label,
    )


def against(marks: Sequence[tuple[float, Mark]], say: Say, label: str, *, height: int, left: float) -> Html:
    """Trials by two positive figures on logarithmic scales: the one across, the mark's own upwards. `say` spells either."""
    across, up = [x for x, _ in marks], [mark.value or 0.0 for _, mark in marks]
    (start, end), (low, high), bottom = _log_extent(across), _log_extent(up), height - 22

    def y(value: float) -> float:
        return round(bottom - (bottom - 8) * _share(value, low, high), 1)

    def x(value: float) -> float:
        return left + (98 - left) * _share(value, start, end)

    return tag(
        "svg",
        *(part for value in _ticks(low, high) for part in _grid_line(y(value), left, say(value))),
        *(_text(x(value), height - 5, say(value), "middle") for value in _ticks(start, end)),
        *(_mark(mark, x(value), y, 12.0) for value, mark in marks),
        height=height,
        role="group",
        aria_label=label,
    )


def _share(value: float, low: float, high: float) -> float:
    """Where a positive number lies between the ends of a logarithmic axis."""
    return min(max(math.log(value / low) / math.log(high / low), 0.0), 1.0)


def lines(drawn: Sequence[Line], extent: tuple[float, float], label: str, unit: str, *, height: int = 150) -> Html:
    """Lines over the same axis, from zero up. `unit`: of the axis. A line is broken where a value is None."""
    left, top, bottom = 9.0, 8, height - 20
    most = max([y for line in drawn for _, y in line.points if y is not None], default=0.0) * 1.05 or 1.0
    low, high = extent

    def y(value: float) -> float:
        return round(bottom - (bottom - top) * value / most, 1)

    ticks = _even_ticks(0.0, most)
    across = _even_ticks(low, high) if high > low else [low]
    paths = [tag("path", d=_path(line, extent, most), class_=f"line-{place}") for place, line in enumerate(drawn)]
    # A stretched picture inside the one that is not: paths know no percentages.
    inside = tag("svg", *paths, x=percent(left), y=top, width=percent(98 - left), height=bottom - top, viewBox="0 0 1000 1000",
                 preserveAspectRatio="none", overflow="visible")  # fmt: skip
    return tag(
        "svg",
        *(part for value in ticks for part in _grid_line(y(value), left, f"{value:.6g}")),
        *(_text(left + (98 - left) * (x - low) / ((high - low) or 1.0), height - 4, f"{x:g} {unit}", "middle") for x in across),
        inside,
        height=height,
        role="img",
        aria_label=label,
    )


def _path(line: Line, extent: tuple[float, float], most: float) -> str:
    """The line in a picture of 1000 by 1000, y downwards; a point that stands alone becomes a short dash."""
    low, high = extent
    parts, pen = [], "M"
    for x, y in line.points:
        if y is None:
            pen = "M"
            continue
        parts.append(
            f"{pen}{1000 * (x - low) / ((high - low) or 1.0):.1f} {1000 * (1 - y / most):.1f}" + ("h2" if pen == "M" else "")
        )
        pen = "L"
    return "".join(parts)


def line_legend(place: int, words: str) -> Html:
    """The key of the line that is drawn at this place."""
    sign = tag(
        "svg", tag("path", d="M-11 0h22", class_=f"line-{place}"), viewBox="-12 -12 24 24", class_="sign", aria_hidden="true"
    )
    return tag("span", sign, words, class_="key")


def _mark(mark: Mark, x: float, y: Callable[[float], float], top: float) -> Html:
    """A trial's sign with its interval; at the top of the picture when it has no figure."""
    parts = [tag("line", x1=-6, x2=6, y1=y(value), y2=y(value), class_="tick") for value in mark.ticks if 0 < value < math.inf]
    if mark.bounds and math.isfinite(mark.bounds[1]):
        parts.append(tag("line", x1=0, x2=0, y1=y(mark.bounds[0]), y2=y(mark.bounds[1]), class_="interval"))
    middle = top if mark.value is None or _off(mark) else y(mark.value)
    sign = tag("g", tag("circle", r=13, class_="finger"), glyph(mark.state, mark.cold), transform=f"translate(0 {middle:g})")
    link = tag("a", tag("title", mark.text), *parts, sign, href=f"#trial-{mark.number}", class_=mark.state)
    return tag("svg", link, x=percent(x), overflow="visible")


def _off(mark: Mark) -> bool:
    return mark.value is None or math.isinf(mark.value)


def _numbers(mark: Mark) -> Iterable[float]:
    return (*([] if mark.value is None else [mark.value]), *(mark.bounds or ()), *mark.ticks)


def _log_extent(numbers: Sequence[float]) -> tuple[float, float]:
    """The ends of a logarithmic axis. What is a thousand times off is as far as what is fifty times off."""
    centre = numbers[0]
    least, most = max(min(numbers), centre / 50), min(max(numbers), centre * 50)
    return least / 1.25, most * 1.25


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between two positive ones: 1, 2, 5, 10 and so on, fewer on a long axis, even steps on a short one."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        found = [value for exponent in decades for step in steps if low <= (value := step * 10.0**exponent) <= high]
        if len(found) <= 6:
            break
    return found if len(found) > 1 else _even_ticks(low, high)


def _even_ticks(low: float, high: float) -> list[float]:
    """The multiples of the largest round step of which there are three or more."""
    unit = 10.0 ** math.floor(math.log10(high - low))
    for step in (5 * unit, 2 * unit, unit, unit / 2, unit / 5):
        found = [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
        if len(found) > 2:
            break
    return found


def _grid_line(y: float, left: float, words: str) -> tuple[Html, Html]:
    return tag("line", x1=percent(left), x2="98%", y1=y, y2=y, class_="grid"), tag("text", words, x=0, y=y + 4)


def _text(x: float, y: float, words: str, anchor: str) -> Html:
    return tag("text", words, x=percent(x), y=y, text_anchor=anchor)
