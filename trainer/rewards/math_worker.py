"""The process behind MathGrader: a JSON line in, true or false out. Ends with its input.

It imports nothing of this project, so that it starts fast.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import sys
from collections.abc import Callable

# For one response. Beyond, the kernel ends this process: no handler could run inside long
# arithmetic.
SECONDS = 5
MEMORY_BYTES = 4 * 2**30

# What makes an answer LaTeX that math-verify finds by itself.
MARKED = re.compile(r"\\boxed|\\\(|\\\[|(?<!\\)\$")


def box(expression: str) -> str:
    """An expression as math-verify finds it for certain."""
    return f"\\boxed{{{expression}}}"


def main() -> None:
    """Serve until the input ends."""
    # They are for the trainer, which may still want answers while it stops.
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    # Parsers print; only replies may reach the trainer.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.disable()
    right = _judge()
    for line in sys.stdin:
        request = json.loads(line)
        signal.alarm(SECONDS)
        reply = right(request["answer"], request["response"])
        signal.alarm(0)
        print(json.dumps(reply), file=replies, flush=True)


def _judge() -> Callable[[str, str | None], bool]:
    from math_verify import parse, verify

    def right(answer: str, response: str | None) -> bool:
        """Whether the response is right; without one, whether the answer can be read."""
        gold = parse(answer if MARKED.search(answer) else box(answer), parsing_timeout=None)
        if response is None:
            return bool(gold)
        return bool(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))

    return right


if __name__ == "__main__":
    main()
