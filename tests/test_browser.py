"""The pages in a real browser, on a phone and on a desk, light and dark: nothing is cut off, all can be read, nothing is loaded."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from stub import runs
from test_loadtest_page import render, steady
from test_report import STUDIES
from test_report import render as render_study

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
AS_ROOT = [] if os.geteuid() else ["--no-sand" + "box"]  # spelled so that tests/test_docs.py does not take it for a place
WIDTHS = {"phone": 360, "desk": 1280}
SCHEMES = {"light": 1, "dark": 0}  # as Chromium numbers them

pytestmark = [pytest.mark.scenario, pytest.mark.skipif(BROWSER is None, reason="no Chromium on this host")]

# Every page in a frame of each width; what is found is written where `--dump-dom` prints it.
ROUND = """<!doctype html><meta charset="utf-8">%s<pre id="found"></pre><script>
const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const parts = colour => (colour.match(/[\\d.]+/g) || []).map(Number);
function ground(element) {
    for (let at = element; at; at = at.parentElement) {
        const [r, g, b, a = 1] = parts(at.ownerDocument.defaultView.getComputedStyle(at).backgroundColor);
        if (a > 0.9) return [r, g, b];
    }
    return null;
}
const scrolls = element => { // within a part of the page that scrolls by itself
    const wide = element.closest(".wide");
    return wide && element.ownerDocument.defaultView.getComputedStyle(wide).overflowX === "auto";
};
function look(frame) {
    const doc = frame.contentDocument, view = frame.contentWindow, found = {cut: [], faint: [], small: []};
    const root = doc.documentElement, wide = root.clientWidth, dark = view.matchMedia("(prefers-color-scheme: dark)").matches;
    const shown = element => element.checkVisibility() && !element.closest("title, style, head");
    for (const element of doc.querySelectorAll("body *")) {
        const box = element.getBoundingClientRect();
        if (shown(element) && !element.closest("svg, thead") && !scrolls(element) && box.right > wide + 1)
            found.cut.push(element.tagName + ": " + element.textContent.slice(0, 60));
    }
    const walk = doc.createTreeWalker(doc.body, NodeFilter.SHOW_TEXT);
    let texts = 0;
    while (walk.nextNode()) {
        const element = walk.currentNode.parentElement, text = walk.currentNode.textContent.trim();
        if (!text || !shown(element) || element.closest("title")) continue;
        texts += 1;
        const style = view.getComputedStyle(element), back = ground(element);
        const ink = parts(element.closest("svg") && element.namespaceURI.includes("svg") ? style.fill : style.color);
        const [high, low] = [light(ink), light(back)].sort((a, b) => b - a);
        if ((high + 0.05) / (low + 0.05) < 4.5) found.faint.push(text.slice(0, 60));
        if (parseFloat(style.fontSize) < 10) found.small.push(text.slice(0, 60));
    }
    return {...found, texts, dark, wider: root.scrollWidth - wide,
        loaded: view.performance.getEntriesByType("resource").length,
        lines: [...doc.querySelectorAll("svg path")].filter(path => path.getBoundingClientRect().width > 0).length};
}
addEventListener("load", () => {
    const all = Object.fromEntries([...document.querySelectorAll("iframe")].map(frame => [frame.name, look(frame)]));
    document.getElementById("found").textContent = JSON.stringify(all);
});
</script>"""


def pages(folder: Path) -> dict[str, str]:
    """Load tests with everything that a page can show, and studies with each verdict."""
    wrong = [runs.failure(i, 14.0 + i / 10, cls="a_class_with_a_long_name") for i in range(5)]
    wrong += [runs.failure(9, 12.0, outcome="timeout", error="too late: " + "x" * 300)]
    found = {
        "loadtest": render(folder / "whole", [*steady(), *wrong], model="/models/" + "of-a-very-long-name" * 6),
        "interrupted": render(folder / "part", steady()[:90], ended=False),
        "empty": render(folder / "none", []),
    }
    return found | {study.__name__: render_study(*study()) for study in STUDIES}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("browser")
    frames = "".join(
        f'<iframe name="{name} {where}" style="border: 0" width="{width}" height="900" srcdoc="{html.escape(text)}"></iframe>'
        for name, text in pages(folder).items()
        for where, width in WIDTHS.items()
    )
    (folder / "round.html").write_text(ROUND % frames, encoding="utf-8")

    @cache
    def look(scheme: str) -> dict[str, Any]:
        options = ["--headless", *AS_ROOT, "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={folder / scheme}"]
        options += [f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", "--dump-dom", (folder / "round.html").as_uri()]
        environment = {**os.environ, "HOME": str(folder)}
        done = subprocess.run([str(BROWSER), *options], capture_output=True, text=True, env=environment, timeout=200)
        found = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
        assert found, done.stderr[-2000:]
        return dict(json.loads(html.unescape(found[1])))

    return look


@pytest.mark.parametrize("scheme", SCHEMES)
def test_on_a_phone_and_on_a_desk_nothing_is_cut_off(seen: Callable[[str], dict[str, Any]], scheme: str) -> None:
    for name, page in seen(scheme).items():
        assert (name, page["cut"], page["wider"]) == (name, [], 0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_light_and_dark_every_word_stands_out_from_its_ground(seen: Callable[[str], dict[str, Any]], scheme: str) -> None:
    for name, page in seen(scheme).items():
        assert page["dark"] == (scheme == "dark"), name
        assert page["texts"] > 10, name
        assert (name, page["faint"], page["small"]) == (name, [], [])


def test_a_browser_loads_nothing_for_it_and_draws_the_lines(seen: Callable[[str], dict[str, Any]]) -> None:
    found = seen("light")
    assert {page["loaded"] for page in found.values()} == {0}
    for where in WIDTHS:
        assert found[f"loadtest {where}"]["lines"] >= 8
