"""The service's life: bind, load, warm up, serve, drain.

The port is open from the start so that health can be asked while the model loads. Health says
SERVING after a score succeeded and NOT_SERVING while loading, draining, or when a batch hangs. An
engine that dies takes the process with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from modeling.fingerprint import digest
from preceptor.manifest import replace_text
from preceptor.v1 import teacher_pb2, teacher_pb2_grpc
from services.teacher.backlog import Backlog
from services.teacher.engines.torch import TorchEngine
from services.teacher.gate import Rules
from services.teacher.servicer import TeacherServicer
from services.teacher.settings import TeacherSettings
from services.teacher.worker import Worker

logger = logging.getLogger(__name__)

SERVICE = teacher_pb2.DESCRIPTOR.services_by_name["TeacherService"].full_name
WATCH_SECONDS = 0.2
REPORT_SECONDS = 60.0
# gRPC refuses larger messages with a text of its own; up to twice the limit the text is ours.
HARD_LIMIT_FACTOR = 2


class Health(health.aio.HealthServicer):  # type: ignore[name-defined]
    """The standard health service, for the server as a whole and for the teacher by name."""

    async def set_serving(self, serving: bool) -> None:
        """SERVING or NOT_SERVING."""
        statuses = health_pb2.HealthCheckResponse
        for service in ("", SERVICE):
            await self.set(service, statuses.SERVING if serving else statuses.NOT_SERVING)


class EngineDied(RuntimeError):
    """The engine can no longer score; the process ends."""


async def serve(settings: TeacherSettings) -> None:
    """Run until SIGTERM or SIGINT, then finish what is in flight and return.

    Raises:
        EngineDied: the engine broke.
        OSError: the port is taken.
        modeling.load.ModelError, modeling.head.UnsupportedModel: see load_model.
        TimeoutError: calls in flight did not finish within drain_seconds.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    backlog = Backlog(settings.max_queued_tokens, settings.minimum_deadline_seconds)
    servicer = TeacherServicer(settings, backlog)
    state = Health()
    server = await _bind(settings, servicer, state)
    try:
        engine = await _load(settings, stop)
        if engine is None:
            return
        worker = Worker(engine, backlog, settings.max_batch_tokens)
        worker.start()
        rules = Rules(engine.card, engine.count_pixels, engine.count_features)
        servicer.open(rules, worker.throughput)
        await state.set_serving(True)
        logger.info("serving %s: %s", settings.model, _summary(engine.card))
        await _watch(worker, state, settings, stop)
        await _drain(servicer, state, worker, settings)
        backlog.close()
    finally:
        await server.stop(grace=None)
    logger.info("stopped")


async def _bind(
    settings: TeacherSettings, servicer: TeacherServicer, state: Health
) -> grpc.aio.Server:
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", HARD_LIMIT_FACTOR * settings.max_message_bytes),
            ("grpc.max_send_message_length", settings.max_message_bytes),
            # A second server on the same port would silently take half of the calls.
            ("grpc.so_reuseport", 0),
        ]
    )
    teacher_pb2_grpc.add_TeacherServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(state, server)
    reflection.enable_server_reflection(
        (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    await state.set_serving(False)
    wanted = f"{settings.host}:{settings.port}"
    try:
        port = server.add_insecure_port(wanted)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {wanted} (teacher.host, teacher.port): {error}") from error
    await server.start()
    address = f"{settings.host}:{port}"
    if settings.port_file is not None:
        replace_text(settings.port_file, address)
    logger.info("listening on %s, loading %s", address, settings.model)
    return server


async def _load(settings: TeacherSettings, stop: asyncio.Event) -> TorchEngine | None:
    """The engine after its warm-up; None when told to stop meanwhile."""
    loading = asyncio.create_task(asyncio.to_thread(_build_engine, settings))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    return await loading if not stop.is_set() else None


def _build_engine(settings: TeacherSettings) -> TorchEngine:
    engine = TorchEngine(settings)
    engine.card.limits.CopyFrom(
        teacher_pb2.Limits(
            max_message_bytes=settings.max_message_bytes,
            max_batch_tokens=settings.max_batch_tokens,
            max_top_k=settings.max_top_k,
            max_image_bytes=settings.max_image_bytes,
            max_image_pixels=settings.max_image_pixels,
            max_queued_tokens=settings.max_queued_tokens,
            max_request_pixels=settings.max_request_pixels,
        )
    )
    card = engine.card
    limits = {field.name: value for field, value in card.limits.ListFields()}
    card.build = digest([card.engine, card.engine_version, card.shares_prompts, limits])
    return engine


async def _watch(
    worker: Worker,
    state: Health,
    settings: TeacherSettings,
    stop: asyncio.Event,
) -> None:
    """Until told to stop: a dead engine ends the process, a hanging one ends SERVING."""
    healthy = True
    reported, tokens = time.monotonic(), 0
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), WATCH_SECONDS)
        if not worker.is_alive():
            raise EngineDied(f"the engine broke: {worker.failed!r}") from worker.failed
        busy_since = worker.busy_since
        hangs = busy_since is not None and time.monotonic() - busy_since > settings.stall_seconds
        if hangs == healthy:
            healthy = not hangs
            logger.warning("the engine %s", "hangs" if hangs else "moves again")
            await state.set_serving(healthy)
        if time.monotonic() - reported > REPORT_SECONDS and worker.counters.tokens != tokens:
            reported, tokens = time.monotonic(), worker.counters.tokens
            logger.info("so far %s, %.0f tokens/s when busy", worker.counters, worker.throughput())


async def _drain(
    servicer: TeacherServicer,
    state: Health,
    worker: Worker,
    settings: TeacherSettings,
) -> None:
    logger.info("draining %d calls", servicer.active)
    servicer.draining = True
    await state.enter_graceful_shutdown()
    deadline = time.monotonic() + settings.drain_seconds
    while servicer.active:
        if not worker.is_alive():
            raise EngineDied(f"the engine broke: {worker.failed!r}") from worker.failed
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{servicer.active} calls did not finish within {settings.drain_seconds} s "
                "(teacher.drain_seconds)"
            )
        await asyncio.sleep(WATCH_SECONDS / 10)


def _summary(card: teacher_pb2.TeacherCard) -> str:
    return (
        f"identity {card.identity[:12]}, {card.dtype}, {'/'.join(card.modalities)}, up to "
        f"{card.max_sequence_tokens} tokens, prompts {'' if card.shares_prompts else 'not '}shared"
    )
