"""Which responses run together: pure arithmetic on lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Slice:
    """Some responses (`rows`, ascending lengths) of one group."""

    group: int
    rows: tuple[int, ...]


def plan(
    prompt_tokens: Sequence[int], response_tokens: Sequence[Sequence[int]], budget: int
) -> list[list[Slice]]:
    """Pack groups into batches of at most `budget` tokens, padding included.

    A batch costs responses x (longest prompt + longest response). Groups of similar lengths go
    together. A group that exceeds the budget is cut into slices, in batches of their own, one after
    the other, so that its prompt is computed once; a response that exceeds it runs alone.

    Args:
        prompt_tokens: per group.
        response_tokens: per group and response.

    Returns:
        Batches; every response occurs exactly once.
    """
    batches: list[list[Slice]] = []
    current: list[Slice] = []
    rows = longest_prompt = longest_response = 0
    order = sorted(
        (group for group, lengths in enumerate(response_tokens) if lengths),
        key=lambda group: (prompt_tokens[group], max(response_tokens[group])),
    )
    for group in order:
        prompt, lengths = prompt_tokens[group], response_tokens[group]
        slices = _cut(group, prompt, lengths, budget)
        if len(slices) > 1:
            batches += [[one] for one in slices]
            continue
        new_rows = rows + len(lengths)
        new_prompt = max(longest_prompt, prompt)
        new_response = max(longest_response, *lengths)
        if current and new_rows * (new_prompt + new_response) > budget:
            batches.append(current)
            current = []
            new_rows, new_prompt, new_response = len(lengths), prompt, max(lengths)
        current += slices
        rows, longest_prompt, longest_response = new_rows, new_prompt, new_response
    if current:
        batches.append(current)
    return batches


def _cut(group: int, prompt: int, lengths: Sequence[int], budget: int) -> list[Slice]:
    """Slices of one group that fit the budget each, short responses first."""
    slices: list[Slice] = []
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        # Ascending, so the newest is the longest.
        if rows and (len(rows) + 1) * (prompt + lengths[row]) > budget:
            slices.append(Slice(group, tuple(rows)))
            rows = []
        rows.append(row)
    slices.append(Slice(group, tuple(rows)))
    return slices
