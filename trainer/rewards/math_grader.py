"""Equality of mathematical expressions by the package math-verify, in a process of its own.

Model text can keep it busy for ever, deep inside arithmetic that nothing interrupts, or eat all
memory. Its own time limit is a signal handler: it works in the main thread only, waits for the
interpreter, and takes SIGALRM from whoever else has it. A process can be ended whatever it does.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from trainer.rewards import math_worker
from trainer.rewards.reward import RewardError

logger = logging.getLogger(__name__)


class MathGrader:
    """One worker process, started when it is needed, and again after it died. Thread-safe."""

    def __init__(self) -> None:
        """
        Raises:
            RewardError: the package is not installed.
        """
        if find_spec("math_verify") is None:
            raise RewardError(
                "math_verify and boxed need the package math-verify: pip install 'preceptor[math]'"
            )
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[str] | None = None

    def score(self, response: str, answer: str) -> float:
        """1.0 if the answer that math-verify finds in the response equals `answer`, else 0.0; also
        0.0 where finding out takes too long (math_worker.SECONDS)."""
        return float(self._ask(answer, response))

    def equal(self, expression: str, answer: str) -> bool:
        """Whether an expression, such as a box's content, equals the answer."""
        return self._ask(answer, math_worker.box(expression))

    def check(self, answer: str) -> None:
        """
        Raises:
            RewardError: math-verify finds nothing in the answer.
        """
        if not self._ask(answer, None):
            raise RewardError(f"math-verify cannot read the answer {answer!r:.200}")

    def _ask(self, answer: str, response: str | None) -> bool:
        request = json.dumps({"answer": answer, "response": response})
        with self._lock:
            worker = self._running()
            assert worker.stdin is not None and worker.stdout is not None
            reply = ""
            with suppress(BrokenPipeError):
                worker.stdin.write(f"{request}\n")
                worker.stdin.flush()
                reply = worker.stdout.readline()
            if reply:
                return bool(json.loads(reply))
            self._worker = None
            with suppress(BrokenPipeError):
                worker.stdin.close()
            worker.stdout.close()
            code = worker.wait()
        logger.warning("grading ended with code %d, counted as wrong: %.200s", code, request)
        return False

    def _running(self) -> subprocess.Popen[str]:
        if self._worker is None or self._worker.poll() is not None:
            # -P: modules beside the worker's file must not hide those of the standard library.
            self._worker = subprocess.Popen(
                [sys.executable, "-P", str(Path(math_worker.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        return self._worker


@cache
def math_grader() -> MathGrader:
    """The one of this process.

    Raises:
        RewardError: see MathGrader.
    """
    return MathGrader()
