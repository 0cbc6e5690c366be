import inspect
import itertools
import json
import pathlib
import shutil
import textwrap
import threading
import types
from concurrent import futures
from typing import Any

import gin
import gymnasium
import numpy as np
import pytest
import tensorflow as tf
from conftest import ROOT
from gymnasium.spaces import Box, Dict, Discrete
from numpy_references import dense_layers
from scripted_environments import EchoEnv, SamplingEnv, environment
from tf_agents.policies import tf_policy
from tf_agents.trajectories import policy_step

import pipeline
from pipeline import configuration, saved_policy
from pipeline.acting.policies import RandomPolicy
from pipeline.checkpointing import manifest
from pipeline.checkpointing.checkpoints import Restored
from pipeline.exported_policy import load_export
from pipeline.networks import encoders
from pipeline.runs.saved_run import SavedRun
from pipeline.saved_policy import RestoredAgent, SavedPolicy, load_policy
from pipeline.utils.errors import UserError


@pytest.fixture(scope="module")
def policy(finished_run):
    return pipeline.load_policy(finished_run.root_dir)


@pytest.fixture(scope="module")
def observations():
    return np.random.default_rng(0).normal(0, 2, (64, 4)).astype(np.float32)


class FirstNumberPolicy(tf_policy.TFPolicy):
    """Policy whose action is the sum of the observation; it counts its traces."""

    traces = 0

    def _variables(self):
        return []

    def _action(self, time_step, policy_state, seed):
        self.traces += 1
        flat = tf.reshape(time_step.observation, [tf.shape(time_step.step_type)[0], -1])
        sums = tf.reduce_sum(tf.cast(flat, self.action_spec.dtype), axis=1)
        shape = [-1] + [1] * self.action_spec.shape.rank
        action = tf.reshape(sums, shape) + tf.zeros(self.action_spec.shape, self.action_spec.dtype)
        return policy_step.PolicyStep(action, policy_state, ())


def saved(policy, observation_space, action_space):
    """Returns a `SavedPolicy` of an agent with this policy."""
    agent: Any = types.SimpleNamespace(
        policy=policy,
        collect_policy=policy,
        time_step_spec=policy.time_step_spec,
        submodules=(),
    )
    restored = Restored(pathlib.Path(), 0, [])
    return SavedPolicy(RestoredAgent(agent, observation_space, action_space, restored))


def summing(observation_space, action_space):
    env = environment(EchoEnv(observation_space, action_space))
    policy = FirstNumberPolicy(env.time_step_spec(), env.action_spec(), clip=False)
    return saved(policy, observation_space, action_space), policy


@pytest.mark.parametrize("used", ["float32", "mixed_bfloat16"])
def test_a_policy_computes_in_the_precision_of_its_training(tmp_path, monkeypatch, used):
    """`"auto"` chooses by the machine, which may be another one now."""
    monkeypatch.setattr(encoders, "has_bfloat16", lambda: used == "float32")
    run = tmp_path / "run"
    shutil.copytree(ROOT / "pipeline" / "pretrained" / "ppo_pong_fast", run)
    config, description = run / "operative_config.gin", run / "run.json"
    config.write_text(config.read_text().replace("policy = 'float32'", "policy = 'auto'"))
    start = json.loads(description.read_text())
    description.write_text(json.dumps({**start, "encoder_precision": used}))
    write, _ = load_export(SavedRun(run), False, "run")
    write(tmp_path / "small")
    for folder in (run, tmp_path / "small"):
        agent: Any = pipeline.load_policy(folder).agent
        policies = {getattr(x, "compute_dtype", None) for x in agent.submodules if _is_conv(x)}
        assert policies == {used.removeprefix("mixed_")}


def _is_conv(module):
    return isinstance(module, tf.keras.layers.Conv2D)


def test_the_warning_of_a_damaged_checkpoint_is_shown(finished_run, tmp_path):
    run = shutil.copytree(finished_run.root_dir, tmp_path / "run")
    newest = max((run / "checkpoints").glob("step-*"))
    (newest / "agent" / "variables.index").write_bytes(b"")
    with pytest.warns(match=f"{newest.name} is damaged"):
        pipeline.load_policy(run)
    for name in ("run", "saved_model"):
        _, lines = load_export(SavedRun(run), False, name)
        assert lines[0].startswith(f"warning: {newest.name} is damaged")


