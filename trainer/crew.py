"""All ranks of a trainer as one: rank 0 gives an order, every rank carries it out.

Rank 0 owns the run; the others know nothing but their weights and the order at hand. Each order
below is a collective: rank 0 calls the method, the others are in `follow`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from preceptor.v1 import trainer_pb2
from trainer.deal import Share, deal
from trainer.estimators.difference import NonFinite
from trainer.estimators.gndpo import Running, SmallBatch
from trainer.groups import Group
from trainer.settings import TrainerSettings
from trainer.shares import decode_share, encode_share
from trainer.snapshot import Snapshot
from trainer.step import NothingToTrain, StepResult, train_step
from trainer.student import Student
from trainer.world import World

BATCH_ERRORS = (NothingToTrain, SmallBatch, NonFinite)


class Crew:
    """The ranks that train one student.

    Attributes:
        student: this rank's part of it.
        running: statistics that outlive a step, the same on every rank.
    """

    def __init__(self, world: World, student: Student, settings: TrainerSettings) -> None:
        self.student = student
        self.running: Running | None = None
        self._world = world
        self._settings = settings
        self._snapshot = Snapshot(world)

    def train(self, groups: Sequence[Group], step: int) -> StepResult:
        """Train on a scored rollout batch, groups in task order.

        Raises:
            NothingToTrain: no group has a sample.
            Exception: see train_step, the same on every rank.
        """
        trainable = [group for group in groups if group.samples]
        if not trainable:
            raise NothingToTrain(
                f"step {step}: none of its samples can be trained on; see the log for the reasons"
            )
        shares = deal(
            trainable,
            step,
            ranks=self._world.size,
            minibatches=self._settings.minibatches,
            micro_batch_tokens=self._settings.micro_batch_tokens,
        )
        if not self._world.alone:
            orders = [trainer_pb2.Order(train=encode_share(share)) for share in shares]
            self._world.send_all([order.SerializeToString() for order in orders])
        return self._train(shares[0])

    def gathered(self) -> dict[str, Tensor]:
        """Whole weights, see Student.gathered."""
        self._tell(trainer_pb2.Order(gather=trainer_pb2.GatherOrder()))
        return self.student.gathered()

    def probe(self) -> NDArray[np.float32]:
        """Logprobs of the student's probe under its current weights, float32 [n]."""
        self._tell(trainer_pb2.Order(probe=trainer_pb2.ProbeOrder()))
        return self._probe()

    def save(self, folder: Path) -> None:
        """Start to write tensors into an empty folder; `saved` waits for it."""
        self._tell(trainer_pb2.Order(save=trainer_pb2.SaveOrder(folder=str(folder))))
        self._snapshot.start(folder, self.student.state())

    def saved(self) -> None:
        """Wait until what `save` started is on the disk, on every rank. May be called from another
        thread; no order.

        Raises:
            Exception: what kept a rank from writing.
        """
        self._snapshot.wait()

    def restore(self, folder: Path, running: Mapping[str, float] | None) -> None:
        """Read tensors back, on whatever number of ranks. The caller verified the folder.

        Args:
            folder: what `save` wrote.
            running: of the saved state, see TrainerState.
        """
        order = trainer_pb2.RestoreOrder(folder=str(folder))
        if running is not None:
            order.running.CopyFrom(trainer_pb2.RunningStatistics(**running))
        self._tell(trainer_pb2.Order(restore=order))
        self._restore(order)

    def end(self, exit_code: int) -> None:
        """The others leave with this code."""
        self._tell(trainer_pb2.Order(end=trainer_pb2.EndOrder(exit_code=exit_code)))

    def follow(self) -> int:
        """Ranks other than 0: carry out orders until the last one, and return its exit code."""
        while True:
            order = trainer_pb2.Order.FromString(self._world.receive())
            match order.WhichOneof("what"):
                case "train":
                    with suppress(*BATCH_ERRORS):
                        # Raised on rank 0 just so: it decides what becomes of the run.
                        self._train(decode_share(order.train))
                case "gather":
                    self.student.gathered()
                case "probe":
                    self._probe()
                case "save":
                    self._snapshot.start(Path(order.save.folder), self.student.state())
                case "restore":
                    self._restore(order.restore)
                case "end":
                    self._snapshot.wait()
                    return order.end.exit_code
                case unknown:
                    raise ValueError(f"rank 0 gave an order that is unknown here: {unknown}")

    def _tell(self, order: trainer_pb2.Order) -> None:
        if not self._world.alone:
            self._world.send_all([order.SerializeToString()] * self._world.size)

    def _restore(self, order: trainer_pb2.RestoreOrder) -> None:
        self._snapshot.load(Path(order.folder), self.student.state())
        one = order.running
        values = {"count": one.count, "mean": one.mean, "m2": one.m2}
        # On every rank: each normalises its own tokens.
        self.running = Running.from_dict(values) if order.HasField("running") else None

    def _train(self, share: Share) -> StepResult:
        result = train_step(
            self.student,
            share,
            self._world,
            estimator=self._settings.estimator,
            loss=self._settings.loss,
            max_new_tokens=self._settings.max_new_tokens,
            running=self.running,
        )
        self.running = result.running
        return result

    @torch.no_grad()
    def _probe(self) -> NDArray[np.float32]:
        return self.student.scores(self.student.probe).logprobs_T.float().cpu().numpy()
