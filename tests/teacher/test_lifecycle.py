"""Start, fullness, cancellation, and the end."""

from __future__ import annotations

import signal
import socket
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2

from preceptor.codec import prompt_group
from preceptor.v1 import teacher_pb2 as pb
from services.teacher.__main__ import main
from tests.teacher.teacher_process import run_service
from tests.tiny_models import make_llama

STATUS = health_pb2.HealthCheckResponse
GROUPS = 150
# Prompt and response tokens of `long_request`.
TOKENS = GROUPS * (20 + 2 * 20)


def long_request():
    """Seconds of work in batches of 64 tokens: a batch per group."""
    groups = [prompt_group(str(n), [5] * 20, [[6] * 20, [7] * 20]) for n in range(GROUPS)]
    return pb.ScoreRequest(groups=groups)


def short_request():
    return pb.ScoreRequest(groups=[prompt_group("g", [5], [[6]])])


@pytest.mark.pitfall("G10")
@pytest.mark.pitfall("G4")
def test_a_full_backlog_refuses_and_a_cancelled_call_makes_room(llama_folder, tmp_path):
    limits = ["--teacher.max_batch_tokens", "64", "--teacher.max_queued_tokens", str(TOKENS)]
    with run_service(llama_folder, tmp_path, *limits) as service:
        stream = service.stub.ScoreStream(long_request(), timeout=60)
        next(stream)
        with pytest.raises(grpc.RpcError) as caught:
            service.stub.Score(long_request(), timeout=60)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "teacher.max_queued_tokens" in caught.value.details()
        trailer = dict(caught.value.trailing_metadata())
        assert int(trailer["grpc-retry-pushback-ms"]) > 0
        assert service.health() == STATUS.SERVING
        stream.cancel()
        # What was cancelled leaves the queue; a call of full size fits again, well before the
        # cancelled one would have ended.
        deadline = time.monotonic() + 30
        while True:
            again = service.stub.ScoreStream(long_request(), timeout=60)
            try:
                next(again)
                break
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                assert time.monotonic() < deadline
                time.sleep(0.02)
        again.cancel()
        # A call that can never fit is told so, without the trailer that invites a retry.
        request = long_request()
        request.groups.add().CopyFrom(prompt_group("more", [5], [[6]]))
        with pytest.raises(grpc.RpcError) as caught:
            service.stub.Score(request, timeout=60)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "grpc-retry-pushback-ms" not in dict(caught.value.trailing_metadata() or ())


@pytest.mark.pitfall("G7")
def test_sigterm_drains(llama_folder, tmp_path):
    with run_service(llama_folder, tmp_path, "--teacher.max_batch_tokens", "64") as service:
        streams = [service.stub.ScoreStream(long_request(), timeout=60) for _ in range(3)]
        for stream in streams:
            next(stream)
        service.process.send_signal(signal.SIGTERM)
        counts = [0, 0, 0]

        def finish(index):
            counts[index] = 1 + sum(1 for _ in streams[index])

        threads = [threading.Thread(target=finish, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 10
        while service.health() != STATUS.NOT_SERVING:
            assert time.monotonic() < deadline
        with pytest.raises(grpc.RpcError) as caught:
            service.stub.Score(short_request(), timeout=10)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        for thread in threads:
            thread.join(60)
        assert counts == [GROUPS] * 3
        assert service.process.wait(20) == 0


def test_oversize_messages_are_refused_in_our_words(llama_folder, tmp_path):
    limits = ["--teacher.max_message_bytes", str(2**16)]
    with run_service(llama_folder, tmp_path, *limits) as service:
        request = short_request()
        request.groups[0].trajectories[0].trajectory_id = "x" * 2**16
        for call in (lambda: service.stub.Score(request), lambda: service.stub.Score(many())):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert "teacher.max_message_bytes" in caught.value.details()
        assert service.stub.Score(short_request(), timeout=10).groups
        # A stream may hold more than a message, though not without bound.
        assert len(list(service.stub.ScoreStream(many(), timeout=10))) == 20
        with pytest.raises(grpc.RpcError) as caught:
            list(service.stub.ScoreStream(many(60), timeout=10))
        assert "limit is 1048576 (16 x teacher.max_message_bytes)" in caught.value.details()


def many(count=20):
    """A small request with a large reply."""
    groups = [prompt_group(str(n), [5], [[6] * 50]) for n in range(count)]
    return pb.ScoreRequest(groups=groups, options=pb.ScoreOptions(top_k=64))


def test_a_taken_port_is_an_error(caplog):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["--teacher.model", "m", "--teacher.port", port]) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in caplog.text


def test_told_to_stop_while_loading(tmp_path):
    folder = make_llama(tmp_path / "model", hidden_size=512, num_hidden_layers=8)
    with run_service(folder, tmp_path, wait=False) as service:
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(30) == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    (
        (["--teacher.model", "MISSING"], "safetensors"),
        (["--teacher.model", "/nope"], "model /nope: there is no such folder"),
        (["--teacher.model", "no hub id!"], "hub does not give it"),
        (["--teacher.model", "m", "--teacher.max_top_k", "-1"], "max_top_k"),
        (["no-such.yaml"], "no-such.yaml"),
    ),
)
def test_settings_that_cannot_work_end_the_process_with_the_reason(
    tmp_path, caplog, arguments, reason
):
    arguments = [str(tmp_path) if one == "MISSING" else one for one in arguments]
    assert main([*arguments, "--teacher.port", "0"]) == 2
    assert reason in caplog.text


def test_health_answers_while_the_model_loads(tmp_path):
    """The port is open and health says NOT_SERVING until a score succeeded."""
    folder = make_llama(tmp_path / "model", hidden_size=512, num_hidden_layers=8)
    with run_service(folder, tmp_path, wait=False) as service:
        assert service.health() == STATUS.NOT_SERVING
        with pytest.raises(grpc.RpcError) as caught:
            service.stub.Describe(pb.DescribeRequest(), timeout=10)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        service.wait_until_serving()
        assert service.stub.Describe(pb.DescribeRequest(), timeout=10).card.identity
