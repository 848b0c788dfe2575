"""HTML from functions. Text is escaped where it is put in, so that no part of a page has to remember to."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_VOID = {"meta", "br"}


class Html(str):
    """Markup, as against text: only what this module made is put in as it is."""

    __slots__ = ()


def join(parts: Iterable[str], between: str = "") -> Html:
    """Markup and text, one after the other."""
    return Html(between.join(part if isinstance(part, Html) else html.escape(part) for part in parts))


def tag(element: str, *inside: str, **attributes: str | float | None) -> Html:
    """One element. `class_` is class, `data_label` is data-label; an attribute that is None is left out."""
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Html(f"<{element}{given}>" if element in _VOID else f"<{element}{given}>{join(inside)}</{element}>")


def section(title: str, *inside: str) -> Html:
    return tag("section", tag("h2", title), *inside)


def table(caption: str, heads: Sequence[str], rows: Iterable[Html], **attributes: str | None) -> Html:
    """A table of rows that `row` made."""
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in heads)))
    return tag("table", tag("caption", caption), head, tag("tbody", *rows), **attributes)


def row(heads: Sequence[str], cells: Sequence[str], **attributes: str | None) -> Html:
    """One row, its first cell a header. On a narrow screen cells stand below each other, each with its column's name."""
    first, *rest = cells
    return tag(
        "tr",
        tag("th", first, scope="row", data_label=heads[0]),
        *(tag("td", cell, data_label=name) for name, cell in zip(heads[1:], rest, strict=True)),
        **attributes,
    )


def facts(pairs: Iterable[tuple[str, str]]) -> Html:
    """Names and what they stand for; those that stand for nothing are left out."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", what)) for name, what in pairs if what))