def test_an_older_checkpoint_has_the_configuration_of_its_training(finished_run, tmp_path):
    run = shutil.copytree(finished_run.root_dir, tmp_path / "run")
    first, *_, last = (int(x.name.split("-")[1]) for x in sorted(run.glob("checkpoints/step-*")))
    text = (run / "operative_config.gin").read_text()
    (run / f"operative_config.until-{first}.gin").write_text(text + "\n# the first\n")
    (run / "operative_config.until-0.gin").write_text("# of no checkpoint\n")
    assert SavedRun(run, first).config.endswith("# the first\n")
    assert SavedRun(run, last).config == SavedRun(run).config == text


@gin.configurable(module="saved_policy_test")
def always(env_steps, rate=0.0):
    return tf.constant(rate)


def test_what_is_read_while_a_policy_is_traced_is_that_of_the_run(finished_run, observations):
    bindings = ["create_dqn_agent.epsilon = @always", "always.rate = 1.0"]
    policy = load_policy(SavedRun(str(finished_run.root_dir)), False, bindings)
    actions = [policy.predict(observations[:1], seed) for seed in range(50)]
    assert 10 < np.sum(actions) < 40  # half of the random actions are 1


def test_categories_and_integers_are_taken_as_the_environment_gives_them():
    space = Dict(place=Discrete(4, start=1), bytes=Box(0, 255, (2,), np.uint8))
    env = environment(SamplingEnv(space))
    constant = RandomPolicy(env.time_step_spec(), env.action_spec())
    policy = saved(constant, space, env.action_space)
    one = {"place": 4, "bytes": np.array([3, 255]), "text": "is not seen"}
    assert np.shape(policy.predict(one)) == ()
    two = {"place": np.array([1, 4]), "bytes": np.zeros((2, 2), np.int32)}
    assert np.shape(policy.predict(two)) == (2,)
    for part, message in (
        ({"place": 5}, "'place'.* holds a value that is not in its space"),
        (
            {"bytes": np.array([3, 256])},
            "'bytes'.* holds integers from 3 to 256, which do not fit into uint8",
        ),
        ({"bytes": np.zeros(2)}, "'bytes'.* has dtype float64"),
        ({"place": np.array([1, 2])}, "different batch sizes"),
    ):
        with pytest.raises(ValueError, match=message):
            policy.predict(one | part)
    with pytest.raises(ValueError, match="missing, or is no array.*without the info of env.reset"):
        policy.predict((one, {}))
    with pytest.raises(ValueError, match="'place'.* is missing"):
        policy.predict({"bytes": np.array([3, 255])})


# Policies of a run.


def documented_example():
    paragraphs = (inspect.getdoc(pipeline.load_policy) or "").split("\n\n")
    examples = [text for text in paragraphs if text.startswith("Example:\n")]
    return textwrap.dedent(examples[0].removeprefix("Example:\n"))


def test_example_of_the_documentation(finished_run, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "dqn_cartpole").symlink_to(finished_run.root_dir)
    monkeypatch.chdir(tmp_path)
    code = documented_example()
    assert 'load_policy("runs/dqn_cartpole")' in code
    assert code in (ROOT / "README.md").read_text().replace("\n\n", "\n")
    assert len([line for line in code.splitlines() if not line.startswith("import")]) == 6
    names: dict = {}
    exec(code, names)
    assert names["env"].unwrapped.steps_beyond_terminated is not None or names["truncated"]


def test_greedy_actions_are_the_agents(finished_run, observations, policy):
    """Checks the actions with only NumPy and the weights of the checkpoint."""
    newest = max((finished_run.root_dir / "checkpoints").glob("step-*"))
    reader = tf.train.load_checkpoint(str(newest / "agent" / "variables"))
    names = reader.get_variable_to_shape_map()

    def read(part, kind):
        found = [x for x in names if part in x and f"/{kind}/" in x and "SLOT" not in x]
        return [reader.get_tensor(name) for name in sorted(found)]

    (mean,), (variance,) = read("/normalizer/", "mean"), read("/normalizer/", "variance")
    normalized = np.clip((observations - mean) / np.sqrt(variance + 1e-8), -10, 10)
    # Sorted by name: the encoder's layers, then the head's.
    layers = zip(read("/_q_network/", "kernel"), read("/_q_network/", "bias"), strict=True)
    q_values = dense_layers(normalized, [*itertools.chain(*layers)])
    assert len({*np.argmax(q_values, 1)}) == 2
    np.testing.assert_array_equal(policy.predict(observations), np.argmax(q_values, 1))
    ours, _ = policy.agent.q_network(tf.constant(observations))
    np.testing.assert_allclose(ours, q_values, 1e-4, 1e-4)


