"""A hook of mkdocs: what the pages link to outside docs/ comes into the site too, and their links lead there."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def place(page: str, target: str) -> str | None:
    """A link's target from the repository's root; None for one that stays within docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return None if path == "docs" or path.startswith("docs/") else path


def on_files(files: Files, config: Any) -> Files:
    pages = [(file.src_uri, Path(file.abs_src_path).read_text()) for file in files.documentation_pages() if file.abs_src_path]
    named = {path for page, text in pages for target, _ in LINK.findall(text) if (path := place(page, target))}
    for path in sorted(named):
        source = ROOT / path
        # As it is: a page of the site would need its own links mended too.
        files.append(File.generated(config, f"repository/{path}.txt", content=source.read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    here = posixpath.dirname(page.file.src_uri)

    def mended(found: re.Match[str]) -> str:
        path = place(page.file.src_uri, found[1])
        return f"]({posixpath.relpath(f'repository/{path}.txt', here or '.')})" if path else found[0]

    return LINK.sub(mended, markdown)
