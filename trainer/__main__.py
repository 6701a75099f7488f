"""python -m trainer RUN.yaml [--trainer.steps 10 ...]

Exit codes: 0 the run is complete; 2 settings, data or a teacher that cannot be used (starting again
would end the same way); 143 asked to stop, resumable; 1 anything else, resumable.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from pathlib import Path

import torch
from pydantic import ValidationError
from transformers.utils.logging import disable_progress_bar

from modeling.card import describe_model
from modeling.compat import IncompatibleTeacher, check_compatible
from modeling.head import UnsupportedModel
from modeling.load import LoadedModel, ModelError, load_model
from preceptor.client import TeacherClient
from preceptor.config import ConfigError
from preceptor.lock import RunFolderBusy, run_folder_lock
from preceptor.manifest import replace_text
from preceptor.queue import RolloutQueue
from trainer.advantages import NonFinite, SmallBatch
from trainer.checkpoint import UnusableCheckpoint
from trainer.data import DataError, Prompt, check_lengths, read_prompts
from trainer.journal import JournalTooShort
from trainer.loop import NonFiniteRun, Prompts, Run
from trainer.rewards import number
from trainer.settings import DataSettings, TrainerConfig
from trainer.step import NothingToTrain
from trainer.student import Student
from trainer.tasks import TaskFailed

UNUSABLE = 2
STOPPED = 128 + signal.SIGTERM

# Starting again from the same settings, data and checkpoint would end the same way.
DETERMINISTIC = (
    ConfigError,
    ValidationError,
    DataError,
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
        return _train(config)
    except DETERMINISTIC as error:
        print(f"trainer: {error}", file=sys.stderr)
        return UNUSABLE


def _train(config: TrainerConfig) -> int:
    with run_folder_lock(config.run.dir, "trainer"):
        return _train_alone(config)


def _train_alone(config: TrainerConfig) -> int:
    settings = config.trainer
    if settings.threads:
        torch.set_num_threads(settings.threads)
    torch.manual_seed(config.run.seed)
    # Until there is something to save, these end us as they end any program.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    loaded = load_model(
        settings.student,
        dtype=settings.dtype,
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
    )
    prompts = _read(settings.data, loaded)
    with TeacherClient(
        settings.teacher,
        student=settings.student_name,
        timeout_seconds=settings.teacher_timeout_seconds,
        retry_seconds=settings.teacher_timeout_seconds,
    ) as teacher:
        card = teacher.describe()
        check_compatible(describe_model(loaded), card, settings.allow_mismatch)
        limit = min(loaded.max_sequence_tokens, card.max_sequence_tokens)
        check_lengths("trainer.data.train", prompts.train, settings.max_new_tokens, limit)
        check_lengths("trainer.data.evaluation", prompts.evaluation, settings.max_new_tokens, limit)
        student = Student(loaded, settings.optimiser, settings.steps)
        queue = RolloutQueue.open(config, "trainer")
        stop = threading.Event()
        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, lambda *_: stop.set())
        run = Run(config, student, prompts, queue, teacher, stop)
        replace_text(config.run.dir / "config.yaml", config.resolved())
        return 0 if run.run() else STOPPED


def _read(data: DataSettings, loaded: LoadedModel) -> Prompts:
    train = read_prompts(data.train, loaded)
    _check_answers(data.train, train)
    evaluation: list[Prompt] = []
    if data.evaluation is not None:
        evaluation = read_prompts(data.evaluation, loaded)
        _check_answers(data.evaluation, evaluation)
        ungraded = sum(prompt.answer is None for prompt in evaluation)
        if ungraded:
            raise DataError(f"{data.evaluation}: {ungraded} prompts have no answer to grade by")
    return Prompts(train, evaluation)


def _check_answers(path: Path, prompts: list[Prompt]) -> None:
    """Find out now, not at the first grading, that an answer cannot be graded."""
    for row, prompt in enumerate(prompts, start=1):
        if prompt.answer is None:
            continue
        try:
            number(prompt.answer)
        except ValueError as error:
            raise DataError(
                f"{path}, row {row}: answer {prompt.answer!r} is no finite number, which "
                "evaluation.reward: numeric compares"
            ) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
