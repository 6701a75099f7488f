"""python -m services.rollout RUN.yaml [--rollout.name w0 ...]"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

import torch
from transformers.utils.logging import disable_progress_bar

from modeling.head import UnsupportedModel
from modeling.load import ModelError, load_model
from modeling.sharing import check_sharing
from preceptor.config_errors import ConfigError
from preceptor.policy import PolicyStore
from preceptor.queue import RolloutQueue
from services.rollout.heartbeat import Heartbeat, Status
from services.rollout.held_policy import HeldPolicy
from services.rollout.settings import RolloutConfig
from services.rollout.worker import Worker

logger = logging.getLogger("services.rollout")

UNUSABLE = 2


def main(arguments: list[str]) -> int:
    """Run a worker until SIGTERM or SIGINT.

    Returns:
        The exit status: 0 after a signal; 2 for settings or a model that cannot be used, where
        starting again would end the same way.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    disable_progress_bar()
    # Without a file, the environment and the command line say everything.
    named = bool(arguments) and not arguments[0].startswith("-")
    path = Path(arguments[0]) if named else None
    try:
        config = RolloutConfig.load(path, arguments[1:] if named else arguments)
        stop = threading.Event()
        _stop_on_signals(stop, config.rollout.stop_seconds)
        run(config, stop)
    except (ConfigError, ModelError, UnsupportedModel) as error:
        print(f"rollout: {error}", file=sys.stderr)
        return UNUSABLE
    logger.info("stopped")
    return 0


def run(config: RolloutConfig, stop: threading.Event) -> None:
    """Serve the run's tasks until `stop` is set.

    Raises:
        modeling.load.ModelError, OSError: the student cannot be loaded, is not the one whose
            weights the trainer publishes, or gives other logprobs with them than the trainer.
        modeling.head.UnsupportedModel: it cannot be sampled from by this engine.
        preceptor.queue.QueueError: Redis stays away, or is full.
    """
    settings = config.rollout
    if settings.threads:
        torch.set_num_threads(settings.threads)
    queue = RolloutQueue.open(config, settings.name)
    status = Status()
    with Heartbeat(queue, status):
        loaded = load_model(
            settings.model,
            revision=settings.revision,
            dtype=settings.dtype,
            device=settings.device,
            trust_remote_code=settings.trust_remote_code,
        )
        if not check_sharing(loaded):
            raise UnsupportedModel(
                f"{settings.model}: the torch engine repeats a prompt's cache for its samples, "
                "which this architecture does not admit (see the warning above)"
            )
        policy = HeldPolicy(loaded, PolicyStore(config.run.dir / "policies"))
        logger.info("worker %s is ready with %s", settings.name, settings.model)
        Worker(settings, loaded, queue, policy, status, stop).run()


def _stop_on_signals(stop: threading.Event, grace_seconds: float) -> None:
    """SIGTERM and SIGINT set `stop`, and end the process `grace_seconds` later at the latest."""

    def leave() -> None:
        logger.warning(
            "still busy %g s after the signal (rollout.stop_seconds); leaving, leases run out",
            grace_seconds,
        )
        os._exit(0)

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()
        timer = threading.Timer(grace_seconds, leave)
        timer.daemon = True
        timer.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
