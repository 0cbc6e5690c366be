import numpy as np
import pytest
import tensorflow as tf
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Text
from scripted_environments import EchoEnv, PlainEnv, SamplingEnv, ScriptedEnv, environment
from tf_agents.specs import tensor_spec

from pipeline.environments import specs
from pipeline.utils.errors import UserError


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (4, 3, 2), (2, 1, 3, 2)])
@pytest.mark.parametrize(
    "dtype",
    [
        *(np.float32, np.float64, np.float16, np.uint8, np.int16, np.int32, np.int64, bool),
        *(np.dtype(">f4"), np.dtype(">i4")),
    ],
    ids=str,
)
def test_observations_keep_rank_dtype_and_values(shape, dtype):
    space = Box(0, 1 if dtype is bool else 100, shape, dtype)
    envs = [EchoEnv(space), EchoEnv(space)]
    env = environment(*envs)
    spec = env.observation_spec()
    assert (spec.shape, spec.dtype) == (tf.TensorShape(shape), tf.as_dtype(dtype))

    step = tf.function(env.step).get_concrete_function(tf.TensorSpec([2], tf.int32))
    env.reset()
    observation = step(tf.zeros([2], tf.int32)).observation
    assert step.structured_outputs.observation.shape == (2, *shape)
    assert observation.dtype == dtype
    np.testing.assert_array_equal(observation, [envs[0].sent[1], envs[1].sent[1]])
    assert bool(tensor_spec.is_bounded(spec)) == (dtype is not bool)


def test_infinite_bounds_stay_infinite():
    env = environment(EchoEnv(Box(-np.inf, np.array([np.inf, 1], np.float32), (2,))))
    assert env.observation_spec().minimum == -np.inf
    np.testing.assert_array_equal(env.observation_spec().maximum, [np.inf, 1])


def test_discrete_actions_start_at_zero_outside_and_at_start_inside():
    scripted = ScriptedEnv([(9, "terminated")], Discrete(3, start=-1))
    env = environment(scripted)
    assert env.action_spec() == tensor_spec.BoundedTensorSpec((), tf.int32, 0, 2, "action")
    env.reset()
    for action in range(3):
        env.step([action])
    assert scripted.actions == [-1, 0, 1]
    assert scripted.action_space.contains(scripted.actions[0])


def test_an_invalid_action_for_an_observation_of_nan_is_explained_by_it():
    class Broken(PlainEnv):
        def observe(self):
            return np.full(3, np.nan, np.float32)

    env = environment(Broken())
    env.reset()
    with pytest.raises(UserError, match=r"an observation holds NaN, .*action 2 .* is outside"):
        env.step(tf.constant([2]))


@pytest.mark.parametrize(
    ("space", "actions", "received"),
    [
        (MultiDiscrete([2, 3]), [[0, 0], [1, 2]], [[0, 0], [1, 2]]),
        (MultiDiscrete([2, 3], start=[-1, 5]), [[0, 0], [1, 2]], [[-1, 5], [0, 7]]),
        (MultiDiscrete(np.array([[2, 3], [1, 4]])), [[[1, 2], [0, 3]]], [[[1, 2], [0, 3]]]),
        (MultiBinary(3), [[0, 1, 1]], [[0, 1, 1]]),
        (Box(-2, 3, (1,), np.int8), [[0], [5]], [[-2], [3]]),
        (Box(250, 255, (2,), np.uint8), [[0, 5]], [[250, 255]]),
        (Box(2**60, 2**60 + 2, (1,), np.int64), [[0], [2]], [[2**60], [2**60 + 2]]),
        (Box(2**63, 2**63 + 2, (1,), np.uint64), [[0], [2]], [[2**63], [2**63 + 2]]),
    ],
)
def test_several_discrete_actions_start_at_zero_outside_and_at_start_inside(
    space, actions, received
):
    scripted = SamplingEnv(Box(0, 1, (1,)), space)
    env = environment(scripted)
    spec = env.action_spec()
    assert (spec.dtype, tuple(spec.shape)) == (tf.int32, space.shape)
    env.reset()
    for action, expected in zip(actions, received, strict=True):
        sent = specs.action_converter(space)(np.array([action], np.int32))[0]
        assert space.contains(sent) and sent.tolist() == expected
        assert env.step([action]).reward == 1.0  # the environment received one of its space
    with pytest.raises(ValueError, match="for environment 0 is outside"):
        env.step(tf.fill([1, *space.shape], 9))


@pytest.mark.parametrize("space", [Discrete(10_001), MultiDiscrete([9_000, 1_001])])
def test_too_many_categories_are_refused(space):
    with pytest.raises(UserError, match="has 10,001 categories; the limit is 10,000"):
        environment(SamplingEnv(Dict(a=Box(0, 1, (1,)), b=space)))
    with pytest.raises(UserError, match="has 10,001 categories; the limit is 10,000"):
        environment(SamplingEnv(Box(0, 1, (1,)), space))


