"""Is it ready? Each answers within about a second."""

from __future__ import annotations

import grpc
import redis

from preceptor.launch.errors import LaunchError
from preceptor.queue import QueueUnavailable, RolloutQueue
from preceptor.redis_connection import address_of

_PATIENCE_SECONDS = 1.0


def redis_answers(url: str) -> bool:
    """Whether a Redis answers PING, its append-only file loaded.

    Raises:
        LaunchError: it wants other credentials.
    """
    with redis.Redis.from_url(
        url, protocol=2, socket_timeout=_PATIENCE_SECONDS, socket_connect_timeout=_PATIENCE_SECONDS
    ) as client:
        try:
            return bool(client.ping())
        except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
            raise LaunchError(
                f"Redis at {address_of(client)} refused the credentials ({error}); check redis.url"
            ) from error
        except (redis.ConnectionError, redis.TimeoutError):
            return False


def teacher_serves(address: str) -> bool:
    """Whether the standard health service says SERVING."""
    # In the extra `teacher`, so there where a teacher is started.
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=_PATIENCE_SECONDS
            )
        except grpc.RpcError:
            # Not there yet, too busy loading, or the service not registered yet: all mean not
            # ready, and the launcher's patience has a limit.
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def worker_works(queue: RolloutQueue, name: str) -> bool:
    """Whether a rollout worker of this name lives and has loaded its model.

    A restarted worker counts as ready at once while its predecessor's last sign of life is fresh;
    no part waits for a worker.
    """
    try:
        beat = queue.heartbeats("rollout").get(name)
    except QueueUnavailable:
        return False
    return beat is not None and beat.get("state") != "loading"
