"""Both clients against a scripted teacher over real gRPC: order, retries, limits, identity."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from preceptor.client import AsyncTeacherClient, TeacherClient
from preceptor.codec import CodecError, Score, TeacherRefusal, encode_ids, prompt_group
from preceptor.embedded_redis import free_port
from preceptor.retry_budget import PUSHBACK
from preceptor.teacher_errors import (
    MessageTooLarge,
    TeacherChanged,
    TeacherError,
    TeacherRejected,
    TeacherReplyInvalid,
    TeacherTimeout,
    TeacherUnavailable,
)
from preceptor.v1 import teacher_pb2
from tests.client import scripted_teacher
from tests.client.scripted_teacher import REFUSED_ID, Failure, ScriptedTeacher, score_group, serving

AWAY = Failure(grpc.StatusCode.UNAVAILABLE)


def full(milliseconds: str) -> Failure:
    return Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", ((PUSHBACK, milliseconds),))


class InOneLoop:
    """The asyncio client with the sync one's face, so that one set of tests serves both."""

    def __init__(self, address: str, **settings) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncTeacherClient(address, **settings)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    def __getattr__(self, name: str):
        return lambda *a, **k: self._runner.run(getattr(self._client, name)(*a, **k))


@pytest.fixture(params=[TeacherClient, InOneLoop], ids=["sync", "asyncio"])
def connect(request) -> Callable:
    return lambda address, **settings: request.param(
        address, student="s", **{"retry_seconds": 20.0, "timeout_seconds": 20.0, **settings}
    )


@pytest.fixture
def teacher() -> ScriptedTeacher:
    return ScriptedTeacher()


@pytest.fixture
def address(teacher: ScriptedTeacher) -> Iterator[str]:
    with serving(teacher) as where:
        yield where


def make_groups(count: int, tokens: int = 4) -> list[teacher_pb2.PromptGroup]:
    draw = np.random.default_rng(count)
    return [
        prompt_group(f"g{i}", [1, 2, i], [draw.integers(0, 90, tokens) for _ in range(3)])
        for i in range(count)
    ]


def answers(groups, top_k: int = 0, temperature: float | None = None):
    options = teacher_pb2.ScoreOptions(top_k=top_k, temperature=temperature)
    return [score_group(group, options, scripted_teacher.IDENTITY) for group in groups]


def test_results_come_in_the_order_of_the_groups(connect, teacher, address):
    teacher.backwards = True
    groups, heard = make_groups(9), []
    with connect(address, request_tokens=40) as client:
        results = client.score(groups, top_k=2, temperature=0.5, on_result=heard.append)
    assert results == answers(groups, 2, 0.5)
    assert len(teacher.requests) > 3
    assert sorted(result.group_id for result in heard) == [group.group_id for group in groups]
    assert {request.student for request in teacher.requests} == {"s"}


def test_a_group_cut_in_pieces_is_scored_as_if_whole(connect, teacher, address):
    groups = make_groups(3, tokens=20)
    with connect(address, request_tokens=25) as client:
        assert client.score(groups) == answers(groups)
    assert len(teacher.requests) == 9


def test_suppressed_ids_are_sent_in_one_form_and_checked(connect, teacher, address):
    with connect(address, request_tokens=40) as client:
        results = client.score(make_groups(3), suppressed_ids=[7, 3, 7])
        assert {one.suppressed_ids for one in results} == {encode_ids([3, 7])}
        assert {one.options.suppressed_ids for one in teacher.requests} == {encode_ids([3, 7])}
        client.scores(make_groups(1), suppressed_ids=np.array([5]))
        assert teacher.requests[-1].options.suppressed_ids == encode_ids([5])
        with pytest.raises(CodecError, match="dimension"):
            client.scores(make_groups(1), suppressed_ids=3)


@pytest.mark.pitfall("L5")
@pytest.mark.parametrize(
    ("applied", "words"),
    [
        ({"temperature": 1.0}, "temperature 1.0, asked for 0.5"),
        ({"top_k": 1}, "top_k 1, asked for 2"),
        ({"suppressed_ids": b""}, r"suppressed_ids \[\], asked for \[3\]"),
    ],
)
def test_a_teacher_that_applies_other_options_is_not_believed(
    connect, teacher, address, applied, words
):
    teacher.applied = applied
    with connect(address) as client, pytest.raises(TeacherReplyInvalid, match=words):
        client.score(make_groups(1), temperature=0.5, top_k=2, suppressed_ids=[3])


