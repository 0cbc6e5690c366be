from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Literal

import pytest
import tensorflow as tf
from gin import config as gin_config

import pipeline.training  # noqa: F401
from pipeline.agents.q_learning import huber_loss
from pipeline.configuration import registry
from pipeline.ops.normalizers import ObservationNormalizer, RewardScaler
from pipeline.ops.optimizers import CenteredRMSprop, RMSprop
from pipeline.ops.schedules import linear_schedule
from pipeline.utils.constraints import (
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Probability,
    check_arguments,
    resolved,
    union_members,
)
from pipeline.utils.errors import UserError


def make(
    count: PositiveInt = 1,
    rest: NonNegativeInt = 0,
    rate: Callable[[int], float] | NonNegative = 0.1,
    limit: Positive | None = None,
    chance: Probability = 0.5,
    share: Fraction = 0.5,
    units: Sequence[PositiveInt] = (),
    way: Literal["fast", "slow"] | None = None,
    anything=None,
):
    check_arguments(make, locals())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("count", 3), ("rest", 0), ("rate", 0), ("rate", 2.5), ("rate", lambda x: -1.0),
        ("limit", None), ("limit", 1), ("chance", 0), ("chance", 1.0), ("share", 1),
        ("units", (1, 2)), ("units", []), ("way", "slow"), ("way", None), ("anything", object()),
    ],
)  # fmt: skip
def test_a_value_in_its_range_passes(name, value):
    make(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "must"),
    [
        ("count", 0, "a whole number, at least 1"),
        ("count", 1.0, "a whole number, at least 1"),
        ("count", True, "a whole number, at least 1"),
        ("count", 2**63, "at most 9223372036854775807, a number of 64 bits"),
        ("rest", -1, "a whole number, at least 0"),
        ("rate", -0.1, "a number, at least 0"),
        ("rate", "fast", "a number, at least 0"),
        ("limit", 0, "a number above 0"),
        ("limit", float("nan"), "a number above 0"),
        ("chance", 1.5, "a number, at least 0, at most 1"),
        ("chance", None, "a number, at least 0, at most 1"),
        ("share", 0.0, "a number above 0, at most 1"),
        ("way", "odd", '"fast", "slow" or None'),
    ],
)
def test_a_value_out_of_its_range_is_refused(name, value, must):
    with pytest.raises(UserError) as caught:
        make(**{name: value})
    assert str(caught.value) == f"make.{name} = {value!r}: must be {must}."


def test_the_items_of_a_sequence_are_checked():
    with pytest.raises(UserError, match=r"make.units\[1\] = 0: must be a whole number, at least 1"):
        make(units=(4, 0))


def test_fields_are_checked_too():
    @dataclasses.dataclass
    class Settings:
        size: PositiveInt

    with pytest.raises(UserError, match="Settings.size = 0"):
        check_arguments(Settings, {"size": 0})


ANY_NUMBER = {
    "create_sac_agent.target_entropy",
    "GaussianHead.initial_log_std",
    "linear_schedule.final",
    "linear_schedule.initial",
    "linear_schedule.start",
    "gymnasium_environment.max_episode_steps",  # -1 has a meaning of its own
}


def test_every_number_that_gin_binds_has_a_range():
    without = set()
    for selector, configurable in gin_config._REGISTRY.items():
        if configurable.wrapped.__module__.startswith("pipeline."):
            signature = inspect.signature(configurable.wrapped)
            for name in registry.parameters(configurable):
                annotation = resolved(configurable.wrapped, signature.parameters[name].annotation)
                assert annotation is not None, f"{selector}.{name} has an unknown annotation"
                if {int, float} & set(union_members(annotation)):
                    without.add(f"{selector.rpartition('.')[2]}.{name}")
    assert without == ANY_NUMBER


@pytest.mark.parametrize(
    ("configurable", "name", "value"),
    [
        (functools.partial(huber_loss, tf.zeros([1])), "threshold", -1.0),
        (RMSprop, "rho", 1.5),
        (CenteredRMSprop, "epsilon", -0.01),
        (functools.partial(ObservationNormalizer, tf.TensorSpec([2])), "clip", 0.0),
        (functools.partial(RewardScaler, 1, 0.9), "clip", -10.0),
        (functools.partial(linear_schedule, 1.0, 0.0), "num_steps", -1),
    ],
)
def test_a_number_that_would_give_wrong_results_in_silence_is_refused(configurable, name, value):
    with pytest.raises(UserError, match=f"{name} = {value}: must be"):
        configurable(**{name: value})


def explore(epsilon: Callable[[int], float] | Fraction = 0.1):
    check_arguments(explore, locals())


@pytest.mark.parametrize("ends", [(2.0, 0.1), (1.0, -0.1)])
def test_both_ends_of_a_schedule_are_checked(ends):
    with pytest.raises(
        UserError, match=r"epsilon \(an end of its schedule\) = .*: must be a number"
    ):
        explore(linear_schedule(*ends, num_steps=10))
    explore(linear_schedule(1.0, 0.0, num_steps=10))
    with pytest.raises(UserError):
        explore(0.0)
