"""A rollout worker for the lease tests: `lease_worker.py URL CONSUMER HANDLER_SECONDS`."""

from __future__ import annotations

import sys
import time

from preceptor.queue import RolloutQueue, connect
from preceptor.v1 import queue_pb2

queue = RolloutQueue(connect(sys.argv[1]), "run", sys.argv[2], lease_seconds=1.0)
while True:
    for claim in queue.claim_tasks(1, 1.0):
        print("claimed", claim.message.id.slot, flush=True)
        with queue.leases([claim]):
            time.sleep(float(sys.argv[3]))
        message = claim.message
        queue.finish_task(claim, queue_pb2.RolloutGroup(id=message.id, kind=message.kind))
        print("finished", claim.message.id.slot, flush=True)
