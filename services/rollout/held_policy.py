"""The policy a worker holds, replaced by a newer one when a task asks for it."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from modeling.adapters import has_adapter, load_adapter
from modeling.load import LoadedModel, ModelError, WeightsMismatch, load_weights
from modeling.probe import PolicyDrift, check_probe, read_probe
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
        # Whether what is held is an adapter on the model's initial weights; None: nothing yet.
        self._adapted: bool | None = None
        self._unproven = False

    def covers(self, wanted: Version) -> bool:
        """Whether what is held is new enough to write for `wanted`."""
        return self.version is not None and self.version >= wanted

    def refresh(self) -> None:
        """Hold the newest published version, if there is one that can be read; waits for nothing.

        A version that fails its check leaves the held one as it is: it may be healed, or replaced
        by a newer one.

        After loading, the probe that the trainer published with the version is scored and compared.

        Raises:
            WrongModel: the version is whole, and its weights do not fit the model.
            modeling.probe.PolicyDrift: they fit, and give other logprobs here than in the trainer.
                No version is held then: nothing may be written with them.
        """
        latest = self._store.latest()
        if latest is None or self.covers(latest):
            return
        # Reading a large model only to find it damaged still takes a while.
        if latest == self._damaged and time.monotonic() < self._retry_at:
            return
        started = time.monotonic()
        try:
            difference = self._load(latest)
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
        seconds = time.monotonic() - started
        if difference is None:
            logger.info("policy %s loaded in %.2f s", latest, seconds)
        else:
            logger.info(
                "policy %s loaded in %.2f s; its probe is %.2g nat from the trainer's",
                latest,
                seconds,
                difference,
            )

    def _load(self, version: Version) -> float | None:
        """Replace the weights; the probe's difference in nats, None where there is no probe."""
        folder = self._store.verified(version)
        recorded = read_probe(folder)
        try:
            self._replace(folder)
        except WeightsMismatch as error:
            # It may have been pruned or damaged meanwhile: then it is a CorruptFolder.
            self._store.verified(version)
            raise WrongModel(
                f"rollout.model {self._loaded.model_id} is not the model whose weights the trainer "
                f"publishes ({error}); set rollout.model to trainer.student"
            ) from error
        # Nothing may be written with these weights before the probe agrees.
        self.version = None
        if recorded is None:
            if not self._unproven:
                logger.warning(
                    "policy %s has no probe; that its weights arrived is not proven", version
                )
            self._unproven = True
            return None
        try:
            return check_probe(self._loaded, recorded)
        except PolicyDrift as error:
            logger.error("policy %s: %s", version, error)
            raise

    def _replace(self, folder: Path) -> None:
        """Whole weights or an adapter, as the folder has it."""
        adapter = has_adapter(folder)
        if self._adapted is not None and adapter != self._adapted:
            kinds = ("whole weights", "an adapter")
            raise WrongModel(
                f"{folder} holds {kinds[adapter]}, and this worker holds {kinds[not adapter]}, so "
                "its base is not what the trainer's is: the run's lora.rank was changed under it; "
                "start the worker again"
            )
        if adapter:
            load_adapter(self._loaded, folder)
        else:
            load_weights(self._loaded.model, folder)
        self._adapted = adapter
