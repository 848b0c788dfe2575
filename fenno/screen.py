"""A tuning run, and a server's start, as people see them: on a terminal what lives and counts down, else lines."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from rich.console import RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fenno import console, units

STYLES = {"met": "green", "missed": "red", "failed": "red"}


class Live(Progress):
    """rich's progress display with the table of finished trials above the bar."""

    def __init__(self, *columns: Any, **options: Any) -> None:
        self.trials = Table(header_style="bold")
        for name in ("trial", "setting", "found", "", "s"):
            # On a narrow terminal a setting takes more lines: cut off, it would be another one.
            self.trials.add_column(name, overflow="fold")
        super().__init__(*columns, **options)

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.trials.row_count:
            yield self.trials
        yield self.make_tasks_table(self.tasks)


class Clock(TextColumn):
    """How long it has taken, how long this stage has, and how long it still takes where earlier starts tell."""

    def render(self, task: Task) -> Text:
        now = time.monotonic()
        said = f"{now - task.fields['stage_began']:.0f} s, {now - task.fields['began']:.0f} s in all"
        ready = task.fields["ready"]
        if ready is not None:
            left = ready - now
            said += f"; about {units.show_duration(max(1.0, round(left)))} left" if left > 0 else "; longer than earlier starts"
        return Text(said)


class Starting:
    """What `fenno serve` tells of a start: every stage as it begins, and on a terminal a clock under them."""

    def __init__(self) -> None:
        self._lives = console.err.is_terminal and console.verbosity >= 0
        self._began = time.monotonic()
        self._live: Progress | None = None

    def stage(self, text: str, left: float | None) -> None:
        """A stage begins; `left`: seconds until the server is ready, by earlier starts."""
        now = time.monotonic()
        if self._live is None:
            self._began = now
        about = "" if left is None else f" (about {units.show_duration(max(1.0, round(left)))} left)"
        console.say(f"  {now - self._began:5.1f} s  {text}{about}")
        self.rest(over=False)
        self._live = Progress(SpinnerColumn(), Clock(""), console=console.err, transient=True, disable=not self._lives)
        self._live.add_task("", stage_began=now, began=self._began, ready=None if left is None else now + left)
        self._live.start()

    def say(self, text: str) -> None:
        self.rest()
        console.say(text)

    def rest(self, *, over: bool = True) -> None:
        """Take the clock away; `over`: the next stage is one of another start."""
        if self._live:
            self._live.stop()
        self._live = None if over else self._live


class Screen:
    """What `fenno tune` tells while it runs."""

    def __init__(self) -> None:
        self._quiet = not console.err.is_terminal or console.verbosity < 0
        self._live = Live(
            TextColumn("{task.description}"),
            BarColumn(24),
            TimeRemainingColumn(compact=True),
            TextColumn("left at most, {task.fields[seen]}"),
            console=console.err,
            disable=self._quiet,
        )
        self._task = self._live.add_task("", total=1.0, seen="", visible=False)
        self._started = time.monotonic()

    def __enter__(self) -> Screen:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.update(self._task, visible=False)
        self._live.stop()

    def say(self, text: str, style: str | None = None) -> None:
        self._live.reset(self._task, total=1.0, visible=False)
        console.say(f"{time.monotonic() - self._started:6.1f} s  {text}", style=style)

    def stage(self, text: str) -> None:
        console.say(f"{time.monotonic() - self._started:6.1f} s    {text}", level=1 if self._quiet else 0)

    def watch(self, share: float, text: str) -> None:
        self._live.update(self._task, completed=share, description="trial", seen=text, visible=True)

    def done(self, trial: Any) -> None:
        found = "; ".join(_finding(f) for f in trial.judgement.get("findings", [])) or trial.reason
        style = STYLES.get(trial.state, "yellow")
        self._live.update(self._task, visible=False)
        if self._quiet:
            console.say(f"{time.monotonic() - self._started:6.1f} s    {trial.state}: {found}", style=style)
        else:
            setting = " ".join(f"{knob}={value}" for knob, value in trial.point.items())
            # As text: what an engine's log says may look like markup.
            row = (str(trial.number), Text(setting), Text(found), Text(trial.state, style), f"{trial.seconds:.0f}")
            self._live.trials.add_row(*row)
        for note in trial.judgement.get("notes", []):
            console.say(f"            {note}", level=1)


def _finding(row: dict[str, Any]) -> str:
    """A stored finding in a few words: "p95_ttft 412 ms"."""
    figure = row["figure"]
    if figure is None:
        return f"{row['target']} not measured"
    name, value = row["target"], figure["value"]
    if name not in ("qps", "goodput", "memory", "memory_share", "availability") and value is not None:
        return f"{name} {value * 1e3:.0f} ms"
    return f"{name} {value:.2f}" if value is not None else f"{name} never"
