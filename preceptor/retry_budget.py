"""Which failed calls to a teacher are repeated, when, and for how long."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import grpc

from preceptor.retry import full_jitter
from preceptor.teacher_errors import (
    TeacherChanged,
    TeacherError,
    TeacherRejected,
    TeacherTimeout,
    TeacherUnavailable,
)

logger = logging.getLogger(__name__)

PUSHBACK = "grpc-retry-pushback-ms"

_FIRST_WAIT_SECONDS = 0.1
_LONGEST_WAIT_SECONDS = 5.0

_REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.FAILED_PRECONDITION,
}


class RetryBudget:
    """The failures of one request. Its clock starts with a failure and stops with any progress.

    UNAVAILABLE is repeated with exponential backoff and full jitter. RESOURCE_EXHAUSTED is repeated
    only when the server says after how long, since gRPC uses that code for oversize messages too.
    """

    def __init__(self, address: str, retry_seconds: float, *, introduced: bool = False) -> None:
        """`introduced`: the request names the teacher it expects."""
        self._address = address
        self._introduced = introduced
        self._retry_seconds = retry_seconds
        self._failing_since: float | None = None
        self._failures = 0

    def progress(self) -> None:
        """Something arrived."""
        if self._failing_since is not None:
            seconds = time.monotonic() - self._failing_since
            logger.info("teacher at %s answers again after %.1f s", self._address, seconds)
        self._failing_since = None
        self._failures = 0

    def wait_after(self, error: grpc.RpcError) -> float:
        """Seconds to wait before the request is sent again.

        Raises:
            TeacherError: it must not be, or the budget is spent; a subclass by the status code.
        """
        # Sync and asyncio errors alike carry the methods of a finished Call.
        call: Any = error
        code, details = call.code(), call.details()
        pushback = _pushback_seconds(call.trailing_metadata())
        full = code == grpc.StatusCode.RESOURCE_EXHAUSTED and pushback is not None
        if not full and code != grpc.StatusCode.UNAVAILABLE:
            raise _typed(self._address, code, details, self._introduced) from error
        if pushback is not None and pushback < 0:
            raise TeacherUnavailable(
                f"teacher at {self._address} asks not to be tried again: {details}"
            ) from error
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
            logger.warning(
                "teacher at %s is %s (%s); trying again for up to %g s",
                self._address,
                "full" if full else "away",
                details,
                self._retry_seconds,
            )
        wait = (
            pushback
            if pushback is not None
            else full_jitter(self._failures, _FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS)
        )
        if now + wait > self._failing_since + self._retry_seconds:
            raise TeacherUnavailable(
                f"teacher at {self._address} {'stayed full' if full else 'did not answer'} within "
                f"{self._retry_seconds:g} s: {details}; check that it runs at that address, or "
                "raise retry_seconds"
            ) from error
        self._failures += 1
        return wait


def _pushback_seconds(trailers: Iterable[tuple[str, str | bytes]] | None) -> float | None:
    """What the server asks for; None: nothing. Negative, or no number: do not try again."""
    for key, value in trailers or ():
        if key == PUSHBACK:
            try:
                return int(value) / 1000.0
            except ValueError:
                return -1.0
    return None


def _typed(address: str, code: grpc.StatusCode, details: str, introduced: bool) -> TeacherError:
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return TeacherTimeout(
            f"teacher at {address} did not finish a request in time ({details}); raise "
            "timeout_seconds, or lower request_tokens so that a request is less work"
        )
    message = f"teacher at {address} answered {code.name}: {details}"
    if code == grpc.StatusCode.FAILED_PRECONDITION and introduced:
        return TeacherChanged(
            f"{message}; if the teacher was replaced on purpose, make a new client and describe()"
        )
    return TeacherRejected(message) if code in _REFUSALS else TeacherError(message)
