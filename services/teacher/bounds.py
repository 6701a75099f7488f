"""How much of a caller's text comes back: a small request must not make a large reply."""

from __future__ import annotations

# Of group, trajectory and student names, in UTF-8.
MAX_NAME_BYTES = 256
# Of a refusal's text.
MAX_TEXT_BYTES = 300
NAME_CHARACTERS = 64


def shown(name: str) -> str:
    """A name for use in a message."""
    return repr(name if len(name) <= NAME_CHARACTERS else f"{name[:NAME_CHARACTERS]}...")


def cut(text: str) -> str:
    """A message of bounded size."""
    data = text.encode()
    if len(data) <= MAX_TEXT_BYTES:
        return text
    return data[: MAX_TEXT_BYTES - 3].decode(errors="ignore") + "..."