def test_no_groups_no_call(connect, teacher, address):
    with connect(address) as client:
        assert client.score([]) == []
    assert teacher.requests == []


def test_scores_are_numbers_and_refusals_pass_through(connect, teacher, address):
    group = prompt_group("g", [1], [[3, 9], [REFUSED_ID], [0]])
    with connect(address) as client:
        [[first, refused, last]] = client.scores([group], top_k=3)
    assert isinstance(first, Score) and isinstance(refused, TeacherRefusal)
    np.testing.assert_allclose(first.logprobs, [-0.004, -0.010])
    assert first.top_ids.tolist() == [[0, 1, 2], [0, 1, 2]]
    np.testing.assert_allclose(last.logprobs, [-0.001])


@pytest.mark.pitfall("L6")
def test_a_logprob_list_shorter_than_the_ids_rejects(connect, teacher, address, monkeypatch):
    monkeypatch.setattr(scripted_teacher, "logprobs_of", lambda ids: b"\0\0\0\xbf")
    with connect(address) as client, pytest.raises(CodecError, match="1 logprobs for 2 tokens"):
        client.scores([prompt_group("g", [1], [[3, 9]])])


def test_what_is_away_is_tried_again(connect, teacher, address, caplog):
    teacher.failures = [AWAY, AWAY, AWAY]
    with connect(address) as client:
        client.describe()
        teacher.failures = [AWAY, AWAY]
        assert client.score(make_groups(2)) == answers(make_groups(2))
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 2


def test_what_had_arrived_is_not_asked_for_again(connect, teacher, address):
    teacher.failures = [Failure(grpc.StatusCode.UNAVAILABLE, after=3)]
    groups = make_groups(5)
    with connect(address) as client:
        assert client.score(groups) == answers(groups)
    assert [group.group_id for group in teacher.requests[1].groups] == ["g3", "g4"]


def test_a_full_teacher_is_tried_again_when_it_says(connect, teacher, address):
    teacher.failures = [full("400")]
    start = time.monotonic()
    with connect(address) as client:
        client.score(make_groups(1))
    assert time.monotonic() - start >= 0.4
    assert len(teacher.requests) == 2


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (Failure(grpc.StatusCode.RESOURCE_EXHAUSTED), TeacherRejected),
        (full("-1"), TeacherUnavailable),
        (full("soon"), TeacherUnavailable),
        (full("60000"), TeacherUnavailable),
        (Failure(grpc.StatusCode.INVALID_ARGUMENT), TeacherRejected),
        (Failure(grpc.StatusCode.FAILED_PRECONDITION), TeacherRejected),
        (Failure(grpc.StatusCode.DEADLINE_EXCEEDED), TeacherTimeout),
        (Failure(grpc.StatusCode.INTERNAL), TeacherError),
    ],
)
def test_everything_else_is_not_tried_again(connect, teacher, address, failure, error):
    teacher.failures = [failure]
    with connect(address) as client, pytest.raises(error, match=address):
        client.score(make_groups(1))
    assert len(teacher.requests) == 1


def test_deadlines_are_kept_and_not_repeated(connect, teacher, address):
    teacher.seconds_per_group = 1.0
    with connect(address) as client, pytest.raises(TeacherTimeout, match="timeout_seconds"):
        client.score(make_groups(1), timeout_seconds=0.2)
    assert len(teacher.requests) == 1


def test_nobody_there_is_an_error_within_the_budget(connect):
    with (
        connect("127.0.0.1:1", retry_seconds=0.5) as client,
        pytest.raises(TeacherUnavailable, match=r"127.0.0.1:1 .*0.5 s.*retry_seconds"),
    ):
        client.describe()


def test_another_teacher_is_noticed(connect, teacher, address):
    with connect(address) as client:
        assert client.describe().identity == "scripted"
        client.score(make_groups(1))
        assert teacher.requests[-1].expected_identity == "scripted"
        teacher.identity = "other"
        with pytest.raises(TeacherChanged, match="this is other"):
            client.score(make_groups(1))
        with pytest.raises(TeacherChanged, match=r"'other'.*'scripted'"):
            client.describe()


