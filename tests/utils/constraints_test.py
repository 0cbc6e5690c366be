from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import pytest

from pipeline.utils.constraints import (
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Probability,
    check_arguments,
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

    class Sizes(NamedTuple):
        size: PositiveInt

    with pytest.raises(UserError, match="Settings.size = 0"):
        check_arguments(Settings, {"size": 0})
    with pytest.raises(UserError, match="train.size = 0"):
        check_arguments(Sizes, {"size": 0}, "train")
