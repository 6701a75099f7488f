"""A run at a glance: a live panel on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from preceptor.launch.child import Child, State
from preceptor.launch.metrics import MetricsTail
from preceptor.launch.progress import TIME_PARTS, Progress, number
from preceptor.queue import Backlog, QueueError, RolloutQueue

_PANEL_SECONDS = 0.5
_LINE_SECONDS = 10.0

_STYLES = {
    State.WAITING: "dim",
    State.STARTING: "yellow",
    State.READY: "green",
    State.RESTARTING: "bold red",
    State.ENDED: "dim",
}


class RunView:
    """A context. `refresh` may be called as often as one likes."""

    def __init__(
        self,
        title: str,
        metrics: Path,
        queue: RolloutQueue,
        children: Sequence[Child],
        console: Console,
    ) -> None:
        """
        Args:
            title: of the panel.
            metrics: the trainer's metrics.jsonl; it need not exist.
            queue: asked for its backlog; one with retry_seconds=0, since the view does not wait.
            children: the parts.
            console: a terminal or not.
        """
        self._title = title
        self._tail = MetricsTail(metrics)
        self._queue = queue
        self._children = children
        self._console = console
        self._progress = Progress()
        self._last_backlog: Backlog | None = None
        self._started_at = time.monotonic()
        self._due_at = 0.0
        # Without a terminal nothing is drawn, and lines are printed instead.
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The last word: what happened up to now.
        self.refresh(now=True)
        if self._live:
            self._live.stop()

    def refresh(self, now: bool = False) -> None:
        """Read and show, if it is time (or `now`)."""
        if not now and time.monotonic() < self._due_at:
            return
        self._due_at = time.monotonic() + (_PANEL_SECONDS if self._live else _LINE_SECONDS)
        batch = self._tail.read()
        if batch.from_start:
            self._progress = Progress()
        self._progress.take(batch.rows)
        self._progress.unreadable += batch.unreadable
        backlog = self._backlog()
        if self._live:
            seconds = time.monotonic() - self._started_at
            panel = panel_of(self._title, self._progress, backlog, self._children, seconds)
            self._live.update(panel, refresh=True)
        else:
            line = line_of(self._progress, backlog, self._children)
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _backlog(self) -> Backlog | None:
        redis = next((child for child in self._children if child.part.name == "redis"), None)
        if redis is not None and redis.state is State.ENDED:
            return self._last_backlog
        if redis is not None and redis.state is not State.READY:
            return None
        try:
            self._last_backlog = self._queue.backlog()
        except QueueError:
            # Shown as unknown: whether that matters is for the parts and the supervisor to say.
            return None
        return self._last_backlog


def line_of(progress: Progress, backlog: Backlog | None, children: Sequence[Child]) -> str:
    """The run in one line of plain text."""
    words = [
        time.strftime("%H:%M:%S"),
        f"step {progress.step}/{_show(progress.steps, '.0f')}",
        f"raw KL {_show(progress.latest('raw_kl'), '.3f')}",
        f"accuracy {_show(number(progress.evaluation, 'accuracy'), '.3f')}",
        f"reward {_show(progress.mean('reward'), '.3f')}",
        f"{_show(progress.tokens_per_second(), ',.0f')} tokens/s",
        _queue_words(backlog),
        _time_words(progress),
        ", ".join(f"{child.part.name} {child.state.value}" for child in children),
        f"restarts {sum(child.restarts for child in children)}",
    ]
    return " | ".join(words)


def panel_of(
    title: str,
    progress: Progress,
    backlog: Backlog | None,
    children: Sequence[Child],
    seconds: float,
) -> Panel:
    """The run as a panel."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column()
    bar = ProgressBar(total=progress.steps or 1, completed=progress.step, width=40)
    steps = Table.grid(padding=(0, 1))
    steps.add_row(bar, f"{progress.step}/{_show(progress.steps, '.0f')}")
    rows.add_row("step", steps)
    accuracy = _show(number(progress.evaluation, "accuracy"), ".3f")
    before = _show(number(progress.first_evaluation, "accuracy"), ".3f")
    rows.add_row("accuracy", f"[bold]{accuracy}[/] at the last evaluation, {before} at the first")
    rows.add_row("reward", f"{_show(progress.mean('reward'), '.3f')} on training rollouts")
    rows.add_row("raw KL", _show(progress.latest("raw_kl"), ".3f"))
    rows.add_row("speed", f"{_show(progress.tokens_per_second(), ',.0f')} tokens/s")
    rows.add_row("queue", _queue_words(backlog))
    rows.add_row("trainer", _time_words(progress))
    rows.add_row("parts", _part_words(children))
    lines: list[Table | Text] = [rows]
    if progress.warning:
        lines.append(Text(f"warning: {progress.warning}", style="yellow"))
    if progress.unreadable:
        lines.append(Text(f"{progress.unreadable} unreadable lines of metrics", style="yellow"))
    minutes, rest = divmod(int(seconds), 60)
    return Panel(
        Group(*lines),
        title=f"[bold]{escape(title)}[/]",
        subtitle=f"{minutes}:{rest:02d}",
        title_align="left",
        subtitle_align="right",
        border_style="blue",
    )


def _part_words(children: Sequence[Child]) -> Text:
    words = Text()
    for child in children:
        words.append(f"{child.part.name} ")
        words.append(child.state.value, style=_STYLES[child.state])
        if child.restarts:
            words.append(f" (restarted {child.restarts}x)", style="red")
        words.append("   ")
    return words


def _queue_words(backlog: Backlog | None) -> str:
    if backlog is None:
        return "queue unknown"
    return (
        f"tasks {backlog.tasks_waiting} waiting, {backlog.tasks_running} running; "
        f"groups {backlog.groups_waiting} waiting, {backlog.groups_held} held; "
        f"{backlog.dead} dead"
    )


def _time_words(progress: Progress) -> str:
    shares = progress.time_shares()
    if not shares:
        return "no step yet"
    return ", ".join(f"{TIME_PARTS[key]} {share:.0%}" for key, share in shares.items())


def _show(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
