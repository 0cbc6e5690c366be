from typing import Any

import gin
import numpy as np
import pytest
import tensorflow as tf
from tiny_runs import bindings, build_components, gin_files, variables

from pipeline import configuration
from pipeline.acting.collect_driver import CollectDriver, initial_carry
from pipeline.replay.replay_buffer import ReplayBuffer
from pipeline.replay.rollout import Rollout
from pipeline.training.components import (
    build,
    build_evaluation_environment,
    build_experience,
    configure_tensorflow,
)
from pipeline.utils.errors import UserError

PARTS = ("create_environment", "create_agent", "create_experience")


def load(algorithm):
    configuration.load(gin_files(algorithm), bindings(algorithm))


def references():
    return [gin.query_parameter(f"train.{name}").scoped_configurable_fn for name in PARTS]


@pytest.mark.parametrize("algorithm", ["dqn", "sac", pytest.param("ppo", marks=pytest.mark.crash)])
def test_weights_follow_from_the_seed_alone(algorithm):
    first = variables(build_components(algorithm, seed=1).agent)
    tf.random.set_seed(99)  # the earlier state of the process does not matter
    tf.random.normal([3])
    again, other = (variables(build_components(algorithm, seed=seed).agent) for seed in (1, 2))
    kernels = [name for name in first if "kernel" in name and "optimizer" not in name]
    assert kernels
    for name in first:
        assert (first[name] == again[name]).all(), name
    for name in kernels:
        assert (first[name] != other[name]).any() or not first[name].any(), name


def test_the_parts_fit_each_other_and_no_environment_is_reset_or_stepped():
    parts = build_components("dqn")
    assert parts.environment.episodes.resets == 0
    assert parts.environment.seconds == 0
    assert parts.environment.batch_size == 2
    assert parts.experience.collect_steps * 2 == 4 * parts.experience.num_batches
    assert parts.agent.train_sequence_length == 3  # n_step = 2, and the row to bootstrap from
    assert int(parts.env_steps) == int(parts.agent.train_step_counter) == 0


@pytest.mark.parametrize(
    ("algorithm", "dtype"),
    [
        *(("dqn", x) for x in ("bool", "uint32", "int64", "float64")),
        *(
            pytest.param("dqn", x, marks=pytest.mark.crash)
            for x in ("int8", "int16", "uint16", "uint64", "float16")
        ),
        *(
            pytest.param(name, dtype, marks=[pytest.mark.crash] * (dtype != often))
            for name, often in (("sac", "bool"), ("nstep_q", "int64"), ("ppo", "float16"))
            for dtype in ("bool", "int64", "float16")
        ),
    ],
)
def test_whatever_a_box_may_hold_can_be_learnt_from(algorithm, dtype):
    kwargs = {"dtype": dtype, "continuous": algorithm == "sac"}
    overrides: dict[str, Any] = {"gymnasium_environment__kwargs": kwargs}
    if algorithm == "nstep_q":
        overrides["create_nstep_q_agent__accumulate_updates"] = 1
    parts = build_components(algorithm, **overrides)
    until = tf.constant(40, tf.int64)
    two = tf.constant(2, tf.int64)  # the second iteration uses statistics that the first updated
    tf.config.run_functions_eagerly(True)  # tracing would take most of the time
    try:
        state = parts.runner.initial_state()
        if parts.experience.keeps_rows:
            state = parts.runner.collect_randomly(state, until, until)
        parts.runner.train(state, two, until + 40)
    finally:
        tf.config.run_functions_eagerly(False)
    assert int(parts.agent.train_step_counter) > 0


@pytest.mark.parametrize("algorithm", ["a2c", "nstep_q", "trpo"])
@pytest.mark.parametrize(
    "overrides", [{"Rollout__num_epochs": 2}, {"Rollout__minibatch_size": 2}], ids=str
)
def test_agents_that_learn_from_whole_rollouts_get_nothing_else(algorithm, overrides):
    with pytest.raises(UserError, match="bind .* Rollout.minibatch_size = None"):
        build_components(algorithm, **overrides)


