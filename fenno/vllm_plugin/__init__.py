"""What runs inside vLLM. `register` is the entry point: vLLM calls it in every one of its processes, before anything else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fenno import __version__, control


def register() -> None:
    """Record that the plugin was really loaded here, and show the scheduler's counters in `/metrics`.

    vLLM only logs a plugin that fails, which is why fenno looks for the mark. Without FENNO_CONTROL neither is done. Then tell
    vLLM of Grok, which it has not since 0.24.
    """
    path = os.environ.get(control.VARIABLE)
    if path:
        control.write_mark(Path(path), __version__)
        _show(Path(path))
    # vLLM is what calls this; where it does not, it is not imported for this.
    if "vllm" in sys.modules:
        from fenno.vllm_plugin import grok_versions

        grok_versions.register()


def _show(path: Path) -> None:
    """Add the counters of every rank to what this process shows in `/metrics`, read from the answers at each scrape.

    The scheduler lives in a process of its own, so that its registry is never scraped; the answers are where it can be seen.
    Several API servers (`--api-server-count`) show no registry but what a collector gathers from files that all of them write.
    """
    from prometheus_client import REGISTRY, multiprocess

    class Counters:
        def describe(self) -> list[Any]:
            return []

        def collect(self) -> Iterator[Any]:
            return families(path)

    class Gathered(multiprocess.MultiProcessCollector):  # type: ignore[misc]
        def collect(self) -> Iterator[Any]:
            yield from super().collect()
            yield from families(path)

    if not getattr(REGISTRY, "_fenno", False):
        REGISTRY._fenno = True
        REGISTRY.register(Counters())
        multiprocess.MultiProcessCollector = Gathered


def families(path: Path) -> Iterator[Any]:
    """One gauge a counter, `fenno:NAME`, with a sample a rank; none while the answers cannot be read."""
    from prometheus_client.core import GaugeMetricFamily

    try:
        answers = control.read_acknowledgements(path)
    except (OSError, ValueError):
        return
    for name in sorted({name for answer in answers.values() for name in answer.counters}):
        family = GaugeMetricFamily(f"fenno:{name}", f"The scheduler's {name.replace('_', ' ')}", labels=["rank"])
        for rank, answer in answers.items():
            if name in answer.counters:
                family.add_metric([str(rank)], answer.counters[name])
        yield family
