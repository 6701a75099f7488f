"""Chunked log-softmax: right values, right gradients, never [tokens, vocabulary]."""

from __future__ import annotations

import pytest
import torch

from modeling.head import Head
from modeling.logprobs import selected_logprobs

TOKENS, WIDTH, VOCABULARY = 40, 8, 50


@pytest.fixture
def case():
    torch.manual_seed(0)
    head = Head(torch.nn.Linear(WIDTH, VOCABULARY, bias=False))
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    return head, hidden, torch.randint(0, VOCABULARY, (TOKENS,))


def reference(head, hidden, ids, temperature=1.0):
    logprobs = (head.projection(hidden) / temperature).log_softmax(-1)
    return logprobs.gather(-1, ids[:, None]).squeeze(-1)


@pytest.mark.parametrize("chunk", (1, 7, 40, 100))
def test_values_and_gradients_do_not_depend_on_chunks(case, chunk):
    head, hidden, ids = case
    ours = selected_logprobs(hidden, head, ids, chunk_tokens=chunk).logprobs_T
    wanted = reference(head, hidden, ids)
    torch.testing.assert_close(ours, wanted)
    weights = torch.linspace(-1, 1, TOKENS)
    leaves = (hidden, head.projection.weight)
    for one, other in zip(
        torch.autograd.grad((ours * weights).sum(), leaves),
        torch.autograd.grad((wanted * weights).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.pitfall("L4")
def test_no_tensor_of_tokens_by_vocabulary_lives(case):
    """Neither in the forward pass nor kept for the backward pass."""
    head, hidden, ids = case
    chunk = 5
    logits, kept = [], []

    class Watching(Head):
        def __call__(self, hidden_TD):
            logits.append(super().__call__(hidden_TD))
            return logits[-1]

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = selected_logprobs(hidden, Watching(head.projection), ids, chunk_tokens=chunk)
    # In all, and not per chunk: what the graph holds between forward and backward.
    assert sum(kept) < TOKENS * VOCABULARY / 4
    scores.logprobs_T.sum().backward()
    assert max(one.numel() for one in logits) == chunk * VOCABULARY


@pytest.mark.pitfall("L4")
def test_default_chunks_hold_64_mib():
    """4096 tokens x 151,936 words would be 2.3 GiB; no more than 64 MiB of logits exist at once."""
    rows = []

    class Recording(Head):
        def __call__(self, hidden_TD):
            rows.append(len(hidden_TD))
            return hidden_TD.new_zeros(1, 1).expand(len(hidden_TD), 151_936)

    head = Recording(torch.nn.Linear(1, 151_936, bias=False))
    with torch.no_grad():
        selected_logprobs(torch.zeros(300, 1), head, torch.zeros(300, dtype=torch.int64))
    assert max(rows) * 151_936 * 4 <= 64 * 2**20
    assert sum(rows) == 300


@pytest.mark.pitfall("L5")
def test_temperature(case):
    head, hidden, ids = case
    ours = selected_logprobs(hidden, head, ids, temperature=2.0).logprobs_T
    torch.testing.assert_close(ours, reference(head, hidden, ids, temperature=2.0))
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="temperature"):
            selected_logprobs(hidden, head, ids, temperature=bad)


def test_suppressed_ids_leave_the_distribution(case):
    head, hidden, ids = case
    ids = ids.clone()
    ids[0] = 3
    ids[1:] = ids[1:].clamp_min(10)
    scores = selected_logprobs(
        hidden, head, ids, suppressed_ids=(3, 4), top_k=VOCABULARY - 2, chunk_tokens=9
    )
    assert scores.logprobs_T[0] == -torch.inf
    kept = [index for index in range(VOCABULARY) if index not in (3, 4)]
    wanted = head.projection(hidden)[:, kept].log_softmax(-1)
    column = ids[1:] - 2
    torch.testing.assert_close(
        scores.logprobs_T[1:], wanted[1:].gather(-1, column[:, None]).squeeze(-1)
    )
    torch.testing.assert_close(scores.top_logprobs_TK.exp().sum(-1), torch.ones(TOKENS))
    (gradient,) = torch.autograd.grad(scores.logprobs_T[1:].sum(), hidden)
    assert gradient.isfinite().all()


def test_half_precision_logits_are_normalised_in_float32():
    torch.manual_seed(0)
    head = Head(torch.nn.Linear(WIDTH, VOCABULARY, bias=False).bfloat16())
    hidden = torch.randn(TOKENS, WIDTH).bfloat16()
    with torch.no_grad():
        scores = selected_logprobs(
            hidden, head, torch.zeros(TOKENS, dtype=torch.int64), top_k=VOCABULARY
        )
    assert scores.logprobs_T.dtype == torch.float32
    total = scores.top_logprobs_TK.double().exp().sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total), atol=1e-5, rtol=0)
