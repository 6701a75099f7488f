"""The gRPC methods: admission, queueing, collecting results.

The event loop only passes things on. Decoding and checking run in the gate's thread, scoring and
encoding in the worker's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import grpc

from preceptor.v1 import teacher_pb2, teacher_pb2_grpc
from preceptor.v1.teacher_pb2 import GroupResult, ScoreRequest
from services.teacher.backlog import Backlog, BacklogFull, Call, Unit
from services.teacher.bounds import shown
from services.teacher.call import InvalidCall, Options, check_names, read_options
from services.teacher.gate import Admitted, Rules, admit
from services.teacher.logs import RefusalLog
from services.teacher.scores import Outcome, group_result, reply_bytes
from services.teacher.settings import TeacherSettings

logger = logging.getLogger(__name__)

# When told to come back later: the time half a full backlog takes, within these bounds.
PUSHBACK_SECONDS = (0.1, 10.0)
BYTES_PER_ID = 4
# A stream's results lie in memory while its reader is slow: all together, at most this many of the
# largest messages.
STREAM_MESSAGES = 16


class TeacherServicer(teacher_pb2_grpc.TeacherServiceServicer):
    """Answers UNAVAILABLE until `open` and after `draining` is set.

    Attributes:
        draining: no new calls.
        active: calls in flight.
    """

    def __init__(self, settings: TeacherSettings, backlog: Backlog) -> None:
        self._settings = settings
        self._backlog = backlog
        self._gate = ThreadPoolExecutor(1, thread_name_prefix="gate")
        self._rules: Rules | None = None
        self._refusals = RefusalLog(logger)
        self._throughput: Callable[[], float] = lambda: 0.0
        self.draining = False
        self.active = 0

    def open(self, rules: Rules, throughput: Callable[[], float]) -> None:
        """Start to serve.

        Args:
            throughput: tokens a second so far, for telling callers when to come back.
        """
        self._rules = rules
        self._throughput = throughput

    async def Describe(
        self, request: teacher_pb2.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> teacher_pb2.DescribeResponse:
        """The card."""
        rules = await self._ready(context)
        return teacher_pb2.DescribeResponse(card=rules.card)

    async def Score(
        self, request: ScoreRequest, context: grpc.aio.ServicerContext
    ) -> teacher_pb2.ScoreResponse:
        """All groups, in the request's order."""
        async with aclosing(self._score(request, context, unary=True)) as ready:
            results = {index: result async for index, result in ready}
        return teacher_pb2.ScoreResponse(
            groups=[results[index] for index in range(len(request.groups))]
        )

    async def ScoreStream(
        self, request: ScoreRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[GroupResult]:
        """Each group as soon as it is ready."""
        async with aclosing(self._score(request, context, unary=False)) as ready:
            async for _, result in ready:
                yield result

    async def _score(
        self, request: ScoreRequest, context: grpc.aio.ServicerContext, unary: bool
    ) -> AsyncGenerator[tuple[int, GroupResult], None]:
        rules = await self._ready(context)
        options = await self._check_call(request, context, rules, unary)
        call = Call(request.student, _deadline(context))
        if call.deadline - time.monotonic() < self._settings.minimum_deadline_seconds:
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "too little of the deadline is left to start "
                f"(teacher.minimum_deadline_seconds {self._settings.minimum_deadline_seconds})",
            )
        held = sum(_tokens(group) for group in request.groups)
        await self._reserve(held, context)
        self.active += 1
        try:
            loop = asyncio.get_running_loop()
            admitted = await loop.run_in_executor(self._gate, admit, request.groups, rules)
            results = self._submit(call, request, admitted, options, rules.card.identity)
            for _ in request.groups:
                ready = await results.get()
                if ready is None:
                    await context.abort(
                        grpc.StatusCode.DEADLINE_EXCEEDED,
                        "the deadline came too near while the call waited for the engine",
                    )
                tokens = _tokens(request.groups[ready[0]])
                self._backlog.release(tokens)
                held -= tokens
                self._refusals.note(request.student, ready[1])
                yield ready
        finally:
            # Also when the caller went away: what still waits is dropped.
            call.cancelled = True
            self._backlog.release(held)
            self.active -= 1

    def _submit(
        self,
        call: Call,
        request: ScoreRequest,
        admitted: list[Admitted],
        options: Options,
        identity: str,
    ) -> asyncio.Queue[tuple[int, GroupResult] | None]:
        """Queue the admitted groups; refused ones are results at once. None: expired."""
        loop = asyncio.get_running_loop()
        results: asyncio.Queue[tuple[int, GroupResult] | None] = asyncio.Queue()

        def unit(index: int, one: Admitted) -> Unit:
            group = request.groups[index]
            assert one.work is not None

            def deliver(outcomes: list[Outcome]) -> None:
                result = group_result(group, one, outcomes, identity, options)
                _call_soon(loop, results, (index, result))

            def expire() -> None:
                _call_soon(loop, results, None)

            return Unit(call, one.work, options, _tokens(group), deliver, expire)

        units = []
        for index, one in enumerate(admitted):
            if one.work is None:
                group = request.groups[index]
                results.put_nowait((index, group_result(group, one, [], identity, options)))
            else:
                units.append(unit(index, one))
        self._backlog.put(units)
        return results

    async def _ready(self, context: grpc.aio.ServicerContext) -> Rules:
        if self.draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this teacher is shutting down")
        if self._rules is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this teacher is loading its model")
        assert self._rules is not None
        return self._rules

    async def _check_call(
        self, request: ScoreRequest, context: grpc.aio.ServicerContext, rules: Rules, unary: bool
    ) -> Options:
        """What concerns the call as a whole."""
        expected, identity = request.expected_identity, rules.card.identity
        if expected and expected != identity:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this teacher is {identity} ({rules.card.model_id}), the call expects "
                f"{shown(expected)}; call Describe again, and check that all replicas serve one "
                "model",
            )
        limit = self._settings.max_message_bytes
        size = request.ByteSize()
        if size > limit:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the request has {size} bytes, the limit is {limit} (teacher.max_message_bytes); "
                "send fewer groups a call",
            )
        try:
            check_names(request)
            options = read_options(request.options, rules.card)
        except InvalidCall as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise
        sizes = [reply_bytes(group, options) for group in request.groups]
        messages = 1 if unary else STREAM_MESSAGES
        for what, size, allowed in (
            ("the largest result", max(sizes, default=0), limit),
            ("the reply", sum(sizes), messages * limit),
        ):
            if size > allowed:
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"{what} would have about {size} bytes, the limit is {allowed} ("
                    f"{allowed // limit} x teacher.max_message_bytes); ask for fewer groups or "
                    "trajectories, a smaller top_k, or use ScoreStream",
                )
        return options

    async def _reserve(self, tokens: int, context: grpc.aio.ServicerContext) -> None:
        try:
            self._backlog.reserve(tokens)
        except BacklogFull as error:
            if not error.never:
                # Only with this trailer may a client retry RESOURCE_EXHAUSTED.
                milliseconds = str(int(1000 * self._pushback()))
                context.set_trailing_metadata((("grpc-retry-pushback-ms", milliseconds),))
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))

    def _pushback(self) -> float:
        low, high = PUSHBACK_SECONDS
        rate = self._throughput()
        return min(high, max(low, self._backlog.tokens / 2 / rate)) if rate else 1.0


def _call_soon(
    loop: asyncio.AbstractEventLoop,
    results: asyncio.Queue[tuple[int, GroupResult] | None],
    ready: tuple[int, GroupResult] | None,
) -> None:
    loop.call_soon_threadsafe(results.put_nowait, ready)


def _deadline(context: grpc.aio.ServicerContext) -> float:
    remaining = context.time_remaining()
    return float("inf") if remaining is None else time.monotonic() + remaining


def _tokens(group: teacher_pb2.PromptGroup) -> int:
    """Prompt and responses, told from the bytes alone: nothing is decoded yet."""
    prompt = group.teacher_prompt if group.HasField("teacher_prompt") else group.prompt
    responses = sum(len(one.response_ids) for one in group.trajectories)
    return (len(prompt.token_ids) + responses) // BYTES_PER_ID