def test_an_environment_cannot_change_the_action_that_is_recorded():
    scripted = ScriptedEnv([(9, "terminated")], Box(-1, 1, (2,)))
    env = environment(scripted)
    env.reset()

    @tf.function
    def act(action):
        env.step(action)
        return tf.identity(action)

    # Aligned tensors reach Python without a copy.
    action = tf.constant([[0.5, -0.5]])
    assert act(action).numpy().tolist() == [[0.5, -0.5]]
    assert scripted.actions[0].tolist() == [0.5, -0.5]


@pytest.mark.parametrize(
    ("space", "action"),
    [
        (Discrete(3), [0, 3]),
        (Discrete(3), [0, -1]),
        (Discrete(3, start=1), [0, 3]),
        (Box(-1, 1, (2,)), [[0.0, 0.0], [0.0, 1.01]]),
        (Box(-1, 1, (2,)), [[0.0, 0.0], [np.nan, 0.0]]),
        (Box(-np.inf, np.inf, (1,)), [[0.0], [np.nan]]),
        (Box(-np.inf, np.inf, (1,)), [[0.0], [-np.inf]]),
        (Box(0, np.inf, (1,)), [[0.0], [-5.0]]),
        (Box(0, np.inf, (1,)), [[0.0], [np.inf]]),
        (Box(np.array([0.0, -np.inf]), np.array([1.0, np.inf])), [[0.0, 0.0], [2.0, 0.0]]),
    ],
)
def test_an_action_out_of_range_is_refused_and_named(space, action):
    envs = [ScriptedEnv([(9, "terminated")], space) for _ in range(2)]
    env = environment(*envs)
    env.reset()
    with pytest.raises(ValueError, match="for environment 1 is outside"):
        env.step(tf.constant(action, env.action_spec().dtype))
    assert envs[0].actions == envs[1].actions == []
    assert "ValueError" in env.failure_message()


@pytest.mark.parametrize(
    "space, action",
    [
        (Box(0.1, 0.7, (1,)), np.nextafter(np.float32(0.7), np.float32(1))),
        (Box(0.7, np.inf, (1,), np.float64), np.float32(0.7)),  # it is rounded below 0.7
        (Box(0.1, 0.1, (1,), np.float64), np.float32(0.1)),  # it is rounded above 0.1
        (Box(101300.1, 101350.1, (1,), np.float64), np.float32(101350.1)),
    ],
)
def test_an_action_beside_a_bound_by_rounding_is_clipped(space, action):
    scripted = ScriptedEnv([(9, "terminated")], space)
    env = environment(scripted)
    env.reset()
    env.step([[action]])
    assert scripted.action_space.contains(scripted.actions[0])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_continuous_actions_are_float32_outside_and_of_their_dtype_inside(dtype):
    scripted = ScriptedEnv([(9, "terminated")], Box(-0.1, 0.7, (2,), dtype))
    env = environment(scripted)
    spec = env.action_spec()
    assert spec.dtype == tf.float32
    env.reset()
    for action in (spec.minimum, spec.maximum, [0.25, 0.5]):
        env.step(tf.constant([action]))
    assert all(action.dtype == dtype for action in scripted.actions)
    assert all(scripted.action_space.contains(action) for action in scripted.actions)
    assert scripted.actions[2].tolist() == [0.25, 0.5]


def test_an_action_of_another_shape_is_refused():
    env = environment(ScriptedEnv([(9, "terminated")]))
    env.reset()
    with pytest.raises(ValueError, match="incompatible"):
        env.step([0, 0])


@pytest.mark.parametrize(
    ("which", "space"),
    [
        ("observation", Text(9)),
        ("observation", Dict(a=Text(9))),
        ("observation", Box(0, 1, (0,))),
        ("action", Box(0, 1, (0,))),
        ("action", Box(0, 1, (2, 0), np.int64)),
        ("action", Dict(a=Discrete(2))),
        ("action", Text(9)),
    ],
)
def test_other_spaces_are_refused_by_name(which, space):
    observation_space: Space = Box(0, 1, (1,))
    action_space: Space = Discrete(2)
    if which == "observation":
        observation_space = space
    else:
        action_space = space
    with pytest.raises(UserError) as error:
        environment(EchoEnv(observation_space, action_space))
    assert f"the {which} space {space} is not supported" in str(error.value)


def test_keys_that_give_two_arrays_one_path_in_a_checkpoint_are_refused():
    one = Box(0, 1, (1,))
    message = r"observation\['a'\]\['b'\] and observation\['a/b'\] have the same path 'a/b'"
    with pytest.raises(UserError, match=message):
        specs.observation_spec(Dict({"a": Dict(b=one), "a/b": one}), "mine")


def test_a_type_of_numbers_that_tensorflow_lacks_is_named():
    space = Box(-1, 1, (2,), np.longdouble)
    with pytest.raises(UserError, match="mine: the space .* has a dtype that TensorFlow lacks"):
        specs.observation_spec(space, "mine")
