"""python -m trainer RUN.yaml [--trainer.steps 10 ...]

Exit codes: 0 the run is complete; 2 settings, data or a teacher that cannot be used (starting again
would end the same way); 143 asked to stop, resumable; 1 anything else, resumable.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from modeling.card import describe_model
from modeling.compat import IncompatibleTeacher, check_compatible
from modeling.head import UnsupportedModel
from modeling.load import LoadedModel, ModelError, load_model
from preceptor.client import TeacherClient
from preceptor.config import as_yaml
from preceptor.config_errors import ConfigError
from preceptor.lock import RunFolderBusy, run_folder_lock
from preceptor.manifest import replace_text
from preceptor.queue import RolloutQueue
from trainer.checkpoint import UnusableCheckpoint
from trainer.crew import Crew
from trainer.data import DataError, Prompt, check_answers, fitting, read_prompts
from trainer.estimators.difference import NonFinite
from trainer.estimators.gndpo import SmallBatch
from trainer.guards import CollapsedRun
from trainer.journal import JournalTooShort
from trainer.loop import NonFiniteRun, Prompts, Run
from trainer.ranks import run_ranks
from trainer.rewards import RewardError, load_reward
from trainer.settings import TrainerConfig, TrainerSettings
from trainer.step import NothingToTrain
from trainer.student import Student
from trainer.tasks import TaskFailed
from trainer.world import World, join, leave, own_device

logger = logging.getLogger(__name__)

UNUSABLE = 2
STOPPED = 128 + signal.SIGTERM

# Starting again from the same settings, data and checkpoint would end the same way.
DETERMINISTIC = (
    ConfigError,
    DataError,
    RewardError,
    ModelError,
    UnsupportedModel,
    IncompatibleTeacher,
    RunFolderBusy,
    UnusableCheckpoint,
    JournalTooShort,
    TaskFailed,
    NothingToTrain,
    SmallBatch,
    NonFinite,
    NonFiniteRun,
    CollapsedRun,
)


def main(arguments: list[str]) -> int:
    """Run the trainer and return its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if not arguments or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return UNUSABLE
    disable_progress_bar()
    try:
        config = TrainerConfig.load(Path(arguments[0]), arguments[1:])
        ranks = config.trainer.scale.ranks
        if ranks > 1 and "RANK" not in os.environ:
            return run_ranks(arguments, ranks)
        return _train(config)
    except DETERMINISTIC as error:
        print(f"trainer: {error}", file=sys.stderr)
        return UNUSABLE


def _train(config: TrainerConfig) -> int:
    settings = config.trainer
    if settings.threads:
        torch.set_num_threads(settings.threads)
    torch.manual_seed(config.run.seed)
    device = own_device(settings.device)
    world = join(device, sharded=settings.scale.compute_dtype != "float32")
    try:
        if world.rank == 0:
            with run_folder_lock(config.run.dir, "trainer"):
                return _lead(config, world, device)
        # Rank 0 says when to stop; a signal to all must not part them.
        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, signal.SIG_IGN)
        return Crew(world, _student(config, _load(settings, device), world), settings).follow()
    finally:
        leave()


def _lead(config: TrainerConfig, world: World, device: str) -> int:
    """Rank 0: own the run, and tell the others how it ended."""
    settings = config.trainer
    # Until there is something to save, these end us as they end any program.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    loaded = _load(settings, device)
    with TeacherClient(
        settings.teacher,
        student=settings.student_name,
        timeout_seconds=settings.teacher_timeout_seconds,
        retry_seconds=settings.teacher_timeout_seconds,
    ) as teacher:
        card = teacher.describe()
        check_compatible(describe_model(loaded), card, settings.allow_mismatch)
        if settings.loss.top_k > card.limits.max_top_k:
            raise ConfigError(
                f"trainer.loss.top_k {settings.loss.top_k} exceeds what the teacher at "
                f"{settings.teacher} answers, {card.limits.max_top_k} (its teacher.max_top_k)"
            )
        limit = min(loaded.max_sequence_tokens, card.max_sequence_tokens)
        # Before the weights are sharded: the model itself says how many features an image has.
        prompts = _read(settings, loaded, limit)
        crew = Crew(world, _student(config, loaded, world), settings)
        try:
            code = _run(config, crew, prompts, teacher)
        except DETERMINISTIC:
            crew.end(UNUSABLE)
            raise
        crew.end(code)
        return code


def _run(config: TrainerConfig, crew: Crew, prompts: Prompts, teacher: TeacherClient) -> int:
    queue = RolloutQueue.open(config, "trainer")
    stop = threading.Event()
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda *_: stop.set())
    run = Run(config, crew, prompts, queue, teacher, stop)
    replace_text(config.run.dir / "config.yaml", as_yaml(config.resolved()))
    return 0 if run.run() else STOPPED


def _load(settings: TrainerSettings, device: str) -> LoadedModel:
    return load_model(settings.student, device=device, trust_remote_code=settings.trust_remote_code)


def _read(settings: TrainerSettings, loaded: LoadedModel, limit: int) -> Prompts:
    """All prompts that leave room for a response."""
    data = settings.data
    reward = load_reward(data.reward)
    train = read_prompts(data.train, loaded)
    check_answers(data.train, train, reward, required=settings.estimator.needs_rewards)
    train = _fitting("trainer.data.train", train, settings, limit)
    evaluation: list[Prompt] = []
    if data.evaluation is not None:
        evaluation = read_prompts(data.evaluation, loaded)
        check_answers(data.evaluation, evaluation, reward, required=True)
        evaluation = _fitting("trainer.data.evaluation", evaluation, settings, limit)
    return Prompts(train, evaluation, reward)


def _fitting(
    name: str, prompts: list[Prompt], settings: TrainerSettings, limit: int
) -> list[Prompt]:
    kept, dropped = fitting(name, prompts, settings.max_new_tokens, limit, settings.data.overlong)
    if dropped:
        logger.warning("%s: %d of %d prompts are too long, left out", name, dropped, len(prompts))
    return kept


def _student(config: TrainerConfig, loaded: LoadedModel, world: World) -> Student:
    settings = config.trainer
    return Student(
        loaded,
        settings.optimiser,
        settings.steps,
        scale=settings.scale,
        lora=settings.lora,
        world=world,
        seed=config.run.seed,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
