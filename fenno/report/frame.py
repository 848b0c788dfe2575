"""What stands around the parts of every page: the head with its policy and style, and the end."""

from __future__ import annotations

from importlib import resources

from fenno.report.markup import Html, tag

# The page may load nothing and run nothing, whatever a recipe or a log says.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def whole(title: str, fenno: str, *parts: str) -> str:
    """A page of its parts. `fenno`: the version that made it."""
    page = tag("html", head(title, fenno), tag("body", tag("main", *parts)), lang="en")
    # Logs can hold half a character; a page cannot.
    return f"<!doctype html>\n{page}\n".encode("utf-8", "replace").decode()


def head(title: str, fenno: str) -> Html:
    """What a browser has to know, and the style."""
    style = resources.files("fenno.report").joinpath("style.css").read_text(encoding="utf-8")
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content=f"fenno {fenno}"),
        tag("title", title),
        tag("style", Html(style)),
    )
