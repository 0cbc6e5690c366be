"""Observations of every space, and nests of them."""

import gymnasium
import numpy as np
import pytest
import tensorflow as tf
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_environments import SamplingEnv, environment

from pipeline.environments import specs
from pipeline.environments.process_vector import ProcessVector
from pipeline.environments.sync_vector import SyncVector
from pipeline.environments.vectors import GymnasiumVector
from pipeline.ops.observations import CategoricalSpec, num_categories
from pipeline.utils.errors import UserError

leaf_spaces = st.one_of(
    st.builds(
        lambda shape, dtype: Box(0, 100, shape, np.dtype(dtype).type),
        st.sampled_from([(), (2,), (3, 2)]),
        st.sampled_from(["float16", "float32", "float64", "uint8", "int64"]),
    ),
    st.builds(lambda n, start: Discrete(n, start=start), st.integers(1, 9), st.integers(-3, 3)),
    st.builds(
        lambda n: MultiDiscrete(n, start=[3] * len(n)),
        st.lists(st.integers(1, 4), min_size=1, max_size=3),
    ),
    st.builds(MultiBinary, st.sampled_from([3, (2, 2)])),
)
any_spaces = st.recursive(
    leaf_spaces,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(["b", "a", "z", "action"]), inner, min_size=1).map(Dict),
        st.lists(inner, min_size=1, max_size=3).map(Tuple),
    ),
    max_leaves=5,
)


def samples(space, seed, number):
    """Returns the arrays of the samples of a space, in the order of `tf.nest.flatten`."""
    env = SamplingEnv(space)
    observations = [env.reset(seed=seed)[0], *(env.observe() for _ in range(number - 1))]
    return [[np.asarray(x) for x in tf.nest.flatten(plain(one))] for one in observations]


def plain(sample):
    if isinstance(sample, dict):
        return {key: plain(value) for key, value in sample.items()}
    return tuple(map(plain, sample)) if isinstance(sample, tuple) else sample


@given(any_spaces)
@settings(max_examples=15)
def test_sync_and_processes_give_what_the_environment_returned(space):
    for vector_class in (SyncVector, ProcessVector):
        vector = vector_class([lambda: SamplingEnv(space)] * 2)
        first = vector.reset([7, 8])
        rows = [first, *(vector.step(np.zeros(2, np.int64)).observation for _ in range(3))]
        vector.close()
        for index, seed in enumerate((7, 8)):
            for arrays, expected in zip(rows, samples(space, seed, 4), strict=True):
                for array, value in zip(arrays, expected, strict=True):
                    np.testing.assert_array_equal(array[index], value)
                    assert array.dtype == value.dtype


@given(any_spaces)
@settings(max_examples=20)
def test_time_steps_have_the_structure_of_the_space(space):
    env = environment(SamplingEnv(space), SamplingEnv(space))
    spec = env.time_step_spec()
    time_step = tf.function(env.step)(tf.zeros([2], tf.int32))
    tf.nest.assert_same_structure(time_step, spec)
    flat = zip(tf.nest.flatten(time_step), tf.nest.flatten(spec), strict=True)
    for tensor, of_one in flat:
        assert (tensor.shape[1:], tensor.dtype) == (of_one.shape, of_one.dtype)
    for tensor, of_one in zip(
        tf.nest.flatten(time_step.observation), tf.nest.flatten(spec.observation), strict=True
    ):
        if isinstance(of_one, CategoricalSpec):
            category = tensor.numpy() - of_one.minimum
            assert (category >= 0).all() and (category < num_categories(of_one)).all()


def test_a_restored_environment_goes_on(tmp_path):
    space = Dict(picture=Box(0, 255, (4, 4, 3), np.uint8), place=Tuple([Discrete(3), Box(-1, 1)]))
    one, other = (environment(SamplingEnv(space), SamplingEnv(space)) for _ in range(2))
    actions = tf.zeros([2], tf.int32)
    for _ in range(13):
        one.step(actions)
    one.save(tmp_path)
    other.restore(tmp_path)
    assert other.divergence == ""
    for _ in range(9):
        tf.nest.map_structure(np.testing.assert_array_equal, one.step(actions), other.step(actions))