def test_a_teacher_that_changes_between_replies_is_noticed(connect, teacher, address):
    with connect(address) as client:
        client.score(make_groups(1))
        with pytest.MonkeyPatch.context() as patch:
            honest = scripted_teacher.score_group
            patch.setattr(scripted_teacher, "score_group", lambda g, o, _: honest(g, o, "other"))
            with pytest.raises(TeacherChanged):
                client.score(make_groups(1))


def test_a_reply_without_a_group_is_refused(connect, teacher, address, monkeypatch):
    def rename(group, options, identity):
        result = score_group(group, options, identity)
        result.group_id = "g0"
        return result

    monkeypatch.setattr(scripted_teacher, "score_group", rename)
    with connect(address) as client, pytest.raises(TeacherReplyInvalid, match=r"'g0'.*twice"):
        client.score(make_groups(2))


@pytest.mark.pitfall("G1")
def test_messages_above_grpcs_4_mib_work(connect, teacher, address):
    long = np.arange(1_500_000) % 90
    group = prompt_group("g", [1], [long])
    with connect(address) as client:
        [[score]] = client.scores([group])
    assert teacher.requests[0].ByteSize() > 5 * 2**20
    assert score.logprobs.nbytes > 5 * 2**20
    np.testing.assert_allclose(score.logprobs, -(long + 1) / 1000, rtol=1e-6)


@pytest.mark.pitfall("G1")
def test_above_our_limit_our_message_names_it(connect, teacher, address):
    group = prompt_group("g", [1], [np.zeros(300_000, int)])
    with (
        connect(address, max_message_bytes=2**20) as client,
        pytest.raises(MessageTooLarge, match=r"limit is 1048576.*max_message_bytes"),
    ):
        client.score([group])
    assert teacher.requests == []


@pytest.mark.pitfall("G1")
def test_the_teachers_lower_limit_counts(connect, teacher, address):
    teacher.max_message_bytes = 2**19
    with connect(address) as client:
        client.describe()
        with pytest.raises(MessageTooLarge, match="limit is 524288"):
            client.score([prompt_group("g", [1], [np.zeros(300_000, int)])])


def test_a_killed_teacher_that_comes_back_is_survived(connect):
    port, groups = free_port(), make_groups(12)
    processes = [start_process(port)]
    arrived, restarter = [], threading.Thread(target=lambda: processes.append(start_process(port)))

    def kill_once(result: teacher_pb2.GroupResult) -> None:
        arrived.append(result.group_id)
        if len(arrived) == 3:
            processes[0].kill()
            processes[0].wait()
            restarter.start()

    try:
        with connect(f"127.0.0.1:{port}", retry_seconds=30.0) as client:
            client.describe()
            assert client.score(groups, on_result=kill_once) == answers(groups)
        assert len(arrived) == 12
        restarter.join()
    finally:
        for process in processes:
            process.kill()
            process.wait()


def start_process(port: int) -> subprocess.Popen:
    command = [sys.executable, scripted_teacher.__file__, str(port), "0.05"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    return process


@pytest.mark.pitfall("G5")
def test_a_process_with_an_open_channel_can_fork():
    """In a process of its own: the fork is then as it is in a trainer with data workers."""
    script = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from preceptor.client import TeacherClient
from test_client import make_groups, answers
client = TeacherClient(sys.argv[1], student="s", timeout_seconds=10)
assert client.score(make_groups(1)) == answers(make_groups(1))
children = []
for uses_it in (False, True):
    if (child := os.fork()) == 0:
        if uses_it:
            assert client.score(make_groups(2)) == answers(make_groups(2))
        os._exit(0)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
assert client.score(make_groups(3)) == answers(make_groups(3))
client.close()
"""
    port = free_port()
    server = start_process(port)
    try:
        subprocess.run(
            [sys.executable, "-c", script, f"127.0.0.1:{port}"],
            check=True,
            timeout=60,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "GRPC_VERBOSITY": "ERROR"},
        )
    finally:
        server.kill()
        server.wait()


def test_the_client_needs_no_torch():
    code = "import preceptor.client, preceptor.queue, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
