"""Tests that spaces survive as JSON."""

import json

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Text, Tuple
from hypothesis import example, given
from nested_spaces_test import any_spaces

from pipeline.environments import specs
from pipeline.environments.saved_spaces import from_json, to_json


def through_json(space):
    return from_json(json.loads(json.dumps(to_json(space), allow_nan=False)))


@given(any_spaces)
@example(Discrete(5, start=2, dtype=np.uint8))
def test_a_space_is_the_same_afterwards(space):
    assert through_json(space) == space


@pytest.mark.parametrize(
    "space",
    [
        Box(-np.inf, np.array([0.1, np.inf], np.float32), (2,)),
        Box(0.1, 0.7, (3,), np.float64),
        Box(0, 1, (2,), np.dtype("bool")),  # type: ignore[arg-type]
        Box(0, 2**63 - 1, (1,), np.int64),
        Box(0, 0.1, (2,), np.dtype(">f4")),  # type: ignore[arg-type]
        Box(0, 255, (0,), np.uint8),
        Box(0, 255, (0, 2), np.uint8),
    ],
)
def test_bounds_are_the_same_to_the_bit(space):
    copy = through_json(space)
    assert copy == space  # which takes close bounds for the same
    assert (copy.low.tobytes(), copy.high.tobytes()) == (space.low.tobytes(), space.high.tobytes())


def test_parts_that_agents_do_not_see_keep_their_places():
    space = Tuple([Text(3), Dict(b=Discrete(2), a=Text(4))])
    assert specs.arrays(through_json(space)) == specs.arrays(space)


@pytest.mark.parametrize(
    "data",
    [
        None,
        3,
        [],
        {},
        {"Box": 3},
        {"Box": {"low": 0}},
        {"Discrete": {"n": -1, "start": 0}},
        {"Dict": 1},
    ],
)
def test_other_data_is_no_space(data):
    with pytest.raises(ValueError, match="not a saved gymnasium space"):
        from_json(data)
