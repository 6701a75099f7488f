"""Against the real service in another process."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
import torch
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from modeling.card import describe_model
from modeling.compat import check_compatible
from modeling.groups import TokenGroup
from modeling.load import load_model
from modeling.shared_prefix import group_logprobs, plain_logprobs
from preceptor.client import TeacherClient
from preceptor.codec import TeacherRefusal, encode_id_table, encode_ids, prompt_group, read_group
from preceptor.v1 import teacher_pb2 as pb
from tests.tiny_models import EOS, IMAGE, THINK_END, draw_image

TIMEOUT = 60


def random_groups(count, seed=0, prompt=(1, 30), response=(1, 30), samples=(1, 5)):
    random = np.random.default_rng(seed)
    return [
        prompt_group(
            f"g{index}",
            random.integers(5, 96, random.integers(*prompt)),
            [
                random.integers(5, 96, random.integers(*response))
                for _ in range(random.integers(*samples))
            ],
        )
        for index in range(count)
    ]


def score(service, groups, **options):
    request = pb.ScoreRequest(student="test", groups=groups, options=pb.ScoreOptions(**options))
    return service.stub.Score(request, timeout=TIMEOUT).groups


def scores_by_id(groups, results):
    """(group, trajectory) -> logprobs of what was scored."""
    return {
        (group.group_id, trajectory.trajectory_id): one.logprobs
        for group, result in zip(groups, results, strict=True)
        for trajectory, one in zip(group.trajectories, read_group(group, result), strict=True)
    }


def status_of(call):
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def test_the_card_introduces_the_teacher(teacher, llama_folder):
    card = teacher.stub.Describe(pb.DescribeRequest()).card
    assert card.limits.max_batch_tokens == 600 and card.shares_prompts
    assert (card.engine, card.embedding_rows, card.max_sequence_tokens) == ("torch", 96, 128)
    student = describe_model(load_model(llama_folder))
    assert student.identity == card.identity
    check_compatible(student, card)


@pytest.mark.pitfall("L1")
def test_a_teacher_that_is_the_student_finds_no_difference(teacher, llama_folder):
    student = load_model(llama_folder)
    groups = random_groups(12, seed=1)
    for group, result in zip(groups, score(teacher, groups), strict=True):
        ids = np.frombuffer(group.prompt.token_ids, "<i4")
        responses = tuple(np.frombuffer(one.response_ids, "<i4") for one in group.trajectories)
        (own,) = plain_logprobs(student, [TokenGroup(ids, responses)])
        for ours, theirs in zip(own, read_group(group, result), strict=True):
            assert np.abs(theirs.logprobs - ours.detach().numpy()).max() < 1e-4


@pytest.mark.pitfall("L1")
@pytest.mark.parametrize("shares", (True, False))
def test_a_vision_teacher_that_is_the_student_finds_no_difference(
    vision_teacher, llava_folder, shares
):
    """The student's distribution has no image placeholder; then the teacher's must not either."""
    student = load_model(llava_folder)
    own_logprobs = group_logprobs if shares else plain_logprobs
    random = np.random.default_rng(7)
    prompt = [1, *[IMAGE] * 4, 7, 8]
    groups = [
        prompt_group(
            f"g{seed}",
            prompt,
            [random.integers(5, 96, length) for length in (1, 9, 20)],
            [draw_image(seed)],
        )
        for seed in range(4)
    ]
    with TeacherClient(vision_teacher.address, student="test") as client:
        alike = client.scores(groups, suppressed_ids=[IMAGE])
        unlike = client.scores(groups)
    far = 0.0
    for seed, group in enumerate(groups):
        responses = tuple(np.frombuffer(one.response_ids, "<i4") for one in group.trajectories)
        tokens = TokenGroup(np.array(prompt), responses, (draw_image(seed),))
        with torch.no_grad():
            (own,) = own_logprobs(student, [tokens], suppressed_ids=[IMAGE])
        for ours, near, other in zip(own, alike[seed], unlike[seed], strict=True):
            assert np.abs(near.logprobs - ours.numpy()).max() < 1e-4
            far = max(far, np.abs(other.logprobs - ours.numpy()).max())
    assert far > 1e-3


def test_suppressed_ids_are_echoed_and_impossible(teacher):
    group = prompt_group("g", [5, 6, 7], [[8, 9]])
    group.trajectories[0].named_ids = encode_id_table([[8, 20], [9, 20]])
    (result,) = score(teacher, [group], suppressed_ids=encode_ids([20, 9, 9]), top_k=64)
    assert result.suppressed_ids == encode_ids([9, 20])
    (scored,) = read_group(group, result)
    assert np.isfinite(scored.logprobs).tolist() == [True, False]
    assert np.isfinite(scored.named_logprobs).tolist() == [[True, False], [False, False]]
    assert not np.isin(scored.top_ids, (9, 20)).any()
    code, details = status_of(lambda: score(teacher, [group], suppressed_ids=encode_ids([96])))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "suppressed_ids" in details


def test_splits_and_shuffles_change_nothing(teacher):
    """200 random splits and shuffles of a batch; the batch budget is small, so the teacher splits
    it again in its own ways."""
    groups = random_groups(8, seed=2)
    whole = scores_by_id(groups, score(teacher, groups))
    random = np.random.default_rng(0)
    for _ in range(200):
        pieces = []
        for group in groups:
            order = random.permutation(len(group.trajectories))
            cut = random.integers(0, len(order) + 1)
            for name, part in (("a", order[:cut]), ("b", order[cut:])):
                if len(part):
                    piece = pb.PromptGroup(group_id=f"{group.group_id}/{name}", prompt=group.prompt)
                    piece.trajectories.extend(group.trajectories[index] for index in part)
                    pieces.append(piece)
        pieces = [pieces[index] for index in random.permutation(len(pieces))]
        cut = random.integers(1, len(pieces))
        for request in (pieces[:cut], pieces[cut:]):
            for (name, trajectory), values in scores_by_id(
                request, score(teacher, request)
            ).items():
                wanted = whole[name.split("/")[0], trajectory]
                assert np.abs(values - wanted).max() < 1e-4


def test_the_client_cuts_requests_and_nothing_changes(teacher):
    groups = random_groups(10, seed=6)
    wanted = scores_by_id(groups, score(teacher, groups))
    with TeacherClient(teacher.address, student="test", request_tokens=60) as client:
        assert client.describe().embedding_rows == 96
        for group, found in zip(groups, client.scores(groups), strict=True):
            for trajectory, one in zip(group.trajectories, found, strict=True):
                values = wanted[group.group_id, trajectory.trajectory_id]
                np.testing.assert_allclose(one.logprobs, values, atol=1e-4)


def test_the_stream_gives_the_same(teacher):
    groups = random_groups(6, seed=3)
    groups[2].trajectories[0].response_ids = b""
    results = {
        one.group_id: one
        for one in teacher.stub.ScoreStream(pb.ScoreRequest(groups=groups), timeout=TIMEOUT)
    }
    for group, wanted in zip(groups, score(teacher, groups), strict=True):
        for one, other in zip(
            results[group.group_id].trajectories, wanted.trajectories, strict=True
        ):
            assert one.status == other.status
            values = (np.frombuffer(part.logprobs, "<f4") for part in (one, other))
            np.testing.assert_allclose(*values, atol=1e-4)


@pytest.mark.pitfall("L2")
@pytest.mark.pitfall("L9")
@pytest.mark.pitfall("G9")
def test_bad_items_fail_alone_with_a_clear_message(teacher):
    """The matrix in one call: every bad item is refused by name, the good ones are served."""
    long = [5] * 120
    groups = [
        prompt_group("good", [1], [[5]]),
        prompt_group("items", [5, 6], [[7, 95], [8], [9], [10], [11], [12]]),
        prompt_group("too-long", long, [[5] * 8, [5] * 9]),
        prompt_group("no-prompt", [1], [[5], [6]]),
        prompt_group("image", [1], [[5]], images=[draw_image(0)]),
    ]
    bad = groups[1].trajectories
    bad[1].response_ids = b""
    bad[2].response_ids = np.array([-1], "<i4").tobytes()
    bad[3].response_ids = np.array([96], "<i4").tobytes()
    bad[4].response_ids = b"123"
    bad[5].loss_mask = b"\1\1"
    groups[3].prompt.token_ids = b""
    results = [
        read_group(group, result)
        for group, result in zip(groups, score(teacher, groups), strict=True)
    ]
    found = [
        [
            pb.Refusal.Name(one.refusal)[8:]
            if isinstance(one, TeacherRefusal)
            else len(one.logprobs)
            for one in result
        ]
        for result in results
    ]
    assert found == [
        [1],
        [2, "EMPTY_RESPONSE", "ID_OUT_OF_RANGE", "ID_OUT_OF_RANGE", *["MALFORMED_ARRAY"] * 2],
        [8, "TOO_LONG"],
        ["EMPTY_PROMPT"] * 2,
        ["IMAGES_NOT_SUPPORTED"],
    ]
    assert "make 129, the model takes 128" in str(results[2][1])
    assert len(score(teacher, groups[:1])[0].trajectories[0].logprobs) == 4


@pytest.mark.pitfall("G9")
@pytest.mark.pitfall("L15")
def test_bad_images_fail_alone(vision_teacher):
    image = draw_image(1)
    four = [1, *[IMAGE] * 4, 7]
    groups = [
        prompt_group("good", four, [[8, 9], [IMAGE, 9], [8, 9]], images=[image]),
        prompt_group("three", four[:4], [[8]], images=[image]),
        prompt_group("no-image", four, [[8]]),
        prompt_group("two-images", four, [[8]], images=[image, image]),
        prompt_group("broken", four, [[8]], images=[image[:-100]]),
        prompt_group("huge", four, [[8]], images=[draw_image(2, side=101)]),
        prompt_group("heavy", four, [[8]], images=[draw_image(2, side=120)]),
        prompt_group("hash", four, [[8]], images=[image]),
        prompt_group("text", [1, 7], [[8]]),
    ]
    groups[7].prompt.images[0].sha256 = bytes(32)
    results = {
        group.group_id: read_group(group, result)
        for group, result in zip(groups, score(vision_teacher, groups), strict=True)
    }
    first, wrote_placeholder, third = results["good"]
    np.testing.assert_allclose(first.logprobs, third.logprobs, atol=1e-5)
    assert wrote_placeholder.refusal == pb.REFUSAL_PLACEHOLDER_IN_RESPONSE
    refusals = {
        name: result[0].refusal for name, result in results.items() if name not in ("good", "text")
    }
    assert refusals == {
        "three": pb.REFUSAL_PLACEHOLDER_COUNT,
        "no-image": pb.REFUSAL_PLACEHOLDER_COUNT,
        "two-images": pb.REFUSAL_PLACEHOLDER_COUNT,
        "broken": pb.REFUSAL_IMAGE_UNREADABLE,
        "huge": pb.REFUSAL_IMAGE_TOO_LARGE,
        "heavy": pb.REFUSAL_IMAGE_TOO_LARGE,
        "hash": pb.REFUSAL_IMAGE_HASH_MISMATCH,
    }
    assert len(results["text"][0].logprobs) == 1
    assert "3 image placeholders" in str(results["three"][0])


def test_the_pixels_of_a_request_are_bounded(vision_teacher):
    prompt, image = [1, *[IMAGE] * 4, 7], draw_image(1)
    groups = [prompt_group(str(index), prompt, [[8]], [image]) for index in range(27)]
    refused = [result.trajectories[0] for result in score(vision_teacher, groups)][25:]
    # 25 x 784 = 19,600 pixels fit into 20,000.
    assert [one.refusal for one in refused] == [pb.REFUSAL_IMAGE_TOO_LARGE] * 2
    assert "make 20384" in refused[0].message
    assert "20000 (teacher.max_request_pixels)" in refused[0].message
    assert all(one.trajectories[0].logprobs for one in score(vision_teacher, groups[:25]))


def test_images_count(vision_teacher, llava_folder):
    """The image changes the score, and the service agrees with the model in this process."""
    prompt = [1, *[IMAGE] * 4, 7]
    groups = [prompt_group(str(seed), prompt, [[8, 9, 2]], [draw_image(seed)]) for seed in (1, 2)]
    one, two = (scores.trajectories[0].logprobs for scores in score(vision_teacher, groups))
    assert one != two
    loaded = load_model(llava_folder)
    ((own,),) = plain_logprobs(
        loaded, [TokenGroup(np.array(prompt), (np.array([8, 9, 2]),), (draw_image(1),))]
    )
    np.testing.assert_allclose(np.frombuffer(one, "<f4"), own.detach().numpy(), atol=1e-4)


@pytest.mark.pitfall("L5")
def test_temperature_is_applied_and_echoed(teacher, llama_folder):
    group = prompt_group("g", [5, 6, 7], [[8, 9]])
    (result,) = score(teacher, [group], temperature=2.0, top_k=3)
    assert (result.temperature, result.top_k) == (2.0, 3)
    (cold,) = score(teacher, [group])
    assert (cold.temperature, cold.top_k) == (1.0, 0)
    loaded = load_model(llama_folder)
    ((own,),) = plain_logprobs(
        loaded, [TokenGroup(np.array([5, 6, 7]), (np.array([8, 9]),))], temperature=2.0
    )
    (scored,) = read_group(group, result)
    np.testing.assert_allclose(scored.logprobs, own.detach().numpy(), atol=1e-4)
    assert scored.top_ids.shape == (2, 3)
    for bad in ({"temperature": 0}, {"temperature": -1}, {"temperature": float("nan")}):
        code, details = status_of(lambda bad=bad: score(teacher, [group], **bad))
        assert code == grpc.StatusCode.INVALID_ARGUMENT and "temperature" in details
    code, details = status_of(lambda: score(teacher, [group], top_k=65))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "teacher.max_top_k" in details


def test_named_ids_come_with_their_logprobs(teacher):
    group = prompt_group("g", [5, 6, 7], [[8, 9], [10]])
    group.trajectories[0].named_ids = encode_ids([8, 20, 9, 21])
    first, second = read_group(group, score(teacher, [group])[0])
    assert first.named_logprobs.shape == (2, 2)
    np.testing.assert_allclose(first.named_logprobs[:, 0], first.logprobs, atol=1e-6)
    assert second.named_logprobs.shape == (1, 0)


@pytest.mark.pitfall("L10")
def test_ids_that_text_would_change_are_scored_as_sent(teacher, llama_folder):
    response = [THINK_END, 70, 71, EOS, 5, 5]
    group = prompt_group("g", [1, 40], [response])
    (scored,) = read_group(group, score(teacher, [group])[0])
    ((own,),) = plain_logprobs(
        load_model(llama_folder), [TokenGroup(np.array([1, 40]), (np.array(response),))]
    )
    np.testing.assert_allclose(scored.logprobs, own.detach().numpy(), atol=1e-4)


def test_a_teacher_prompt_is_what_the_teacher_sees(teacher):
    plain = prompt_group("g", [5, 6], [[7, 8]])
    other = prompt_group("h", [50, 51, 52], [[7, 8]])
    privileged = prompt_group("p", [5, 6], [[7, 8]])
    privileged.teacher_prompt.CopyFrom(other.prompt)
    one, two, three = (
        np.frombuffer(result.trajectories[0].logprobs, "<f4")
        for result in score(teacher, [plain, other, privileged])
    )
    np.testing.assert_allclose(two, three, atol=1e-5)
    assert np.abs(one - three).max() > 1e-3


def test_another_teacher_than_expected(teacher):
    request = pb.ScoreRequest(groups=random_groups(1), expected_identity="0" * 64)
    code, details = status_of(lambda: teacher.stub.Score(request, timeout=TIMEOUT))
    assert code == grpc.StatusCode.FAILED_PRECONDITION and "0" * 64 in details
    identity = teacher.stub.Describe(pb.DescribeRequest()).card.identity
    request.expected_identity = identity
    assert teacher.stub.Score(request, timeout=TIMEOUT).groups[0].identity == identity


@pytest.mark.pitfall("G1")
def test_a_request_and_a_reply_of_more_than_four_mebibytes(teacher):
    one = 4 * 2**20 + 1
    groups = random_groups(20, seed=4, response=(90, 91), samples=(40, 41), prompt=(1, 30))
    results = score(teacher, groups, top_k=64)
    assert sum(len(t.top_logprobs) for g in results for t in g.trajectories) > one
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.named_ids = trajectory.response_ids * 16
    request = pb.ScoreRequest(groups=groups)
    assert request.ByteSize() > one
    results = teacher.stub.Score(request, timeout=TIMEOUT).groups
    (first, *_) = read_group(groups[0], results[0])
    np.testing.assert_allclose(first.named_logprobs.shape, (90, 16))


def test_reflection_and_health(teacher):
    serving = health_pb2.HealthCheckResponse.SERVING
    assert teacher.health() == teacher.health("preceptor.v1.TeacherService") == serving
    stub = reflection_pb2_grpc.ServerReflectionStub(teacher.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (reply,) = stub.ServerReflectionInfo(iter([request]))
    names = [service.name for service in reply.list_services_response.service]
    assert "preceptor.v1.TeacherService" in names


@pytest.mark.pitfall("G4")
def test_too_little_deadline_is_not_started(teacher):
    request = pb.ScoreRequest(groups=random_groups(1))
    code, _ = status_of(lambda: teacher.stub.Score(request, timeout=0.05))
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_small_request_makes_no_large_reply(vision_teacher):
    """Every one of many refusals would repeat a long name."""
    group = prompt_group("x" * 50_000, [5], [[6]] * 2000)
    request = pb.ScoreRequest(groups=[group] * 2)
    stub = vision_teacher.stub
    for call in (stub.Score, lambda request: list(stub.ScoreStream(request))):
        code, details = status_of(lambda call=call: call(request))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert "group_id" in details and "limit is 256" in details and len(details) < 300
    group.group_id = "x" * 256
    request = pb.ScoreRequest(groups=[group] * 2)
    reply = stub.Score(request, timeout=TIMEOUT)
    assert reply.groups[1].trajectories[0].refusal == pb.REFUSAL_DUPLICATE_ID
    assert "x" * 64 + "..." in reply.groups[1].trajectories[0].message
    assert reply.groups[1].ByteSize() < 2000 * 200


def test_refusals_are_logged_but_not_without_bound(teacher):
    group = prompt_group("noisy", [5], [[6]] * 60)
    for trajectory in group.trajectories:
        trajectory.response_ids = b""
    score(teacher, [group])
    lines = teacher.log.read_text().splitlines()
    assert 0 < sum("'noisy'" in line for line in lines) <= 20
