"""Right values where others went wrong: advantages."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.flat import alone, from_k, merge_flat, on_ranks, pick, token_batch
from trainer.estimator_settings import EstimatorSettings, LossSettings
from trainer.estimators.difference import NonFinite, bad_tokens, difference
from trainer.estimators.estimate import estimate
from trainer.estimators.gndpo import Running, SmallBatch
from trainer.estimators.grpo import outcome
from trainer.estimators.moments import EMPTY, Moments, merge_all, moments
from trainer.estimators.opd import opd_raw
from trainer.surrogates import aggregate, denominator, surrogate

INF, NAN = math.inf, math.nan


def advantages(batch, running=None, **options) -> list[float]:
    return estimate(batch, EstimatorSettings(**options), running, alone).advantages_N.tolist()


def metrics(batch, running=None, **options) -> dict[str, float]:
    return estimate(batch, EstimatorSettings(**options), running, alone).tally.metrics()


def rewarded(rewards, groups, **others):
    """One token a sequence, with k 0, 1, 2, ..."""
    k_B1 = torch.arange(float(len(rewards)), dtype=torch.float64)[:, None]
    return token_batch(
        k_B1 - 10,
        torch.full_like(k_B1, -10.0),
        rewards_B=torch.tensor(rewards, dtype=torch.float64),
        groups_B=torch.tensor(groups),
        **others,
    )


@pytest.mark.pitfall("L1")
def test_the_difference_is_taken_token_by_token():
    batch = token_batch([-0.1, -0.9], [-0.4, -0.4])
    assert advantages(batch, name="opd_raw") == pytest.approx([0.3, -0.5], abs=1e-12)


@pytest.mark.pitfall("L12")
@pytest.mark.parametrize("name", ["gndpo", "opd", "opd_raw"])
def test_a_logprob_of_zero_is_a_value_and_a_masked_one_is_none(name):
    # Teacher certain (0.0) of the first token; what stands at the masked third must not matter.
    mask = [True, True, False]
    one = advantages(token_batch([0.0, -1.0, 0.0], [-1.0, -1.0, -7.0], mask), name=name)
    other = advantages(token_batch([0.0, -1.0, -9.0], [-1.0, -1.0, 0.0], mask), name=name)
    wanted = [0.70710678, -0.70710678, 0.0] if name == "gndpo" else [1.0, 0.0, 0.0]
    assert one == other
    assert one == pytest.approx(wanted, abs=1e-6)


@pytest.mark.pitfall("L13")
@pytest.mark.parametrize("name", ["gndpo", "opd", "opd_raw"])
def test_the_advantage_depends_on_the_token_that_was_sampled(name):
    """The teacher's and the student's logprobs of another sampled token give another advantage."""
    teacher, old = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    sampled = torch.tensor([0, 1, 2, 3, 4])
    other = torch.tensor([0, 1, 6, 3, 4])

    def of(ids):
        at = (torch.arange(5), ids)
        return advantages(token_batch(teacher[at], old[at].double()), name=name)

    assert of(sampled)[2] != pytest.approx(of(other)[2], abs=0.1)


@pytest.mark.pitfall("A1")
def test_two_values_whiten_with_bessels_correction():
    assert advantages(from_k(1.0, 3.0)) == pytest.approx([-0.7071, 0.7071], abs=1e-4)


@pytest.mark.pitfall("A1")
@pytest.mark.parametrize("k", [[], [2.0], [1.5, 1.5], [0.0, 0.0, 0.0]])
@pytest.mark.parametrize("center", [True, False])
def test_a_batch_without_spread_is_an_error_or_safely_zero(k, center):
    with pytest.raises(SmallBatch, match="small_batch: safe"):
        advantages(from_k(*k), center=center)
    assert advantages(from_k(*k), center=center, small_batch="safe") == [0.0] * len(k)


@pytest.mark.pitfall("A1")
def test_two_different_values_stay_finite_in_safe_mode():
    wanted = pytest.approx([-0.7071, 0.7071], abs=1e-4)
    assert advantages(from_k(1.0, 3.0), small_batch="safe") == wanted


@pytest.mark.pitfall("A2")
@pytest.mark.parametrize("empty", [0, 1, 2, None])
def test_statistics_are_of_all_ranks_and_an_empty_one_takes_part(empty):
    parts = [from_k(5.0, 5.0), from_k(-5.0)]
    if empty is not None:
        parts.insert(empty, from_k())
    results = on_ranks(parts, EstimatorSettings())
    together = [value for one in results for value in one.advantages_N.tolist()]
    assert together == pytest.approx([0.57735, 0.57735, -1.15470], abs=1e-4)
    merged = merge_flat([one.tally for one in results]).metrics()
    assert merged["k_mean"] == pytest.approx(5 / 3)
    assert (merged["tokens"], merged["tokens_with_teacher"]) == (3, 3)


@pytest.mark.pitfall("A2")
@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ([from_k(NAN), from_k(1.0, 2.0), from_k()], NonFinite),
        ([from_k(INF), from_k(1.0, 2.0), from_k()], NonFinite),
        ([from_k(1.0), from_k(), from_k(1.0)], SmallBatch),
    ],
)
def test_all_ranks_raise_together(bad, error):
    messages = {(type(one), str(one)) for one in on_ranks(bad, EstimatorSettings())}
    ((kind, _),) = messages
    assert kind is error


@pytest.mark.pitfall("A2")
def test_ranks_without_rewards_raise_together():
    parts = [rewarded([1.0, 0.0], [0, 0]), rewarded([NAN, 1.0], [1, 1]), from_k(), from_k(1.0)]
    results = on_ranks(parts, EstimatorSettings(name="grpo"))
    assert {str(one)[:16] for one in results} == {"2 of 5 responses"}


@pytest.mark.pitfall("A4")
def test_nan_at_a_masked_position_is_ignored_and_at_a_valid_one_stops():
    teacher, old = [-1.0, -2.0, -INF], [0.0, -1.5, NAN]
    got = advantages(token_batch(teacher, old, [True, True, False]))
    assert got == pytest.approx([-0.7071, 0.7071, 0.0], abs=1e-4)
    with pytest.raises(NonFinite, match="1 of 3 valid tokens"):
        advantages(token_batch(teacher, old))


@pytest.mark.parametrize("name", ["gndpo", "opd", "opd_raw", "grpo"])
def test_old_logprobs_that_are_no_numbers_stop_every_estimator(name):
    teacher = None if name == "grpo" else [-1.0, -1.0]
    batch = token_batch(teacher, [-1.0, -INF], rewards_B=torch.ones(1))
    with pytest.raises(NonFinite):
        advantages(batch, name=name)


@pytest.mark.parametrize("name", ["gndpo", "opd", "opd_raw"])
def test_marks_that_are_needed_and_absent_stop(name):
    with pytest.raises(NonFinite, match="2 of 2 valid tokens"):
        advantages(token_batch(None, [-1.0, -1.0]), name=name)


@pytest.mark.pitfall("A6")
def test_a_small_sigma_beside_a_large_mean_is_right():
    generator = torch.Generator().manual_seed(0)
    k = -4 + 1e-3 * torch.randn(100_000, generator=generator)
    stats = moments(k, torch.ones_like(k, dtype=torch.bool))
    sigma = (stats.m2 / (stats.count - 1)) ** 0.5
    assert sigma == pytest.approx(1e-3, rel=1e-2)
    exact = float(k.double().std())
    assert sigma == pytest.approx(exact, rel=1e-9)
    # The eps of 1e-8 inside the square root is part of the formula.
    logged = metrics(token_batch(k, torch.zeros_like(k)))["k_sigma"]
    assert logged == pytest.approx((exact**2 + 1e-8) ** 0.5, rel=1e-9)


@pytest.mark.pitfall("A6")
def test_float32_inputs_keep_their_digits():
    generator = torch.Generator().manual_seed(0)
    k = -4 + 1e-3 * torch.randn(1000, generator=generator)
    single, double = (
        estimate(token_batch(one, torch.zeros_like(one)), EstimatorSettings(), None, alone)
        for one in (k, k.double())
    )
    assert single.advantages_N.dtype == torch.float32
    torch.testing.assert_close(
        single.advantages_N.double(), double.advantages_N, rtol=1e-6, atol=1e-6
    )


@pytest.mark.pitfall("A7")
def test_the_clamp_comes_before_the_whitening():
    wanted = [-1.498, 0.513, 0.552, 0.434]
    assert advantages(from_k(-50.0, 0.1, 0.2, -0.1)) == pytest.approx(wanted, abs=1e-3)


def test_an_impossible_token_is_clamped_and_counted():
    batch = token_batch([-INF, -1.0, -0.5], [-1.0, -1.0, -1.0])
    result = estimate(batch, EstimatorSettings(), None, alone)
    assert result.advantages_N.isfinite().all()
    assert result.mask_N.all()
    logged = result.tally.metrics()
    assert logged["teacher_impossible"] == pytest.approx(1 / 3)
    assert logged["clamped_low"] == pytest.approx(1 / 3)
    assert logged["raw_kl"] == pytest.approx(-0.25)


@pytest.mark.parametrize("options", [{"name": "opd_raw"}, {"clip": None}])
def test_without_a_clamp_an_impossible_token_is_left_out_and_counted(options):
    batch = token_batch([-INF, -1.0, -9.0], [-1.0, -1.0, -1.0])
    result = estimate(batch, EstimatorSettings(**options), None, alone)
    assert result.mask_N.tolist() == [False, True, True]
    wanted = [0.0, 0.0, -8.0] if "name" in options else [0.0, 0.70711, -0.70711]
    assert result.advantages_N.tolist() == pytest.approx(wanted, abs=1e-5)
    logged = result.tally.metrics()
    assert logged["teacher_impossible"] == pytest.approx(1 / 3)
    # What the default clip would have cut: -inf and -8.
    assert logged["clamped_low"] == pytest.approx(2 / 3)
    assert (logged["k_mean"], logged["raw_kl"]) == pytest.approx((-4.0, 4.0), abs=1e-6)
    assert (logged["tokens"], logged["tokens_with_teacher"]) == (3, 3)


def test_opd_is_the_clamp_alone():
    assert advantages(from_k(-50.0, 0.5, 7.0), name="opd") == pytest.approx([-5.0, 0.5, 5.0])
    assert advantages(from_k(-50.0, 0.5), name="opd", clip=2.0) == pytest.approx([-2.0, 0.5])
    # A single token needs no spread.
    assert advantages(from_k(1.0), name="opd") == [1.0]


def test_opd_raw_keeps_masked_tokens_masked():
    k_N, mask_N = opd_raw(torch.tensor([-INF, 1.0, 0.0]), torch.tensor([True, True, False]))
    assert k_N.tolist() == [0.0, 1.0, 0.0]
    assert mask_N.tolist() == [False, True, False]


def test_sign_flips_are_counted():
    batch = from_k(-1.0, -1.1, -0.9)
    assert advantages(batch) == pytest.approx([0.0, -1.0, 1.0], abs=1e-5)
    logged = metrics(batch)
    assert logged["sign_flips"] == pytest.approx(1 / 3)
    assert logged["raw_kl"] == pytest.approx(1.0)
    assert logged["advantage_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics(batch, name="opd")["sign_flips"] == 0


def test_center_and_scale_are_switches():
    k = (1.0, 3.0)
    assert advantages(from_k(*k), center=False) == pytest.approx([0.7071, 2.1213], abs=1e-4)
    assert advantages(from_k(*k), scale=False) == pytest.approx([-1.0, 1.0], abs=1e-6)
    assert advantages(from_k(*k), scale=False, center=False) == pytest.approx(k)
    # Nothing is divided: no spread is needed.
    assert advantages(from_k(2.0), scale=False) == pytest.approx([0.0], abs=1e-6)


def test_a_floor_keeps_noise_small():
    k = (1.0, 1.001)
    assert advantages(from_k(*k)) == pytest.approx([-0.7001, 0.7001], abs=1e-3)
    assert advantages(from_k(*k), std_floor=0.1) == pytest.approx([-0.005, 0.005], abs=1e-6)
    assert metrics(from_k(*k), std_floor=0.1)["k_sigma"] == pytest.approx(7.1e-4, rel=0.02)
    assert advantages(from_k(1.0, 3.0), std_floor=0.1)[1] == pytest.approx(0.7071, abs=1e-4)


def test_advantages_can_be_clamped_after_whitening():
    plain = advantages(from_k(-5.0, 0.1, 0.2, -0.1))
    clipped = advantages(from_k(-5.0, 0.1, 0.2, -0.1), post_clip=0.52)
    assert clipped == pytest.approx([max(-0.52, min(0.52, one)) for one in plain])
    logged = metrics(from_k(-5.0, 0.1, 0.2, -0.1), post_clip=0.52)
    assert logged["advantage_max"] == pytest.approx(0.52)


def test_running_statistics_start_with_the_batch_and_forget():
    first, second = from_k(0.0, 2.0), from_k(3.0, 5.0)
    options = {"statistics": "ema", "ema_decay": 0.5}
    settings_ = EstimatorSettings(**options)
    one = estimate(first, settings_, None, alone)
    assert one.advantages_N.tolist() == pytest.approx(advantages(first), abs=1e-12)
    two = estimate(second, settings_, one.running, alone)
    # Weights 1 and 2 of means 1 and 4: the bias-corrected average, 0.5 x 0.5 x 1 + 0.5 x 4 over
    # 0.75. Its variance holds the distance of the two means.
    mean = (1 * 1.0 + 2 * 4.0) / 3
    weights = [0.5, 0.5, 1.0, 1.0]
    m2 = sum(w * (k - mean) ** 2 for w, k in zip(weights, [0.0, 2.0, 3.0, 5.0], strict=True))
    sigma = (m2 / 3 * 3 / 2 + 1e-8) ** 0.5
    wanted = [(3.0 - mean) / sigma, (5.0 - mean) / sigma]
    assert two.advantages_N.tolist() == pytest.approx(wanted, abs=1e-7)
    logged = two.tally.metrics()
    assert (logged["k_mean"], logged["k_sigma"]) == pytest.approx((mean, sigma), abs=1e-7)
    # The state is handed on, not changed.
    assert one.running == Running(Moments(2, 1.0, 2.0))
    # One token is enough where earlier batches had spread.
    assert advantages(from_k(mean), two.running, **options)[0] == pytest.approx(0.0, abs=1e-7)


def test_a_running_state_survives_json():
    result = estimate(from_k(0.1, 2.3, -1.7), EstimatorSettings(statistics="ema"), None, alone)
    values = json.loads(json.dumps(result.running.to_dict()))
    assert Running.from_dict(values) == result.running
    assert estimate(from_k(0.0, 1.0), EstimatorSettings(), result.running, alone).running is None


def labelled(rows, labels, count):
    k_BT = torch.tensor(rows, dtype=torch.float64)
    old = torch.full_like(k_BT, -10.0)
    return token_batch(k_BT - 10, old, labels_B=torch.tensor(labels), label_count=count)


def test_each_teacher_has_its_own_statistics():
    batch = labelled([[1.0, 3.0], [-0.2, 0.0], [5.0, 1.0]], [0, 2, 0], 3)
    got = advantages(batch, statistics="per_teacher")
    first, second = advantages(from_k(1.0, 3.0, 5.0, 1.0)), advantages(from_k(-0.2, 0.0))
    assert got == pytest.approx([*first[:2], *second, *first[2:]], abs=1e-12)
    logged = metrics(batch, statistics="per_teacher")
    assert logged["k_mean/0"] == pytest.approx(2.5)
    assert logged["k_mean/2"] == pytest.approx(-0.1)
    assert "k_mean/1" not in logged
    assert logged["k_mean"] == pytest.approx(9.8 / 6)


def test_a_teacher_with_one_token_is_named():
    batch = labelled([[1.0, 3.0], [2.0, 2.0]], [0, 1], 2)
    with pytest.raises(SmallBatch, match="of label 1 with the same k"):
        advantages(batch, statistics="per_teacher")
    safe = advantages(batch, statistics="per_teacher", small_batch="safe")
    assert safe == pytest.approx([-0.7071, 0.7071, 0.0, 0.0], abs=1e-4)


def test_teachers_on_different_ranks_keep_their_statistics():
    batch = labelled([[1.0, 3.0], [-0.2, 0.0], [5.0, 1.0]], [0, 1, 0], 2)
    parts = [pick(batch, rows)[0] for rows in ([0], [], [2, 1])]
    results = on_ranks(parts, EstimatorSettings(statistics="per_teacher"))
    together = [value for one in results for value in one.advantages_N.tolist()]
    whole = advantages(batch, statistics="per_teacher")
    assert together == pytest.approx([*whole[:2], *whole[4:], *whole[2:4]], abs=1e-12)


def test_outcomes_are_normalised_in_their_group():
    rewards_B = torch.tensor([1.0, 7.0, 0.0, 0.1, 0.0, 0.1, 0.1], dtype=torch.float64)
    groups_B = torch.tensor([9, -3, 9, 4, 9, 4, 4])
    std = 3**-0.5
    high, low = 2 / 3 / (std + 1e-6), -1 / 3 / (std + 1e-6)
    got = outcome(rewards_B, groups_B, std=True)
    assert got.advantages_B.tolist() == pytest.approx([high, 0, low, 0, low, 0, 0], abs=1e-12)
    # Equal rewards give exactly 0, rounding of their mean notwithstanding.
    assert got.advantages_B[[1, 3, 5, 6]].tolist() == [0.0] * 4
    assert (got.groups, got.flat) == (3, 2)
    plain = outcome(rewards_B, groups_B, std=False).advantages_B.tolist()
    assert plain == pytest.approx([2 / 3, 0, -1 / 3, 0, -1 / 3, 0, 0], abs=1e-12)


def test_grpo_gives_every_token_its_sequences_advantage():
    batch = token_batch(
        None,
        -torch.ones(2, 3, dtype=torch.float64),
        [[True, True, False], [True, True, True]],
        rewards_B=torch.tensor([1.0, 0.0], dtype=torch.float64),
    )
    a = 0.5 / (0.5**0.5 + 1e-6)
    assert advantages(batch, name="grpo") == pytest.approx([a, a, 0, -a, -a, -a], abs=1e-12)
    assert metrics(batch, name="grpo") == pytest.approx(
        {
            "tokens": 5,
            "tokens_with_teacher": 0,
            "behaviour_difference": 0.0,
            "advantage_max": a,
            "reward": 0.5,
            "reward_std": 0.5**0.5,
            "groups_without_signal": 0.0,
        }
    )
    no_std = advantages(batch, name="grpo", outcome_std=False)
    assert no_std == pytest.approx([0.5, 0.5, 0, -0.5, -0.5, -0.5], abs=1e-12)


def test_grpo_tells_of_marks_it_does_not_use():
    batch = rewarded([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1])
    logged = metrics(batch, name="grpo")
    assert logged["raw_kl"] == pytest.approx(-1.5)
    assert logged["k_mean"] == pytest.approx(1.5, abs=1e-6)
    # k is 0, 1, 2, 3: two of the tokens that failed look good to the teacher.
    assert logged["sign_flips"] == 0.5


def test_distillation_and_outcome_are_each_normalised_then_summed():
    batch = rewarded([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1])
    outcomes = [0.5 / (0.5**0.5 + 1e-6), -0.5 / (0.5**0.5 + 1e-6), 0, 0]
    for name in ("gndpo", "opd", "opd_raw"):
        alone_ = advantages(batch, name=name)
        wanted = [a + 0.3 * b for a, b in zip(alone_, outcomes, strict=True)]
        assert advantages(batch, name=name, outcome_weight=0.3) == pytest.approx(wanted, abs=1e-12)
    logged = metrics(batch, outcome_weight=0.3)
    assert (logged["reward"], logged["groups_without_signal"]) == (0.75, 0.5)


def test_the_sum_can_be_whitened_instead():
    batch = rewarded([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1])
    k = [0 + 2 * 0.5, 1 - 2 * 0.5, 2.0, 3.0]
    got = advantages(batch, outcome_weight=2.0, normalise="sum")
    assert got == pytest.approx(advantages(from_k(*k)), abs=1e-12)
    logged = metrics(batch, outcome_weight=2.0, normalise="sum")
    assert logged["k_mean"] == pytest.approx(1.5, abs=1e-6)


def test_quantiles_of_raw_k_are_logged():
    generator = torch.Generator().manual_seed(0)
    k = 3 * torch.randn(5000, generator=generator, dtype=torch.float64)
    logged = metrics(token_batch(k, torch.zeros_like(k)))
    for percent in (1, 5, 25, 50, 75, 95, 99):
        exact = float(k.sort().values[math.ceil(percent / 100 * 5000) - 1])
        assert logged[f"k_p{percent:02}"] == pytest.approx(exact, rel=1 / 128, abs=0.001)


@pytest.mark.pitfall("L14")
def test_the_distance_of_worker_and_trainer_is_logged():
    behaviour = torch.tensor([-0.5, NAN, -2.0], dtype=torch.float64)
    batch = token_batch(
        [-1.0, 0.0, -3.0], [-1.0, -1.0, -1.0], [True, False, True], behaviour_N=behaviour
    )
    assert metrics(batch)["behaviour_difference"] == pytest.approx(0.75)


def test_bad_tokens_are_counted():
    valid = torch.tensor([True, True, True, False, True])
    teacher = torch.tensor([-1.0, -INF, NAN, NAN, -1.0])
    k = difference(teacher, torch.tensor([-1.0, -1.0, -1.0, -INF, -INF]), valid)
    assert k[[0, 1, 3]].tolist() == [0.0, -INF, 0.0]
    assert bad_tokens(k) == 2


@pytest.mark.parametrize("count", [1000, 200_000])
def test_moments_merge_to_those_of_the_whole(count):
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(count, generator=generator)
    mask = torch.rand(count, generator=generator) < 0.7
    whole = moments(values, mask)
    parts = [moments(v, m) for v, m in zip(values.split(137), mask.split(137), strict=True)]
    merged = merge_all([EMPTY, *parts, EMPTY])
    assert merged.count == whole.count == int(mask.sum())
    assert merged.mean == pytest.approx(whole.mean, abs=1e-12)
    assert merged.m2 == pytest.approx(whole.m2, rel=1e-12)
    valid = values[mask].double()
    assert whole.mean == pytest.approx(float(valid.mean()), abs=1e-12)
    assert whole.m2 == pytest.approx(float((valid - valid.mean()).square().sum()), rel=1e-12)
    assert merge_all([]) == EMPTY


ESTIMATORS = [
    {"small_batch": "safe"},
    {"small_batch": "safe", "clip": None, "center": False, "post_clip": 1.0},
    {"small_batch": "safe", "statistics": "per_teacher", "std_floor": 0.2},
    {"small_batch": "safe", "statistics": "ema", "ema_decay": 0.7},
    {"small_batch": "safe", "outcome_weight": 0.5},
    {"small_batch": "safe", "outcome_weight": 0.5, "normalise": "sum"},
    {"name": "opd", "outcome_weight": 1.5, "outcome_std": False},
    {"name": "opd_raw"},
    {"name": "grpo"},
]
LOSSES = [
    {"name": name, "aggregation": aggregation}
    for name in ("gspo", "ppo", "importance")
    for aggregation in ("sequence-mean", "token-mean", "fixed-length")
]
RUNNING = Running(Moments(11.0, 0.3, 9.0))


@st.composite
def splits(draw):
    """A padded batch with garbage in its padding, and its sequences dealt out: groups whole, in
    any order, to 1 to 4 ranks."""
    samples = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    groups = [group for group, count in enumerate(samples) for _ in range(count)]
    lengths = draw(st.lists(st.integers(0, 5), min_size=len(groups), max_size=len(groups)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    count, width = len(groups), 5
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]) & (random(count, width) < 1.2)
    old = random(count, width) - 3
    teacher = torch.where(random(count, width) > 1.5, -INF, old + 3 * random(count, width))
    behaviour = old + 0.1 * random(count, width)
    labels = [draw(st.integers(0, 2)) for _ in samples]
    batch = token_batch(
        torch.where(mask, teacher, NAN),
        torch.where(mask, old, INF),
        mask,
        behaviour_N=torch.where(mask, behaviour, NAN).reshape(-1),
        rewards_B=(random(count) > 0).double(),
        groups_B=torch.tensor(groups),
        labels_B=torch.tensor([labels[group] for group in groups]),
        label_count=3,
    )
    new = torch.where(mask, old + 0.2 * random(count, width), NAN).reshape(-1)
    ranks = draw(st.integers(1, 4))
    homes = [draw(st.integers(0, ranks - 1)) for _ in samples]
    order = draw(st.permutations(range(count)))
    dealt = [[row for row in order if homes[groups[row]] == rank] for rank in range(ranks)]
    return batch, new, dealt


def loss_and_gradient(batches, results, news, options):
    """Of all parts together, with one denominator."""
    settings_ = LossSettings(**options)
    places = [(r.mask_N, b.rows_N, b.sequences) for b, r in zip(batches, results, strict=True)]
    total = sum(denominator(*place, settings_.aggregation, 7) for place in places)
    loss = 0.0
    for batch, result, new, place in zip(batches, results, news, places, strict=True):
        losses, _ = surrogate(new, batch.old_N, result.advantages_N, *place, settings_)
        share = aggregate(losses, *place, settings_.aggregation, max(total, 1))
        share.backward()
        loss += share.item()
    return loss


@pytest.mark.pitfall("A2")
@pytest.mark.pitfall("A3")
@pytest.mark.pitfall("A4")
@settings(max_examples=300, deadline=None)
@given(splits(), st.sampled_from(ESTIMATORS), st.sampled_from(LOSSES))
def test_any_split_over_ranks_is_the_same(split, estimator, loss):
    batch, new_N, dealt = split
    chosen = EstimatorSettings(**estimator)
    whole = estimate(batch, chosen, RUNNING, alone)
    whole_new = new_N.clone().requires_grad_()
    wanted_loss = loss_and_gradient([batch], [whole], [whole_new], loss)

    parts, places = zip(*(pick(batch, rows) for rows in dealt), strict=True)
    results = on_ranks(parts, chosen, RUNNING)
    news = [new_N[at_M].clone().requires_grad_() for at_M in places]
    got_loss = loss_and_gradient(parts, results, news, loss)

    advantages_N, gradient_N = torch.zeros(2, *new_N.shape, dtype=torch.float64)
    mask_N = torch.zeros_like(batch.mask_N)
    for at_M, result, new in zip(places, results, news, strict=True):
        advantages_N[at_M], mask_N[at_M] = result.advantages_N, result.mask_N
        gradient_N[at_M] = new.grad
    torch.testing.assert_close(advantages_N, whole.advantages_N, rtol=0, atol=1e-9)
    assert torch.equal(mask_N, whole.mask_N)
    assert got_loss == pytest.approx(wanted_loss, abs=1e-9)
    torch.testing.assert_close(gradient_N, whole_new.grad, rtol=0, atol=1e-9)
    assert whole_new.grad.isfinite().all()

    running = {one.running for one in results}
    if chosen.statistics == "ema":
        (got,) = running
        assert got.to_dict() == pytest.approx(whole.running.to_dict(), rel=1e-9)
    else:
        assert running == {None}
    merged = merge_flat([one.tally for one in results]).metrics()
    assert merged == pytest.approx(whole.tally.metrics(), rel=1e-9, abs=1e-9)
