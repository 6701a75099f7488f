"""A rollout worker that only lives."""

import sys
import time
from pathlib import Path

from preceptor.config import RunConfig
from preceptor.queue import RolloutQueue, connect

config = RunConfig.load(Path(sys.argv[1]))
name = config.rollout["name"]
queue = RolloutQueue(connect(config.redis.url), config.run.name, name)
while True:
    queue.beat("rollout", name, {"state": "idle"})
    time.sleep(0.2)
