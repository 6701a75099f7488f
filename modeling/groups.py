"""What a model is asked to score: a prompt once, with its responses."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class TokenGroup:
    """A prompt and the responses sampled from it.

    Attributes:
        prompt_ids: int [prompt_tokens], at least one; image placeholders expanded.
        responses: each int [tokens], at least one token.
        images: encoded (PNG, JPEG, WebP), in the order of their placeholders.
        named_ids: empty, or per response int [tokens, k]: ids whose logprobs are wanted too. k may
            differ between responses and be 0.
    """

    prompt_ids: NDArray[np.integer]
    responses: tuple[NDArray[np.integer], ...]
    images: tuple[bytes, ...] = ()
    named_ids: tuple[NDArray[np.integer], ...] = field(default=())

    def __post_init__(self) -> None:
        if len(self.prompt_ids) == 0:
            raise ValueError("a prompt is never empty: a first token has no logprob without one")
        if any(len(response) == 0 for response in self.responses):
            raise ValueError("a response is never empty; drop it before scoring")
        if self.named_ids and len(self.named_ids) != len(self.responses):
            raise ValueError(f"{len(self.named_ids)} named_ids for {len(self.responses)} responses")
