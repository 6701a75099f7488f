"""What can go wrong between a client and its teacher. Each says what to change."""

from __future__ import annotations


class TeacherError(RuntimeError):
    """A call to the teacher failed."""


class TeacherUnavailable(TeacherError):
    """Nobody answered, or the teacher stayed full, for longer than `retry_seconds`."""


class TeacherTimeout(TeacherError):
    """A call passed its deadline. Not repeated: the next one would take as long."""


class TeacherRejected(TeacherError):
    """The teacher refused the request as a whole; repeating it would not help."""


class TeacherChanged(TeacherRejected):
    """Another teacher answers at this address than the one the client was introduced to."""


class TeacherReplyInvalid(TeacherError):
    """The reply does not match the request: missing, foreign or repeated results."""


class MessageTooLarge(TeacherError, ValueError):
    """A trajectory with its prompt fits in no message, or its scores fit in no reply."""
