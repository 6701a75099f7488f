"""`preceptor up`, from settings to exit code."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console

from preceptor.launch.errors import PartFailed
from preceptor.launch.metrics import METRICS_FILE
from preceptor.launch.plan import make_plan
from preceptor.launch.settings import LaunchConfig
from preceptor.launch.supervisor import Supervisor
from preceptor.launch.view import RunView
from preceptor.lock import run_folder_lock
from preceptor.overrides import Override, parse_overrides

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def read_settings(file: Path, arguments: Sequence[str]) -> tuple[LaunchConfig, list[Override]]:
    """The launcher's settings, and the overrides that all parts are to see.

    Raises:
        ConfigError: they cannot be read.
    """
    return LaunchConfig.load(file, arguments), parse_overrides(arguments)


def up(file: Path, config: LaunchConfig, overrides: Sequence[Override], console: Console) -> int:
    """Start everything, watch it until the trainer ends, end everything.

    Call from the main thread. The live view goes to `console`, logs to run.dir/logs.

    Returns:
        0 when the trainer finished; 128 + the signal that stopped us.

    Raises:
        PartFailed: a part died for good; the others were ended.
        LaunchError, RedisMissing: nothing was started.
    """
    folder = config.run.dir
    with ExitStack() as stack:
        stack.enter_context(run_folder_lock(folder, "launcher"))
        plan = make_plan(file, config, overrides)
        logs = folder / "logs"
        logs.mkdir(exist_ok=True)
        stack.enter_context(_logging(logs / "launcher.log", console))
        supervisor = Supervisor(plan.parts, logs, config.launch)
        stop = stack.enter_context(_stop_signals(supervisor.hurry))
        # Whatever happens from here on, the parts are ended first, and the view tells of it.
        title = f"{config.run.name}  {folder}"
        view = RunView(title, folder / METRICS_FILE, plan.queue, supervisor.children, console)
        stack.enter_context(view)
        stack.enter_context(supervisor)
        return _watch(supervisor, view, stop)


@dataclass
class StopRequest:
    """Set by a signal.

    Attributes:
        signal: its number; 0 while there was none.
    """

    signal: int = 0


def _watch(supervisor: Supervisor, view: RunView, stop: StopRequest) -> int:
    try:
        while not stop.signal:
            if supervisor.look():
                return 0
            view.refresh()
            time.sleep(_LOOK_SECONDS)
    except PartFailed as error:
        logger.error("%s", error)
        raise
    logger.warning("%s: ending the run", signal.Signals(stop.signal).name)
    return 128 + stop.signal


@contextmanager
def _stop_signals(hurry: Callable[[], None]) -> Iterator[StopRequest]:
    """Turn the first stop signal into a request, and any further one into haste."""
    request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if request.signal:
            hurry()
        request.signal = number

    before = {number: signal.signal(number, handle) for number in _STOP_SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _logging(file: Path, console: Console) -> Iterator[None]:
    """Everything the launcher has to say goes to a file, news of the parts to the console too."""
    to_file = logging.FileHandler(file)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    to_console = _ConsoleHandler(console)
    everything = logging.getLogger("preceptor")
    news = logging.getLogger("preceptor.launch")
    level = news.level
    everything.addHandler(to_file)
    news.addHandler(to_console)
    news.setLevel(logging.INFO)
    try:
        yield
    finally:
        everything.removeHandler(to_file)
        news.removeHandler(to_console)
        news.setLevel(level)
        to_file.close()


class _ConsoleHandler(logging.Handler):
    """Prints above a live panel instead of through it."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        style = "yellow" if record.levelno >= logging.WARNING else None
        self._console.print(
            f"{stamp} {record.getMessage()}",
            style=style,
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
