"""A run that collapses is stopped, and told why."""

import numpy as np
import pytest

from trainer.guards import CollapsedRun, Guards, mean_repetition, repetition
from trainer.settings import GuardSettings

SOUND = {"repetition": 0.1, "clamped_low": 0.1, "truncated": 0.0, "entropy": 1.0}


@pytest.mark.parametrize(
    ("ids", "share"),
    [
        ([7] * 10, 1.0),
        ([7, 8] * 10, 1.0),
        ([1, 2, 3, 4, 5, 6, 7, 8] * 3, 1.0),
        (list(range(20)), 0.0),
        # A loop of nine is longer than what is looked for.
        (list(range(9)) * 3, 0.0),
        # 4 of the 9 neighbours are equal.
        ([1, 2, 3, 4, 5, 9, 9, 9, 9, 9], 4 / 9),
        ([7], 0.0),
        ([], 0.0),
    ],
)
def test_repetition(ids, share):
    assert repetition(np.array(ids)) == pytest.approx(share)


def test_repetition_of_a_batch_is_the_mean_over_its_responses():
    assert mean_repetition([np.array([7] * 10), np.arange(10)]) == 0.5
    assert mean_repetition([]) == 0.0


@pytest.mark.pitfall("T5")
def test_rollouts_that_repeat_a_token_up_to_the_cap_stop_the_run_by_name():
    guards = Guards(GuardSettings(patience=3), {})
    stuck = SOUND | {"repetition": 0.97, "truncated": 1.0}
    guards.check(stuck)
    guards.check(stuck)
    with pytest.raises(CollapsedRun, match=r"repeat.*repetition 0\.970.*trainer\.guards\.repetit"):
        guards.check(stuck)


@pytest.mark.parametrize(
    ("setting", "metrics", "words"),
    [
        ({"truncated": 0.9}, {"truncated": 0.95}, "run into the cap"),
        ({"clamped": 0.5}, {"clamped_low": 0.3, "clamped_high": 0.3}, "clamp cuts"),
        ({"entropy": 0.1}, {"entropy": 0.05}, r"certain.*entropy 0\.050.*guards\.entropy 0\.1"),
    ],
)
def test_each_guard_names_its_cause(setting, metrics, words):
    guards = Guards(GuardSettings(patience=1, **setting), {})
    guards.check(SOUND)
    with pytest.raises(CollapsedRun, match=words):
        guards.check(SOUND | metrics)
    Guards(GuardSettings(patience=1, **dict.fromkeys(setting)), {}).check(SOUND | metrics)


def test_a_sound_step_in_between_starts_the_count_again_and_a_resume_does_not():
    guards = Guards(GuardSettings(patience=2), {})
    bad = SOUND | {"repetition": 0.9}
    for metrics in (bad, SOUND, bad):
        guards.check(metrics)
    assert guards.strikes == {"repetition": 1}
    with pytest.raises(CollapsedRun):
        Guards(GuardSettings(patience=2), guards.strikes).check(bad)


def test_a_number_that_is_none_is_no_sound_sign():
    guards = Guards(GuardSettings(patience=1, entropy=0.1), {})
    with pytest.raises(CollapsedRun):
        guards.check(SOUND | {"entropy": float("nan")})
