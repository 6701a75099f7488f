"""The torch engine: any Hugging Face model, prompts shared by their responses where sound."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import numpy as np
import torch
from numpy.typing import NDArray

from modeling.card import describe_model
from modeling.groups import TokenGroup
from modeling.images import decode_image, feature_count, image_size
from modeling.load import load_model
from modeling.logprobs import TokenScores
from modeling.prefix import Prefix, prefill
from modeling.shared_prefix import group_scores, plain_scores, prefix_scores
from modeling.sharing import check_sharing, probe_groups
from services.teacher.batching import plan
from services.teacher.call import Options
from services.teacher.scores import Scores
from services.teacher.settings import TeacherSettings

logger = logging.getLogger(__name__)


class TorchEngine:
    """A loaded model. One thread scores; `count_features` may be called from another."""

    def __init__(self, settings: TeacherSettings) -> None:
        """Load the model and find out whether its prompts can be shared.

        Raises:
            modeling.load.ModelError, modeling.head.UnsupportedModel: see load_model.
        """
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self._settings = settings
        self._image_limits = {
            "max_bytes": settings.max_image_bytes,
            "max_pixels": settings.max_image_pixels,
        }
        self._loaded = load_model(
            settings.model,
            revision=settings.revision,
            dtype=settings.dtype,
            device=settings.device,
            trust_remote_code=settings.trust_remote_code,
        )
        # The model may be asked for an image's features while it scores.
        self._lock = threading.Lock()
        # Prompt ids (by object) and prefix of the group whose slices are running.
        self._kept: tuple[NDArray[np.integer], Prefix] | None = None
        self.card = describe_model(self._loaded)
        self.card.engine = "torch"
        self.card.engine_version = torch.__version__
        self.card.shares_prompts = check_sharing(self._loaded)
        self.probe()

    def probe(self) -> None:
        """Score a little: the warm-up, and the proof of life after a failure.

        Raises:
            RuntimeError: the engine cannot score, or answers NaN.
        """
        for batch in self.score(probe_groups(self._loaded), Options(temperature=1.0, top_k=0)):
            if any(np.isnan(scores.logprobs).any() for scores in batch.values()):
                raise RuntimeError(f"{self._loaded.model_id} answers NaN to a plain probe")

    def count_pixels(self, data: bytes) -> int:
        """Pixels of an encoded image, from its header.

        Raises:
            modeling.images.ImageError: unreadable or too large.
        """
        width, height = image_size(data, **self._image_limits)
        return width * height

    def count_features(self, data: bytes) -> int:
        """Features of an encoded image.

        Raises:
            modeling.images.ImageError: unreadable, too large, or not for this model.
        """
        image = decode_image(data, **self._image_limits)
        if image.size in self._loaded.feature_counts:
            return self._loaded.feature_counts[image.size]
        with self._lock:
            return feature_count(self._loaded, image)

    def score(
        self, groups: Sequence[TokenGroup], options: Options
    ) -> Iterator[dict[tuple[int, int], Scores]]:
        """Batch after batch: (group, response) -> Scores, every response once.

        Raises:
            RuntimeError and others: whatever torch raises; batches before are good.
        """
        lengths = [[len(response) for response in group.responses] for group in groups]
        prompts = [len(group.prompt_ids) for group in groups]
        try:
            for batch in plan(prompts, lengths, self._settings.max_batch_tokens):
                part = [_cut(groups[one.group], one.rows) for one in batch]
                with self._lock, torch.inference_mode():
                    scores = self._run(part, options)
                yield {
                    (one.group, row): result
                    for one, results in zip(batch, scores, strict=True)
                    for row, result in zip(one.rows, results, strict=True)
                }
        finally:
            self._kept = None

    def _run(self, part: list[TokenGroup], options: Options) -> list[list[Scores]]:
        chosen = asdict(options)
        if not self.card.shares_prompts:
            scores = plain_scores(self._loaded, part, **chosen)
        elif len(part) > 1:
            scores = group_scores(self._loaded, part, **chosen)
        else:
            # Slices of a long group follow each other; its prompt is computed once.
            if self._kept is None or self._kept[0] is not part[0].prompt_ids:
                self._kept = (part[0].prompt_ids, prefill(self._loaded, part))
            prefix = self._kept[1]
            scores = prefix_scores(self._loaded, prefix, part, **chosen)
        return [[_to_numpy(one) for one in group] for group in scores]


def _cut(group: TokenGroup, rows: Sequence[int]) -> TokenGroup:
    """The group with only these responses."""
    return replace(
        group,
        responses=tuple(group.responses[row] for row in rows),
        named_ids=tuple(group.named_ids[row] for row in rows) if group.named_ids else (),
    )


def _to_numpy(scores: TokenScores) -> Scores:
    return Scores(
        logprobs=scores.logprobs_T.cpu().numpy(),
        top_ids=scores.top_ids_TK.to("cpu", torch.int32).numpy(),
        top_logprobs=scores.top_logprobs_TK.cpu().numpy(),
        named_logprobs=scores.named_logprobs_TM.cpu().numpy(),
    )
