"""k = teacher - old: how much likelier the teacher finds each token the student chose."""

from __future__ import annotations

import torch
from torch import Tensor


class NonFinite(ArithmeticError):
    """A number that advantages need is NaN or infinite."""


def difference(teacher_N: Tensor, old_N: Tensor, mask_N: Tensor) -> Tensor:
    """teacher - old where mask is true, 0 elsewhere, whatever stands there (NaN and inf included).

    Args:
        teacher_N, old_N: float, logprobs, nats, one shape. A teacher's -inf gives -inf.
        mask_N: bool, the same shape.
    """
    return torch.where(mask_N, teacher_N - old_N, 0.0)


def bad_tokens(k_N: Tensor) -> int:
    """How many differences are NaN or +inf: the student's logprob, or the mark, is no number.

    They are counted, not raised: ranks raise together (`refuse_bad_tokens`), or those without a bad
    token would wait for the others for ever.
    """
    return k_N.numel() - int(torch.count_nonzero(k_N < torch.inf))


def refuse_bad_tokens(bad: int, valid: int) -> None:
    """Stop if the whole batch has bad tokens among its valid ones.

    Raises:
        NonFinite: it has.
    """
    if bad:
        raise NonFinite(
            f"{bad} of {valid} valid tokens have no finite teacher - old difference: the teacher's "
            "mark is missing or NaN there, or the student's own logprob is NaN or -inf"
        )
