"""One part of a run as a process: started, looked at, stopped; its output kept in a log."""

from __future__ import annotations

import enum
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from preceptor.launch import tether

_TAIL_LINES = 25
_TAIL_BYTES = 8192


@dataclass(frozen=True)
class Part:
    """Something to run.

    Attributes:
        name: of the part and its log.
        command: program and arguments.
        environment: on top of the launcher's own.
        ready: asked again and again until it says yes; None: ready once started.
        needs: names of the parts that must be ready before this one starts, or starts again.
        stage: parts are stopped from the highest stage down.
        ends_run: its exit with 0 is the end of the run. For all others every exit is a failure.
        restart: start it again when it dies.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    ready: Callable[[], bool] | None = None
    needs: tuple[str, ...] = ()
    stage: int = 0
    ends_run: bool = False
    restart: bool = True


class State(enum.Enum):
    """Where a part stands."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    ENDED = "ended"


class Child:
    """A part's process, or the lack of one.

    Attributes:
        state: kept by the supervisor.
        restarts: how often it was started again.
        was_ready: whether it ever was.
        due_at: time.monotonic() before which it is not started (again).
        started_at: time.monotonic() of its last start.
    """

    def __init__(self, part: Part, log: Path) -> None:
        self.part = part
        self.log = log
        self.state = State.WAITING
        self.restarts = 0
        self.was_ready = False
        self.due_at = 0.0
        self.started_at = 0.0
        self._log_start = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of the running process, which also names its process group."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the process in a session of its own. Call from the main thread: the process is
        tied to the thread that starts it."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.started_at = time.monotonic()
        with self.log.open("ab") as output:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            output.write(f"--- {stamp} {self.part.name}, start {self.restarts + 1}\n".encode())
            output.flush()
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                tethered(self.part.command),
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.part.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def exit_code(self) -> int | None:
        """None while it runs. What else was in its group is killed once it is gone."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        self._signal(signal.SIGKILL)
        self._process = None
        return code

    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self.exit_code() is None

    def terminate(self) -> None:
        """SIGTERM to the group."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the group, and wait."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def log_tail(self) -> str:
        """The last lines of the log since the last start."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(max(self._log_start, self.log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            # The group is empty: what the signal was for has happened.
            return


def tethered(command: Sequence[str]) -> list[str]:
    """The command, tied to this process so that it ends with it; only Linux has the means."""
    if sys.platform != "linux":
        return list(command)
    # -I and -S: it needs nothing but the standard library, and starts in 10 ms.
    return [sys.executable, "-IS", tether.__file__, str(os.getpid()), *command]