def test_one_observation_or_a_batch(policy, observations):
    batch = policy.predict(observations)
    assert (batch.shape, batch.dtype) == ((64,), np.int64)
    for observation, action in zip(observations[:8], batch[:8], strict=True):
        one = policy.predict(observation)
        assert (np.shape(one), one) == ((), action)
        assert policy.action_space.contains(one)


def test_actions_go_straight_into_the_environment(policy):
    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=1)
    assert env.step(policy.predict(observation))[0].shape == (4,)
    vector_env = gymnasium.make_vec("CartPole-v1", 3)
    observation, _ = vector_env.reset(seed=1)
    assert vector_env.step(policy.predict(observation))[0].shape == (3, 4)


def test_seed_draws_from_the_policy_that_collected(policy, observations):
    batch = np.repeat(observations[:1], 2000, axis=0)
    drawn = [policy.predict(batch, seed=seed) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert (drawn[0] != drawn[2]).any()
    # Epsilon falls from 1 to 0.04 in 8,000 steps; half of the random actions are the greedy one.
    epsilon = 1 - 0.96 * policy.env_steps / 8_000
    other = np.mean(drawn[0] != policy.predict(batch))
    assert other == pytest.approx(epsilon / 2, abs=0.05)


def test_checkpoint_is_chosen_and_nothing_is_written(finished_run, policy):
    steps = [int(path.name[5:15]) for path in finished_run.root_dir.glob("checkpoints/step-*")]
    assert policy.env_steps == max(steps)
    before = {path: path.stat().st_mtime_ns for path in finished_run.root_dir.rglob("*")}
    first = pipeline.load_policy(finished_run.root_dir, checkpoint=min(steps))
    assert first.env_steps == min(steps) < max(steps)
    assert {p: p.stat().st_mtime_ns for p in finished_run.root_dir.rglob("*")} == before


def test_the_best_checkpoint_need_not_be_the_newest(finished_run, tmp_path):
    run = shutil.copytree(finished_run.root_dir, tmp_path / "run")
    oldest, *_, newest = sorted(run.glob("checkpoints/step-*"))
    header = manifest.header_of(oldest) | {"return_mean": 501.0}
    (oldest / "manifest.json").unlink()
    manifest.seal(oldest, header)
    assert pipeline.load_policy(str(run), "best").env_steps == int(oldest.name[5:15])
    assert pipeline.load_policy(str(run)).env_steps == int(newest.name[5:15])


@pytest.mark.parametrize(
    ("folder", "message"),
    [("nowhere", "there is no run .*/nowhere"), ("empty", "/empty holds no run")],
)
def test_no_run(tmp_path, folder, message):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=message):
        pipeline.load_policy(tmp_path / folder)


def test_weights_of_another_network_are_refused(finished_run, tmp_path):
    run = shutil.copytree(finished_run.root_dir, tmp_path / "run")
    config = run / "operative_config.gin"
    changed = config.read_text().replace("mlp_encoder.units = (8,)", "mlp_encoder.units = (9,)")
    config.write_text(changed)
    with pytest.raises(UserError, match=r"does not fit.*\[8\].* \[9\]"):
        pipeline.load_policy(run)


def test_gin_is_left_as_it_was(finished_run):
    configuration.load(["ppo_cartpole"], ["train.num_env_steps = 7"])
    config, explained = gin.config_str(), configuration.explain()
    pipeline.load_policy(finished_run.root_dir)
    assert (gin.config_str(), configuration.explain()) == (config, explained)
    with gin.unlock_config():
        gin.clear_config()
    gin.finalize()
    with pytest.raises(UserError):
        pipeline.load_policy(finished_run.root_dir, checkpoint=1)
    pipeline.load_policy(finished_run.root_dir)
    assert gin.config_is_locked()
    assert gin.config_str() == ""
    gin.clear_config()