def test_texts_and_empty_arrays_are_left_out_with_a_note():
    space = Tuple(
        [Text(5), Dict(mission=Text(9), none=Box(0, 1, (0, 2)), position=Box(0, 1, (2,)))]
    )
    env = environment(SamplingEnv(space))
    assert [*env.observation_spec()[0]] == ["position"]
    assert env.reset().observation[0]["position"].shape == (1, 2)
    assert [note.split(":")[0] for note in env.notes] == [
        "agents do not see observation[0]",
        "agents do not see observation[1]['mission']",
        "agents do not see observation[1]['none']",
    ]


class WrongEnv(SamplingEnv):
    """Returns `wrong` instead of a sample at its second step."""

    def __init__(self, space, wrong):
        super().__init__(space)
        self.wrong = wrong

    def observe(self):
        return self.wrong if self.time == 2 else super().observe()


@pytest.mark.parametrize(
    ("space", "wrong", "message"),
    [
        (Discrete(3), 3, "the observation is 3, which is not in its space"),
        (Discrete(3, start=1), 0, "the observation is 0, which is not in its space"),
        (MultiDiscrete([2, 3]), np.array([1, 3]), "which is not in its space"),
        (MultiBinary(2), np.array([0, 2], np.int8), "which is not in its space"),
        (Dict(a=Discrete(3)), {"b": 1}, r"observation\['a'\] is missing from"),
        (Dict(a=Discrete(3)), np.zeros(3), r"observation\['a'\] is missing from"),
        (Tuple([Discrete(3)] * 2), (1,), r"observation\[1\] is missing from"),
        (Dict(a=Box(0, 1, (2,))), {"a": np.zeros(3)}, r"\['a'\] has the shape \(3,\)"),
        (Dict(a=Box(0, 9, (2,), np.uint8)), {"a": np.ones(2) / 2}, r"\['a'\] has the dtype"),
    ],
)
def test_an_observation_outside_of_its_space_is_named(space, wrong, message):
    for vector_class in (SyncVector, ProcessVector):
        vector = vector_class([lambda: WrongEnv(space, wrong)])
        vector.reset([1])
        vector.step(np.zeros(1, np.int64))
        with pytest.raises(UserError, match=message):
            vector.step(np.zeros(1, np.int64))
        vector.close()


@pytest.mark.parametrize(
    ("mask", "action_space"),
    [
        (MultiBinary(3), Discrete(2)),
        (Box(-np.inf, 0, (2,), np.float32), Discrete(2)),
        (Discrete(2), Discrete(2)),
        (Dict(a=MultiBinary(2)), Discrete(2)),
        (MultiBinary(2), Box(0, 1, (2,), np.float32)),
        (MultiBinary(2), MultiDiscrete([2])),
    ],
)
def test_a_mask_that_does_not_fit_the_actions_is_refused(mask, action_space):
    space = Dict(observation=Box(0, 1, (2,)), action_mask=mask)
    with pytest.raises(UserError, match="'action_mask'"):
        environment(SamplingEnv(space, action_space))


@pytest.mark.parametrize("others", [{}, {"observation": Text(3)}, {"observation": Dict()}])
def test_a_mask_without_an_observation_is_refused(others):
    space = Dict(action_mask=MultiBinary(2), **others)
    with pytest.raises(UserError, match="no other array of numbers"):
        environment(SamplingEnv(space))


@pytest.mark.parametrize(
    "spaces", [{1: Discrete(2)}, {1: Discrete(2), "a": Discrete(3)}, {("a", 0): Discrete(2)}]
)
@pytest.mark.parametrize("vector_class", [SyncVector, ProcessVector])
def test_keys_that_are_not_strings_are_refused(spaces, vector_class):
    with pytest.raises(UserError, match="must be strings"):
        vector_class([lambda: SamplingEnv(Dict(spaces))])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.bool_, np.float32])
def test_masks_of_integers_and_of_truth_values_are_taken(dtype):
    mask = Box(0, 1, (2,), dtype)
    env = environment(SamplingEnv(Dict(observation=Discrete(3), action_mask=mask)))
    assert env.reset().observation["action_mask"].dtype == dtype


def test_a_gymnasium_vector_gives_the_same_arrays():
    space = Dict(b=Box(0, 1, (2,)), a=Tuple([Discrete(3), MultiBinary(2)]))
    makes = [lambda: SamplingEnv(space)] * 2
    ours = SyncVector(makes).reset([1, 2])
    theirs = GymnasiumVector(gymnasium.vector.SyncVectorEnv(makes)).reset([1, 2])
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)
    assert [leaf.path for leaf in specs.arrays(space)] == [("a", 0), ("a", 1), ("b",)]
