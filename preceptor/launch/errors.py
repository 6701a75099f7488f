"""What can go wrong in `preceptor up`. Each says what to change."""

from __future__ import annotations

# By this a part says that its settings are wrong or do not fit another part's: a restart would
# end the same way.
CONFIGURATION_EXIT_CODE = 2


class LaunchError(RuntimeError):
    """The run cannot be launched as it is configured."""


class PartFailed(RuntimeError):
    """A part of the run ended and is not started again.

    Attributes:
        part: its name.
        exit_code: what the launcher should exit with, never 0.
        log_tail: how the part's log ends.
    """

    def __init__(self, part: str, message: str, exit_code: int, log_tail: str) -> None:
        self.part = part
        self.exit_code = exit_code
        self.log_tail = log_tail
        super().__init__(message)
