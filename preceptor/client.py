"""TeacherClient and AsyncTeacherClient: how likely would the teacher have found these tokens?

    with TeacherClient("127.0.0.1:50051", student="geometry") as teacher:
        card = teacher.describe()
        group = prompt_group("0", prompt_ids=[1, 2, 3], responses=[[4, 5], [6]])
        [[first, second]] = teacher.scores([group])
        first.logprobs  # float32 [2]

Calls are idempotent: a teacher that dies and comes back at its address within `retry_seconds` is
survived, and what had arrived is not asked for again. Channels are made on first use and anew after
a fork, so a process may fork data workers while it holds a client; a call running in another thread
at the moment of the fork is gRPC's weak spot, and the child must not wait for that one.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, Self

import grpc
from numpy.typing import ArrayLike

from preceptor.channel import channel_options
from preceptor.codec import Score, TeacherRefusal, encode_id_set, read_group
from preceptor.retry_budget import RetryBudget
from preceptor.score_job import Introduction, OnResult, Question, Request, ScoreJob
from preceptor.split import Limits
from preceptor.v1 import teacher_pb2, teacher_pb2_grpc

__all__ = ["AsyncTeacherClient", "TeacherClient"]


class _Shared:
    """What the two clients have in common: settings, the introduction, one channel a process."""

    _grpc: Any

    def __init__(
        self,
        address: str,
        *,
        student: str,
        timeout_seconds: float = 120.0,
        retry_seconds: float = 120.0,
        max_message_bytes: int = 64 * 2**20,
        request_tokens: int = 16_384,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """
        Args:
            address: host:port, or any gRPC target ("dns:///teacher:50051" spreads over replicas).
            student: who asks; the teacher names it in its log.
            timeout_seconds: deadline of each request, unless a call names another.
            retry_seconds: how long a request may go without any answer from a teacher that is away
                or full.
            max_message_bytes: limit on messages, both ways; the teacher's own counts where lower.
            request_tokens: requests are cut at about this many prompt and response tokens.
            credentials: None: no TLS.

        Raises:
            ValueError: a limit that is not positive.
        """
        for name, value in (
            ("timeout_seconds", timeout_seconds),
            ("max_message_bytes", max_message_bytes),
            ("request_tokens", request_tokens),
        ):
            if value <= 0:
                raise ValueError(f"{name} is {value}, must be positive")
        self.address = address
        self._student = student
        self._timeout_seconds = timeout_seconds
        self._retry_seconds = retry_seconds
        self._max_message_bytes = max_message_bytes
        self._request_tokens = request_tokens
        self._credentials = credentials
        self._teacher = Introduction(address)
        self._channel: Any = None
        self._channel_pid = 0
        self._channel_lock = threading.Lock()

    @property
    def _stub(self) -> teacher_pb2_grpc.TeacherServiceStub:
        # After a fork the parent's channel is dead weight: gRPC's threads did not come along.
        with self._channel_lock:
            if self._channel is None or self._channel_pid != os.getpid():
                self._channel, self._channel_pid = self._open_channel(), os.getpid()
            return teacher_pb2_grpc.TeacherServiceStub(self._channel)

    def _open_channel(self) -> Any:
        options = channel_options(self._max_message_bytes)
        if self._credentials is None:
            return self._grpc.insecure_channel(self.address, options=options)
        return self._grpc.secure_channel(self.address, self._credentials, options=options)

    def _budget(self) -> RetryBudget:
        introduced = bool(self._teacher.identity)
        return RetryBudget(self.address, self._retry_seconds, introduced=introduced)

    def _deadline(self, timeout_seconds: float | None) -> float:
        return self._timeout_seconds if timeout_seconds is None else timeout_seconds

    def _job(
        self,
        groups: Sequence[teacher_pb2.PromptGroup],
        temperature: float | None,
        top_k: int,
        suppressed_ids: ArrayLike,
        on_result: OnResult | None,
    ) -> ScoreJob:
        question = Question(self._student, temperature, top_k, encode_id_set(suppressed_ids))
        limits = Limits(
            tokens=self._request_tokens,
            message_bytes=self._teacher.message_limit(self._max_message_bytes),
            suppressed_bytes=len(question.suppressed_ids),
        )
        return ScoreJob(groups, question, self._teacher, limits, on_result)


class TeacherClient(_Shared):
    """Blocking client; safe to share between threads. Requests of a call go one after another.

    Every method raises a TeacherError (preceptor.teacher_errors) that says what to change.
    """

    _grpc = grpc

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel; the next call would open another."""
        if self._channel is not None and self._channel_pid == os.getpid():
            self._channel.close()
        self._channel = None

    def describe(self, timeout_seconds: float | None = None) -> teacher_pb2.TeacherCard:
        """The teacher's card. From then on every request and reply is held to its identity.

        Raises:
            TeacherChanged: the client knew another teacher.
        """
        budget, request = self._budget(), teacher_pb2.DescribeRequest()
        while True:
            try:
                reply = self._stub.Describe(request, timeout=self._deadline(timeout_seconds))
            except grpc.RpcError as error:
                time.sleep(budget.wait_after(error))
                continue
            self._teacher.meet(reply.card)
            return reply.card

    def score(
        self,
        groups: Sequence[teacher_pb2.PromptGroup],
        *,
        temperature: float | None = None,
        top_k: int = 0,
        suppressed_ids: ArrayLike = (),
        timeout_seconds: float | None = None,
        on_result: OnResult | None = None,
    ) -> list[teacher_pb2.GroupResult]:
        """Results in the order of `groups`, however they were cut into requests.

        A trajectory the teacher refuses is a result with its status; the others are scored.

        Args:
            groups: with distinct group_ids; see codec.prompt_group.
            temperature: of the teacher's distribution; None is 1.
            top_k: also return the teacher's k likeliest tokens at every position.
            suppressed_ids: int [k], in any order: left out of the teacher's distribution. Give it
                what the student's distribution leaves out; one that occurs in a response gets -inf.
            timeout_seconds: deadline of each request.
            on_result: called with each group's result as soon as it is complete, in any order.

        Raises:
            CodecError: suppressed_ids that are none (nothing is sent).
            MessageTooLarge: a trajectory with its prompt fits in no message (nothing is sent).
            TeacherReplyInvalid: among others, the teacher applied other options than these.
            TeacherError: see preceptor.teacher_errors.
        """
        job = self._job(groups, temperature, top_k, suppressed_ids, on_result)
        for request in job.requests:
            self._send(request, self._deadline(timeout_seconds))
        return job.results()

    def scores(
        self,
        groups: Sequence[teacher_pb2.PromptGroup],
        *,
        temperature: float | None = None,
        top_k: int = 0,
        suppressed_ids: ArrayLike = (),
        timeout_seconds: float | None = None,
    ) -> list[list[Score | TeacherRefusal]]:
        """The same as numbers: per group, per trajectory, a Score or the refusal as a value.

        Raises:
            CodecError: the reply's arrays do not match the request, or hold no logprobs.
            TeacherError: as score().
        """
        results = self.score(
            groups,
            temperature=temperature,
            top_k=top_k,
            suppressed_ids=suppressed_ids,
            timeout_seconds=timeout_seconds,
        )
        return [read_group(group, result) for group, result in zip(groups, results, strict=True)]

    def _send(self, request: Request, timeout: float) -> None:
        budget = self._budget()
        while not request.done:
            call = self._stub.ScoreStream(request.message(), timeout=timeout)
            try:
                for result in call:
                    request.accept(result)
                    budget.progress()
                request.end()
            except grpc.RpcError as error:
                time.sleep(budget.wait_after(error))
            finally:
                # Whatever ended this early, the teacher need not go on. No effect on a call that
                # is over.
                call.cancel()