def test_threads_load_policies_one_after_the_other(monkeypatch):
    loading = threading.Lock()
    restore = saved_policy.restore_agent

    def restore_alone(run):
        assert loading.acquire(blocking=False)
        try:
            return restore(run)
        finally:
            loading.release()

    monkeypatch.setattr(saved_policy, "restore_agent", restore_alone)
    with futures.ThreadPoolExecutor(2) as pool:
        names = ("pretrained:dqn_acrobot", "pretrained:ppo_cartpole")
        observations = [np.zeros([6], np.float32), np.zeros([4], np.float32)]
        policies = pool.map(pipeline.load_policy, names)
        for policy, observation in zip(policies, observations, strict=True):
            policy.predict(observation)


# Spaces.


def test_discrete_actions_start_where_their_space_starts():
    policy, _ = summing(Box(0, 9, (), np.float32), Discrete(5, start=-2))
    np.testing.assert_array_equal(policy.predict(np.arange(5.0)), [-2, -1, 0, 1, 2])
    assert policy.predict(4.0) == 2
    assert policy.action_space.contains(policy.predict(4.0))


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_continuous_actions_are_clipped(shape):
    space = Box(-1, 2, shape, np.float32)
    policy, _ = summing(Box(-9, 9, (2,), np.float32), space)
    actions = policy.predict([[-5, 0], [0, 0.5], [1, 5]])
    assert (actions.shape, actions.dtype) == ((3, *shape), np.float32)
    np.testing.assert_array_equal(actions.reshape(3, -1)[:, 0], [-1, 0.5, 2])
    one = np.asarray(policy.predict([1, 5]))
    assert space.contains(one)


def test_images_keep_their_dtype():
    policy, _ = summing(Box(0, 255, (4, 84, 84), np.uint8), Discrete(3))
    image = np.zeros((4, 84, 84), np.uint8)
    image[0, 0, 0] = 2
    assert policy.predict(image) == 2
    assert policy.predict(image[None]).shape == (1,)
    with pytest.raises(ValueError, match="dtype float64; the agent takes uint8"):
        policy.predict(image / 255)


@pytest.mark.parametrize(
    ("space", "number", "dtype"),
    [
        (Box(0, 255, (2,), np.uint8), 300, np.uint16),
        (Box(0, 255, (2,), np.uint8), -1, np.int64),
        (Box(-100, 100, (2,), np.int8), 300, np.int16),
        (Box(0, 60_000, (2,), np.uint16), 70_000, np.uint32),
    ],
    ids=str,
)
def test_integers_that_would_change_are_refused(space, number, dtype):
    policy, _ = summing(space, Discrete(3))
    assert policy.predict(np.array([1, 1], dtype)) == 2
    with pytest.raises(ValueError, match=f"which do not fit into {space.dtype}"):
        policy.predict(np.array([number, 0], dtype))


def test_traced_once_for_all_batches():
    policy, agents_policy = summing(Box(-9, 9, (2,), np.float32), Discrete(9))
    for observation in (np.zeros(2), np.zeros((1, 2)), np.zeros((7, 2), int), [0, 0]):
        policy.predict(observation)
    policy.predict(np.zeros(2), seed=1)
    policy.predict(np.zeros((3, 2)), seed=2)
    assert agents_policy.traces == 2


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (np.zeros(3), r"shape \(3,\)\. Pass shape \(4,\), or \(batch size, 4\)"),
        (np.zeros((2, 3)), r"shape \(2, 3\)"),
        (np.zeros((1, 1, 4)), r"shape \(1, 1, 4\)"),
        (np.float32(1), r"shape \(\)"),
        (np.zeros(4, complex), "dtype complex128; the agent takes float32"),
        (np.array(list("word")), "dtype <U1; the agent takes float32"),
        ([0, np.nan, 0, 0], "holds NaN, infinity, or a number too large for float32"),
        ([0, 0, np.inf, 0], "holds NaN, infinity, or a number too large for float32"),
        ([0, 0, 0, 1e300], "holds NaN, infinity, or a number too large for float32"),
    ],
)
def test_other_observations_are_refused(policy, observation, message):
    with pytest.raises(ValueError, match=message):
        policy.predict(observation)
