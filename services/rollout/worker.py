"""The worker's loop: claim tasks, hold a new enough policy, write responses, hand them in."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from modeling.engine_errors import ENGINE_ERRORS
from modeling.load import LoadedModel
from preceptor.codec import encode_id_table, encode_ids, encode_logprobs
from preceptor.policy import Version
from preceptor.queue import RolloutQueue
from preceptor.v1 import common_pb2, queue_pb2
from services.rollout.admission import BadTask, read_task
from services.rollout.engines.torch import Sampled, SampleRequest, generate, probe
from services.rollout.hand import Hand, TaskClaim
from services.rollout.heartbeat import Status
from services.rollout.held_policy import HeldPolicy
from services.rollout.sampling import Sampling
from services.rollout.settings import RolloutSettings

logger = logging.getLogger(__name__)

CLAIM_BLOCK_SECONDS = 1.0


class Stopping(Exception):
    """The worker was told to stop."""


@dataclass(frozen=True)
class Job:
    """An admitted task."""

    claim: TaskClaim
    request: SampleRequest
    sampling: Sampling


class Worker:
    """Serves tasks until `stop` is set; what it then has in hand is given back."""

    def __init__(
        self,
        settings: RolloutSettings,
        loaded: LoadedModel,
        queue: RolloutQueue,
        policy: HeldPolicy,
        status: Status,
        stop: threading.Event,
    ) -> None:
        self._settings = settings
        self._loaded = loaded
        self._queue = queue
        self._policy = policy
        self._status = status
        self._stop = stop
        self._missing: Version | None = None

    def run(self) -> None:
        """Until stopped.

        Raises:
            services.rollout.held_policy.WrongModel: the published weights do not fit.
            modeling.probe.PolicyDrift: they fit, and give other logprobs than the trainer's.
            preceptor.queue.QueueError: Redis stays away, or is full.
            RuntimeError and others: the engine can no longer write anything.
        """
        while not self._stop.is_set():
            self._status.state = "idle"
            claims = self._claim()
            if not claims:
                continue
            with Hand(self._queue, claims, self._settings.policy_retry_seconds) as hand:
                try:
                    self._serve(claims, hand)
                except Stopping:
                    logger.info("told to stop in the middle of a batch")

    def _claim(self) -> list[TaskClaim]:
        """Tasks that ask for about batch_sequences responses; waits a moment for the first."""
        found = self._queue.claim_tasks(1, CLAIM_BLOCK_SECONDS)
        claims = list(found)
        while found:
            wanted = self._settings.batch_sequences - sum(one.message.samples for one in claims)
            if wanted <= 0:
                break
            # As if the next ones asked for as many responses as the last.
            count = math.ceil(wanted / max(1, found[-1].message.samples))
            found = self._queue.claim_tasks(count, block_seconds=0.0)
            claims += found
        return claims

    def _serve(self, claims: Sequence[TaskClaim], hand: Hand) -> None:
        """Finish, bury or postpone the claims."""
        batches: dict[Sampling, list[Job]] = {}
        for claim in self._with_policy(claims, hand):
            try:
                request, sampling = read_task(self._loaded, claim.message)
            except BadTask as error:
                hand.bury(claim, str(error))
            else:
                batches.setdefault(sampling, []).append(Job(claim, request, sampling))
        for batch in batches.values():
            self._write(batch, hand)

    def _with_policy(self, claims: Sequence[TaskClaim], hand: Hand) -> list[TaskClaim]:
        """Those that the newest policy may write. The others are postponed: a version that never
        comes keeps nobody from working."""
        wanted = [Version.of(claim.message.policy) for claim in claims]
        newest = max(wanted)
        if not self._policy.covers(newest):
            self._status.state = "loading"
            self._policy.refresh()
            self._status.policy = str(self._policy.version or "")
        ready = []
        for claim, version in zip(claims, wanted, strict=True):
            if self._policy.covers(version):
                ready.append(claim)
            else:
                hand.postpone(claim)
        if len(ready) < len(claims) and newest != self._missing:
            # Once a version, however often its tasks come back.
            self._missing = newest
            logger.warning(
                "policy %s is not in %s; tasks that ask for it are tried again every %g s "
                "(rollout.policy_retry_seconds). Does the trainer publish there (run.dir)?",
                newest,
                self._policy.folder,
                self._settings.policy_retry_seconds,
            )
        return ready

    def _write(self, batch: list[Job], hand: Hand) -> None:
        """Write a batch's responses: all together, or after a failure task by task."""
        if self._stop.is_set():
            raise Stopping
        self._status.state = "generating"
        try:
            groups = self._generate(batch)
        except ENGINE_ERRORS:
            logger.exception("a batch of %d tasks failed; they run one by one", len(batch))
            for job in batch:
                self._write_alone(job, hand)
            return
        # Outside the try: a queue that refuses a group says nothing about the engine.
        for job, group in zip(batch, groups, strict=True):
            hand.finish(job.claim, group)

    def _write_alone(self, job: Job, hand: Hand) -> None:
        try:
            [group] = self._generate([job])
        except ENGINE_ERRORS as error:
            # If nothing can be written any more, it is not the task's fault: die by it.
            probe(self._loaded)
            reason = f"the engine fails on this task: {type(error).__name__}: {error}"
            hand.bury(job.claim, reason)
            return
        hand.finish(job.claim, group)

    def _generate(self, batch: list[Job]) -> list[queue_pb2.RolloutGroup]:
        started = time.monotonic()
        requests = [job.request for job in batch]
        results = generate(self._loaded, requests, batch[0].sampling, self._on_step)
        seconds = time.monotonic() - started
        total = sum(len(one.ids) for samples in results for one in samples)
        shares = [sum(len(one.ids) for one in samples) / total for samples in results]
        return [
            self._group(job.claim.message, samples, seconds * share)
            for job, samples, share in zip(batch, results, shares, strict=True)
        ]

    def _on_step(self, tokens: int) -> None:
        self._status.tokens += tokens
        if self._stop.is_set():
            raise Stopping

    def _group(
        self, task: queue_pb2.PromptTask, samples: Sequence[Sampled], seconds: float
    ) -> queue_pb2.RolloutGroup:
        assert self._policy.version is not None  # _with_policy
        version = self._policy.version.message()
        rollouts = [
            queue_pb2.Rollout(
                sample=index,
                response_ids=encode_ids(one.ids),
                behaviour_logprobs=encode_logprobs(one.logprobs),
                named_ids=encode_id_table(one.named_ids),
                finish_reason=queue_pb2.FINISH_REASON_STOP
                if one.stopped
                else queue_pb2.FINISH_REASON_LENGTH,
                policy_spans=[common_pb2.PolicySpan(version=version, count=len(one.ids))],
            )
            for index, one in enumerate(samples)
        ]
        return queue_pb2.RolloutGroup(
            id=task.id,
            kind=task.kind,
            prompt=task.prompt,
            rollouts=rollouts,
            sampling=task.sampling,
            worker=self._queue.consumer,
            generation_seconds=seconds,
        )
