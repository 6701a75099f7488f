"""How long to wait before trying again: exponential backoff with full jitter."""

from __future__ import annotations

import random

# A generator of our own: drawing from the global one would change a seeded run whenever a network
# call is retried.
_random = random.Random()


def full_jitter(attempt: int, first_seconds: float, longest_seconds: float) -> float:
    """Seconds to wait after failure number `attempt` (0 is the first).

    Uniform in [0, min(longest_seconds, first_seconds * 2^attempt)], so that clients that failed
    together do not come back together.
    """
    ceiling = min(longest_seconds, first_seconds * 2.0 ** min(attempt, 60))
    return _random.uniform(0.0, ceiling)
