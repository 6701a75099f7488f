"""The policy a worker holds, replaced by a newer one when a task asks for it."""

from __future__ import annotations

import logging
import threading
import time

from modeling.load import LoadedModel, WeightsMismatch, load_weights
from preceptor.manifest import CorruptFolder
from preceptor.policy import PolicyStore, Version

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
# A version that could not be read is read again after this long: its disk may lag behind.
RETRY_SECONDS = 1.0


class HeldPolicy:
    """The weights in `loaded`, and which published version they are.

    Attributes:
        version: None until the first published version is loaded: a model's initial weights write
            nothing.
        folder: where versions are published.
    """

    def __init__(self, loaded: LoadedModel, store: PolicyStore, stop: threading.Event) -> None:
        """
        Args:
            loaded: its weights are replaced in place.
            store: where the trainer publishes.
            stop: ends a wait early.
        """
        self.version: Version | None = None
        self._loaded = loaded
        self._store = store
        self.folder = store.folder
        self._stop = stop
        self._complained_of: Version | None = None

    def covers(self, wanted: Version) -> bool:
        """Whether what is held is new enough to write for `wanted`."""
        return self.version is not None and self.version >= wanted

    def wait_for(self, wanted: Version, timeout_seconds: float) -> bool:
        """Hold `wanted` or a newer version; False if none could be had in time, or on a stop.

        A version that fails its check leaves the held one as it is.
        """
        deadline = time.monotonic() + timeout_seconds
        while not self.covers(wanted):
            # Older than wanted but newer than held: other tasks of the batch can use it.
            latest = self._store.latest()
            pause = POLL_SECONDS
            if latest is not None and not self.covers(latest) and not self._load(latest):
                pause = RETRY_SECONDS
            if self.covers(wanted):
                break
            if time.monotonic() >= deadline or self._stop.wait(pause):
                return False
        return True

    def _load(self, version: Version) -> bool:
        started = time.monotonic()
        try:
            load_weights(self._loaded.model, self._store.verified(version))
        except (CorruptFolder, WeightsMismatch) as error:
            # Once a version, however often it is tried.
            if version != self._complained_of:
                logger.warning(
                    "policy %s cannot be loaded, %s is kept; trying again: %s",
                    version,
                    self.version or "the initial one",
                    error,
                )
            self._complained_of = version
            return False
        self.version = version
        logger.info("policy %s loaded in %.2f s", version, time.monotonic() - started)
        return True
