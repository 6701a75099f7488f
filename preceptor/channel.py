"""Options of a gRPC channel to a teacher."""

from __future__ import annotations


def channel_options(max_message_bytes: int) -> list[tuple[str, int | str]]:
    """Explicit limits on both directions, keepalive, quick reconnection.

    gRPC's own defaults are 4 MiB for what is received and nothing for what is sent.
    """
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        # A host that vanished without a FIN is noticed while a call waits. Servers tolerate two
        # pings without data in between, so not more often than this.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 0),
        # A restarted teacher is found soon: gRPC would wait up to two minutes between attempts.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # A name with several addresses is several replicas; by default gRPC picks one and stays.
        ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
        # Retries are ours: one budget, and pushback honoured.
        ("grpc.enable_retries", 0),
    ]
