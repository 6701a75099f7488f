"""A connection to Redis that outlives Redis: outages are waited for, within a budget."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, OutOfMemoryError
from redis.retry import Retry

from preceptor.retry import full_jitter

logger = logging.getLogger(__name__)
T = TypeVar("T")

# One read blocks at most this long on the server; longer waits are made of several. It stays well
# below any sane socket timeout, and between two of them a worker looks for stale leases.
BLOCK_SLICE_SECONDS = 1.0

_FIRST_WAIT_SECONDS = 0.05
_LONGEST_WAIT_SECONDS = 1.0


class QueueError(RuntimeError):
    """The queue could not do what was asked."""


class QueueUnavailable(QueueError):
    """Redis did not answer within the retry budget, or refused the credentials."""


class QueueFull(QueueError):
    """Redis is at its memory limit and refused a write. Nothing was written; reads and
    acknowledgements still work and free memory."""


def connect(url: str, socket_timeout_seconds: float = 10.0) -> redis.Redis:
    """A client for RolloutQueue. Connects on first use; safe to share between threads.

    Args:
        url: redis:// or rediss://, credentials included.
        socket_timeout_seconds: a reply that takes longer counts as an outage. Blocking reads are
            cut into slices below it, so it does not limit how long a claim may wait.

    Raises:
        ValueError: no Redis URL, or a timeout that would cut blocking reads short.
    """
    if socket_timeout_seconds <= BLOCK_SLICE_SECONDS:
        raise ValueError(
            f"socket_timeout_seconds is {socket_timeout_seconds}, must exceed the "
            f"{BLOCK_SLICE_SECONDS} s for which one read may block"
        )
    return redis.Redis.from_url(
        url,
        # RESP2 replies look the same from Redis 6.2 and 7.
        protocol=2,
        socket_timeout=socket_timeout_seconds,
        socket_connect_timeout=min(socket_timeout_seconds, 5.0),
        socket_keepalive=True,
        # Outages are Patience's business alone, which knows the budget and logs once.
        retry=Retry(NoBackoff(), 0),
    )


def address_of(client: redis.Redis) -> str:
    """host:port/db for messages, without credentials."""
    settings = client.connection_pool.connection_kwargs
    place = settings.get("path") or f"{settings.get('host')}:{settings.get('port')}"
    return f"{place}/{settings.get('db') or 0}"


class Patience:
    """Repeats calls through an outage, logging it once however many threads wait.

    A repeated call may have run already, its reply lost: every operation of the queue is either
    idempotent or can only duplicate an entry, and duplicates are dropped by id.

    Attributes:
        failures: calls that got no answer so far. A reader compares it to learn that a reply may
            have been lost.
    """

    def __init__(self, client: redis.Redis, retry_seconds: float) -> None:
        self.failures = 0
        self._address = address_of(client)
        self._retry_seconds = retry_seconds
        self._down_since: float | None = None
        self._lock = threading.Lock()

    def call(self, do: Callable[[], T], *, retry: bool = True) -> T:
        """The result of `do`, tried again with backoff while Redis is away or loading.

        Raises:
            QueueUnavailable: the budget is spent (at once if not `retry`), or bad credentials.
            QueueFull: Redis is at maxmemory.
        """
        give_up_at = time.monotonic() + (self._retry_seconds if retry else 0.0)
        attempt = 0
        while True:
            try:
                result = do()
            except OutOfMemoryError as error:
                raise QueueFull(
                    f"Redis at {self._address} is at its memory limit and refused a write "
                    f"({error}); raise its maxmemory, or lower the trainer's max_staleness so that "
                    "less is queued"
                ) from error
            except (AuthenticationError, AuthorizationError) as error:
                raise QueueUnavailable(
                    f"Redis at {self._address} refused the credentials ({error}); check redis.url"
                ) from error
            except (redis.ConnectionError, redis.TimeoutError) as error:
                self.failures += 1
                wait = full_jitter(attempt, _FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS)
                if time.monotonic() + wait >= give_up_at:
                    raise QueueUnavailable(
                        f"Redis at {self._address} did not answer within "
                        f"{self._retry_seconds if retry else 0:g} s ({error}); check that it runs "
                        "and redis.url, or raise retry_seconds"
                    ) from error
                self._note_outage(error)
                time.sleep(wait)
                attempt += 1
            else:
                self._note_answer()
                return result

    def _note_outage(self, error: redis.RedisError) -> None:
        with self._lock:
            if self._down_since is not None:
                return
            self._down_since = time.monotonic()
        logger.warning(
            "Redis at %s is away (%s); waiting up to %g s for it",
            self._address,
            error,
            self._retry_seconds,
        )

    def _note_answer(self) -> None:
        # Read without the lock first: this runs after every call.
        if self._down_since is None:
            return
        with self._lock:
            since, self._down_since = self._down_since, None
        if since is not None:
            seconds = time.monotonic() - since
            logger.info("Redis at %s answers again after %.1f s", self._address, seconds)
