"""The policy a worker holds, replaced by a newer one when a task asks for it."""

from __future__ import annotations

import logging
import time

from modeling.load import LoadedModel, ModelError, WeightsMismatch, load_weights
from preceptor.manifest import CorruptFolder
from preceptor.policy import PolicyStore, Version

logger = logging.getLogger(__name__)

# A version that could not be read is read again after this long: its disk may lag behind.
RETRY_SECONDS = 1.0


class WrongModel(ModelError):
    """The worker's model is not the one whose weights are published."""


class HeldPolicy:
    """The weights in `loaded`, and which published version they are.

    Attributes:
        version: None until the first published version is loaded: a model's initial weights write
            nothing.
        folder: where versions are published.
    """

    def __init__(self, loaded: LoadedModel, store: PolicyStore) -> None:
        """
        Args:
            loaded: its weights are replaced in place.
            store: where the trainer publishes.
        """
        self.version: Version | None = None
        self._loaded = loaded
        self._store = store
        self.folder = store.folder
        self._damaged: Version | None = None
        self._retry_at = 0.0

    def covers(self, wanted: Version) -> bool:
        """Whether what is held is new enough to write for `wanted`."""
        return self.version is not None and self.version >= wanted

    def refresh(self) -> None:
        """Hold the newest published version, if there is one that can be read; waits for nothing.

        A version that fails its check leaves the held one as it is: it may be healed, or replaced
        by a newer one.

        Raises:
            WrongModel: the version is whole, and its weights do not fit the model.
        """
        latest = self._store.latest()
        if latest is None or self.covers(latest):
            return
        # Reading a large model only to find it damaged still takes a while.
        if latest == self._damaged and time.monotonic() < self._retry_at:
            return
        started = time.monotonic()
        try:
            self._load(latest)
        except CorruptFolder as error:
            # Once a version, however often it is tried.
            if latest != self._damaged:
                logger.warning(
                    "policy %s cannot be loaded, %s is kept; trying again: %s",
                    latest,
                    self.version or "the initial one",
                    error,
                )
            self._damaged, self._retry_at = latest, time.monotonic() + RETRY_SECONDS
            return
        self.version = latest
        logger.info("policy %s loaded in %.2f s", latest, time.monotonic() - started)

    def _load(self, version: Version) -> None:
        folder = self._store.verified(version)
        try:
            load_weights(self._loaded.model, folder)
        except WeightsMismatch as error:
            # It may have been pruned or damaged meanwhile: then it is a CorruptFolder.
            self._store.verified(version)
            raise WrongModel(
                f"rollout.model {self._loaded.model_id} is not the model whose weights the trainer "
                f"publishes ({error}); set rollout.model to trainer.student"
            ) from error
