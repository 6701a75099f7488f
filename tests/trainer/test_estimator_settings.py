"""Settings that contradict each other are refused, by name; what is written loads again."""

import pytest
from pydantic import ValidationError

from trainer.estimator_settings import EstimatorSettings, LossSettings


def test_a_bare_name_will_do():
    assert EstimatorSettings.model_validate("grpo") == EstimatorSettings(name="grpo")
    assert LossSettings.model_validate("ppo").name == "ppo"
    with pytest.raises(ValidationError, match="gndpo"):
        EstimatorSettings.model_validate("gdpo")


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"name": "grpo", "post_clip": 1.0}, ["estimator.post_clip", "grpo", "belongs to gndpo"]),
        ({"name": "grpo", "clip": 3.0}, ["estimator.clip", "estimator.name grpo"]),
        ({"name": "grpo", "outcome_weight": 1.0}, ["estimator.outcome_weight", "set", "gndpo"]),
        ({"name": "opd_raw", "clip": 5.0}, ["estimator.clip", "opd_raw"]),
        ({"name": "opd", "clip": None}, ["estimator.clip", "set estimator.name opd_raw"]),
        ({"name": "opd", "center": False}, ["estimator.center", "opd", "belongs to gndpo"]),
        ({"name": "opd", "normalise": "sum", "outcome_weight": 1.0}, ["estimator.normalise"]),
        ({"ema_decay": 0.5}, ["estimator.ema_decay", "set estimator.statistics ema"]),
        ({"statistics": "batch", "ema_decay": 0.9}, ["estimator.ema_decay"]),
        ({"scale": False, "std_floor": 0.1}, ["estimator.std_floor", "estimator.scale"]),
        ({"scale": False, "small_batch": "safe"}, ["estimator.small_batch", "estimator.scale"]),
        (
            {"scale": False, "center": False, "statistics": "ema"},
            ["estimator.statistics", "estimator.center"],
        ),
        ({"normalise": "sum"}, ["estimator.normalise", "set estimator.outcome_weight"]),
        ({"outcome_std": False}, ["estimator.outcome_std", "estimator.outcome_weight"]),
        (
            {"outcome_weight": 1.0, "normalise": "sum", "outcome_std": True},
            ["estimator.outcome_std", "estimator.normalise"],
        ),
    ],
)
def test_estimator_options_without_effect_are_refused(values, parts):
    with pytest.raises(ValidationError) as caught:
        EstimatorSettings(**values)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"name": "importance", "clip_low": 0.1}, ["loss.clip_low", "loss.name importance"]),
        ({"fixed_length": 100}, ["loss.fixed_length", "set loss.aggregation fixed-length"]),
        ({"correction_high": 3.0}, ["loss.correction_high", "set loss.correction truncate"]),
        (
            {"correction": "truncate", "correction_low": 0.3},
            ["loss.correction_low", "set loss.correction mask"],
        ),
        ({"top_k": 8}, ["loss.top_k 8", "loss.top_k_weight 0", "both"]),
        ({"top_k_weight": 0.5}, ["loss.top_k 0", "loss.top_k_weight 0.5", "both"]),
    ],
)
def test_loss_options_without_effect_are_refused(values, parts):
    with pytest.raises(ValidationError) as caught:
        LossSettings(**values)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        EstimatorSettings(),
        EstimatorSettings(name="grpo", outcome_std=False),
        EstimatorSettings(name="opd", clip=2.0, outcome_weight=0.5),
        EstimatorSettings(name="opd_raw"),
        EstimatorSettings(clip=None, statistics="ema", ema_decay=0.99, post_clip=3.0),
        EstimatorSettings(scale=False, outcome_weight=1.0, normalise="sum"),
        LossSettings(),
        LossSettings(name="importance", aggregation="fixed-length", fixed_length=9),
        LossSettings(correction="mask", correction_low=0.1, top_k=8, top_k_weight=0.1),
    ],
)
def test_what_is_written_loads_again(settings):
    again = type(settings).model_validate(settings.model_dump(mode="json"))
    assert again == settings
    assert again.model_dump() == settings.model_dump()


@pytest.mark.parametrize(
    ("values", "teacher", "rewards"),
    [
        ({}, True, False),
        ({"outcome_weight": 0.1}, True, True),
        ({"name": "grpo"}, False, True),
        ({"name": "opd_raw"}, True, False),
    ],
)
def test_an_estimator_says_what_it_needs(values, teacher, rewards):
    settings = EstimatorSettings(**values)
    assert (settings.needs_teacher, settings.needs_rewards) == (teacher, rewards)