@pytest.mark.parametrize(
    "algorithm, store, message",
    [
        ("dqn", Rollout, "sequences of 3 rows: bind train.create_experience = @ReplayBuffer"),
        ("ppo", ReplayBuffer, "advantages: bind train.create_experience = @Rollout"),
    ],
)
def test_a_store_that_an_agent_cannot_learn_from_is_refused(algorithm, store, message):
    agent = build_components(algorithm).agent
    gin.bind_parameter("ReplayBuffer.capacity", 100)
    gin.bind_parameter("Rollout.minibatch_size", 64)
    with pytest.raises(UserError, match=message):
        build_experience(agent, num_envs=2, seed=1, create_experience=store)


def test_schedules_read_the_counter_that_the_loop_moves():
    parts = build_components("dqn")
    weights = parts.agent.gradient_variables()
    for env_steps, rate in ((0, 1e-3), (500, 1e-4)):
        parts.env_steps.assign(env_steps)
        before = weights[0].numpy()
        parts.agent.apply([tf.ones_like(x) for x in weights])  # Adam moves all weights by the rate
        np.testing.assert_allclose(before - weights[0], rate, rtol=1e-2)


def test_evaluation_has_its_own_bindings_and_never_the_seeds_of_training():
    gin_lines = {"evaluation/gymnasium_environment.num_envs": 5}
    parts = build_components("dqn", **gin_lines)
    evaluation = parts.evaluator.environment
    assert evaluation.batch_size == 5
    assert parts.environment.batch_size == 2
    seeds = [
        {x.env.unwrapped.np_random_seed for x in environment.episodes.vector.vector.envs}
        for environment in (parts.environment, evaluation)
        if environment.reset() is not None
    ]
    assert [len(x) for x in seeds] == [2, 5]
    assert seeds[0].isdisjoint(seeds[1])


@pytest.mark.parametrize(
    ("algorithm", "files"), [("ppo", ()), ("a3c", ()), ("dqn", ("runners/distributed",))]
)
def test_no_two_drivers_draw_the_same_random_numbers(algorithm, files, monkeypatch):
    seeds, initialize = [], CollectDriver.__init__

    def noted(self, *args, seed, **kwargs):
        seeds.append(tuple(np.ravel(seed)))
        initialize(self, *args, seed=seed, **kwargs)

    monkeypatch.setattr(CollectDriver, "__init__", noted)
    build_components(algorithm, files=files).close()
    assert len(set(seeds)) == len(seeds) > 1


def test_the_evaluation_environment_takes_further_arguments():
    load("dqn")
    create_environment = references()[0]
    assert build_evaluation_environment(1, create_environment, num_envs=3).batch_size == 3


def test_evaluation_rewards_are_never_clipped():
    parts = build_components("dqn", CollectDriver__reward_range=(-1.0, 1.0))
    policy = parts.agent.collect_policy
    carry = initial_carry(parts.environment, policy)
    _, rows = CollectDriver(parts.environment, seed=1).run(policy, carry, 3)
    assert rows.reward.numpy().max() == 1
    assert set(parts.evaluator.run(4, 0)["returns"]) == {3 * 7, 3 * 11}


def test_threads_are_those_in_force(monkeypatch):
    calls = []
    threading = tf.config.threading
    for kind in ("intra_op", "inter_op"):
        monkeypatch.setattr(threading, f"get_{kind}_parallelism_threads", lambda: 3)
        monkeypatch.setattr(
            threading,
            f"set_{kind}_parallelism_threads",
            lambda number, kind=kind: calls.append((kind, number)),
        )
    assert configure_tensorflow(3, 1)["threads"] == {"intra_op": 3, "inter_op": 1}
    # TensorFlow would refuse to set a value again once it has run an operation.
    assert calls == [("inter_op", 1)]


@pytest.mark.parametrize("name", ["intra_op", "inter_op"])
@pytest.mark.parametrize("value", [-1, 1.5])
def test_what_is_no_number_of_threads_is_refused(monkeypatch, name, value):
    for kind in ("intra", "inter"):  # the real setters would abort this process
        setter = f"set_{kind}_op_parallelism_threads"
        monkeypatch.setattr(tf.config.threading, setter, lambda count: None)
    message = rf"configure_tensorflow.{name} = {value}: must be a whole number, at least 0"
    with pytest.raises(UserError, match=message):
        configure_tensorflow(**{name: value})