class AsyncTeacherClient(_Shared):
    """The same for asyncio; up to `concurrency` requests of a call are under way at once.

    Use it within one event loop. Settings and errors are TeacherClient's.
    """

    _grpc = grpc.aio

    def __init__(self, address: str, *, concurrency: int = 4, **settings: Any) -> None:
        super().__init__(address, **settings)
        self._concurrency = concurrency

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel; the next call would open another."""
        if self._channel is not None and self._channel_pid == os.getpid():
            await self._channel.close()
        self._channel = None

    async def describe(self, timeout_seconds: float | None = None) -> teacher_pb2.TeacherCard:
        """See TeacherClient.describe."""
        budget, request = self._budget(), teacher_pb2.DescribeRequest()
        while True:
            try:
                reply = await self._stub.Describe(request, timeout=self._deadline(timeout_seconds))
            except grpc.RpcError as error:
                await asyncio.sleep(budget.wait_after(error))
                continue
            self._teacher.meet(reply.card)
            return reply.card

    async def score(
        self,
        groups: Sequence[teacher_pb2.PromptGroup],
        *,
        temperature: float | None = None,
        top_k: int = 0,
        suppressed_ids: ArrayLike = (),
        timeout_seconds: float | None = None,
        on_result: OnResult | None = None,
    ) -> list[teacher_pb2.GroupResult]:
        """See TeacherClient.score."""
        job = self._job(groups, temperature, top_k, suppressed_ids, on_result)
        gate, timeout = asyncio.Semaphore(self._concurrency), self._deadline(timeout_seconds)
        sending = [asyncio.ensure_future(self._send(one, timeout, gate)) for one in job.requests]
        try:
            await asyncio.gather(*sending)
        finally:
            for task in sending:
                task.cancel()
        return job.results()

    async def scores(
        self,
        groups: Sequence[teacher_pb2.PromptGroup],
        *,
        temperature: float | None = None,
        top_k: int = 0,
        suppressed_ids: ArrayLike = (),
        timeout_seconds: float | None = None,
    ) -> list[list[Score | TeacherRefusal]]:
        """See TeacherClient.scores."""
        results = await self.score(
            groups,
            temperature=temperature,
            top_k=top_k,
            suppressed_ids=suppressed_ids,
            timeout_seconds=timeout_seconds,
        )
        return [read_group(group, result) for group, result in zip(groups, results, strict=True)]

    async def _send(self, request: Request, timeout: float, gate: asyncio.Semaphore) -> None:
        budget = self._budget()
        async with gate:
            while not request.done:
                call = self._stub.ScoreStream(request.message(), timeout=timeout)
                try:
                    async for result in call:
                        request.accept(result)
                        budget.progress()
                    request.end()
                except grpc.RpcError as error:
                    await asyncio.sleep(budget.wait_after(error))
                finally:
                    call.cancel()
