"""The state of a client and of one score() call, apart from how bytes travel.

The sync and the asyncio client share all of it; they differ only in how they wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from preceptor.codec import decode_ids
from preceptor.split import Limits, Piece, merge, split
from preceptor.teacher_errors import TeacherChanged, TeacherReplyInvalid
from preceptor.v1 import teacher_pb2

OnResult = Callable[[teacher_pb2.GroupResult], None]


class Introduction:
    """Who the teacher is: pinned by the first card or reply, and held to from then on.

    Attributes:
        identity: its identity; empty before anything was heard.
        card: None before describe().
    """

    def __init__(self, address: str) -> None:
        self.identity = ""
        self.card: teacher_pb2.TeacherCard | None = None
        self._address = address

    def meet(self, card: teacher_pb2.TeacherCard) -> None:
        """Keep the card.

        Raises:
            TeacherChanged: somebody else was introduced before.
        """
        self.check(card.identity)
        self.card = card

    def check(self, identity: str) -> None:
        """Compare with the one known, or keep it if none is.

        Raises:
            TeacherChanged: another one.
        """
        if not self.identity:
            self.identity = identity
        if identity != self.identity:
            raise TeacherChanged(
                f"teacher at {self._address} has identity {identity!r}, the client was introduced "
                f"to {self.identity!r}: its weights, tokenizer, dtype or logprob mode differ. "
                "Restore the teacher's settings; if it was replaced on purpose, make a new client"
            )

    def message_limit(self, own: int) -> int:
        """Bytes a message may have: our limit, or the teacher's where that is lower."""
        theirs = self.card.limits.max_message_bytes if self.card is not None else 0
        return min(own, theirs) if theirs else own


@dataclass(frozen=True)
class Question:
    """What every request of a score() call says besides its groups.

    Attributes:
        suppressed_ids: as bytes, ascending, each once.
    """

    student: str
    temperature: float | None
    top_k: int
    suppressed_ids: bytes = b""

    def check_applied(self, result: teacher_pb2.GroupResult) -> None:
        """Raise TeacherReplyInvalid where the teacher applied something else than was asked."""
        asked: dict[str, float | bytes] = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_k": self.top_k,
            "suppressed_ids": self.suppressed_ids,
        }
        for name, value in asked.items():
            applied = getattr(result, name)
            if applied != value:
                raise TeacherReplyInvalid(
                    f"group {result.group_id!r} was scored with {name} {_readable(applied)}, asked "
                    f"for {_readable(value)}: does the teacher run this version of preceptor?"
                )


class Request:
    """One ScoreRequest: which of its pieces are still open. Sent again, it asks only for those."""

    def __init__(self, job: ScoreJob, pieces: list[Piece]) -> None:
        self._job = job
        self._open = {piece.group.group_id: piece for piece in pieces}

    @property
    def done(self) -> bool:
        """Nothing is open."""
        return not self._open

    def message(self) -> teacher_pb2.ScoreRequest:
        """The request for what is open."""
        question = self._job.question
        return teacher_pb2.ScoreRequest(
            student=question.student,
            expected_identity=self._job.teacher.identity,
            groups=[piece.group for piece in self._open.values()],
            options=teacher_pb2.ScoreOptions(
                temperature=question.temperature,
                top_k=question.top_k,
                suppressed_ids=question.suppressed_ids,
            ),
        )

    def accept(self, result: teacher_pb2.GroupResult) -> None:
        """Take one result.

        Raises:
            TeacherChanged: from another teacher.
            TeacherReplyInvalid: not for an open group of this request, of another shape, or scored
                with other options.
        """
        self._job.teacher.check(result.identity)
        piece = self._open.pop(result.group_id, None)
        if piece is None:
            raise TeacherReplyInvalid(
                f"the reply holds group {result.group_id!r}, which was not asked for or came twice"
            )
        if len(result.trajectories) != len(piece.group.trajectories):
            raise TeacherReplyInvalid(
                f"group {result.group_id!r}: {len(result.trajectories)} results for "
                f"{len(piece.group.trajectories)} trajectories"
            )
        self._job.question.check_applied(result)
        self._job.deliver(piece, result)

    def end(self) -> None:
        """The teacher says it is done.

        Raises:
            TeacherReplyInvalid: something is still open.
        """
        if self._open:
            raise TeacherReplyInvalid(f"the reply lacks groups {sorted(self._open)}")


class ScoreJob:
    """A score() call: the requests to make, and the results as they come together."""

    def __init__(
        self,
        groups: Sequence[teacher_pb2.PromptGroup],
        question: Question,
        teacher: Introduction,
        limits: Limits,
        on_result: OnResult | None,
    ) -> None:
        self.question = question
        self.teacher = teacher
        self._groups = groups
        self._on_result = on_result
        batches = split(groups, question.top_k, limits)
        self.requests = [Request(self, pieces) for pieces in batches]
        self._pieces: dict[int, int] = {}
        for piece in (piece for pieces in batches for piece in pieces):
            self._pieces[piece.index] = self._pieces.get(piece.index, 0) + 1
        self._parts: dict[int, dict[int, teacher_pb2.GroupResult]] = {}
        self._results: dict[int, teacher_pb2.GroupResult] = {}

    def deliver(self, piece: Piece, result: teacher_pb2.GroupResult) -> None:
        """Keep a piece's result; the last one completes its group."""
        parts = self._parts.setdefault(piece.index, {})
        parts[piece.first] = result
        if len(parts) < self._pieces[piece.index]:
            return
        ordered = [part for _, part in sorted(self._parts.pop(piece.index).items())]
        merged = merge(self._groups[piece.index], ordered)
        self._results[piece.index] = merged
        if self._on_result is not None:
            self._on_result(merged)

    def results(self) -> list[teacher_pb2.GroupResult]:
        """All results, in the order of the groups; every request must be done."""
        return [self._results[index] for index in range(len(self._groups))]


def _readable(option: float | bytes) -> str:
    return str(decode_ids(option).tolist() if isinstance(option, bytes) else option)