@pytest.mark.parametrize(
    ("part", "factory", "message"),
    [
        ("create_agent", lambda *specs, **others: None, "create_agent = @.*: returned None"),
        ("create_agent", lambda *specs, num_envs: None, "unexpected keyword argument 'seed'"),
        (
            "create_experience",
            lambda *spec, **others: None,
            "create_experience = @.*: returned None",
        ),
        ("create_environment", lambda: None, "create_environment = @.*: too many positional"),
        ("create_environment", lambda seed: "CartPole-v1", "'CartPole-v1' instead of a VectorEnv"),
    ],
)
def test_factories_of_another_kind_are_named(part, factory, message):
    load("dqn")  # binds the other factories
    factories = dict(zip(PARTS, references(), strict=True)) | {part: factory}
    with pytest.raises(UserError, match=message):
        build(1, *factories.values())


def test_the_seed_of_the_run_is_that_of_the_experience():
    load("dqn")
    create_environment, create_agent, create_experience = references()
    seeds = []

    def noting(*specs, seed, **others):
        seeds.append(seed)
        return create_experience(*specs, seed=seed, **others)

    for seed in (1, 2):
        build(seed, create_environment, create_agent, noting).close()
    assert seeds[0] != seeds[1]


def test_an_agent_of_ones_own_must_name_its_parts():
    load("dqn")
    create_environment, create_agent, create_experience = references()

    def without_normalizer(*specs, **others):
        agent = create_agent(*specs, normalize_observations=True, **others)
        agent.trained = {"q_network": agent.trained["q_network"]}
        return agent

    with pytest.raises(UserError, match=r"trained lacks the normaliser.*self\.normalizers\(\)"):
        build(1, create_environment, without_normalizer, create_experience)


@pytest.mark.parametrize("policy", ["mixed_float16", None])
def test_the_keras_policy_of_the_program_changes_no_network(policy):
    tf.keras.mixed_precision.set_global_policy(policy)
    tf.keras.backend.set_floatx("float64")
    try:
        agent = build_components("dqn").agent
        assert tf.keras.mixed_precision.global_policy().name == (policy or "float64")
        tf.keras.backend.set_floatx("float32")
        assert tf.keras.mixed_precision.global_policy().name == (policy or "float32")
    finally:
        tf.keras.backend.set_floatx("float32")
        tf.keras.mixed_precision.set_global_policy(None)
    q_values = agent.trained["q_network"](tf.zeros([1, *agent.time_step_spec.observation.shape]))
    assert q_values[0].dtype == tf.float32


def test_a_factory_of_environments_that_cannot_render_is_named():
    def create(seed: int) -> Any:
        raise AssertionError

    with pytest.raises(UserError, match="create_environment = @.*: got an unexpected .* 'render'"):
        build_evaluation_environment(1, create, render=True)


@pytest.fixture(scope="module")
def dqn():
    """Builds components, of which tests change nothing for good."""
    return build_components("dqn")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (lambda info: info.loss, "OddAgent._loss must return tf_agent.LossInfo"),
        (lambda info: info._replace(extra=()), "OddAgent._loss must return tf_agent.LossInfo"),
        (lambda info: info._replace(loss=info.loss[tf.newaxis]), "returns 'loss' of shape"),
        (
            lambda info: info._replace(extra={**info.extra, "q_mean": tf.zeros([3])}),
            "returns 'q_mean' of shape",
        ),
        (lambda info: info._replace(extra={"loss": info.loss}), "train returns no q_mean"),
    ],
)
def test_losses_of_another_kind_are_named(dqn, found, message, monkeypatch):
    parts, kind = dqn, type(dqn.agent)
    loss = {"_loss": lambda self, *args, **kwargs: found(kind._loss(self, *args, **kwargs))}
    monkeypatch.setattr(parts.agent, "__class__", type("OddAgent", (kind,), loss))
    none = tf.constant(0, tf.int64)
    with pytest.raises(UserError, match=message):
        parts.runner.train(parts.runner.initial_state(), none, none)
