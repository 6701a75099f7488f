"""A trainer that only writes metrics, one step each 0.1 s, and says what it was told.

It ends after its steps, or when the run folder holds a file named `finish`.
"""

import json
import sys
import time
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from preceptor.config import RunConfig
from preceptor.queue import connect

config = RunConfig.load(Path(sys.argv[1]))
if config.trainer.get("student_name") == "mismatched":
    print("student and teacher have different tokenizers")
    sys.exit(2)
# What the launcher promises a trainer: both answer.
connect(config.redis.url).ping()
with grpc.insecure_channel(config.trainer["teacher"]) as channel:
    health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
steps = int(config.trainer["steps"])
print(json.dumps(config.trainer))
with (config.run.dir / "metrics.jsonl").open("a") as metrics:
    for step in range(steps):
        if (config.run.dir / "finish").exists():
            break
        time.sleep(0.1)
        row = {"event": "step", "step": step, "steps": steps, "raw_kl": 0.5, "step_s": 0.1}
        print(json.dumps(row), file=metrics, flush=True)
