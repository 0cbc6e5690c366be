"""Tests that gin may bind only settings of a run that are used and possible."""

import re

import gin
import pytest
import tensorflow as tf
from tiny_runs import bindings, gin_files

from pipeline import configuration
from pipeline.agents.dqn import DqnAgent
from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.training import train_loop
from pipeline.training.train_loop import train
from pipeline.utils.errors import UserError
from pipeline.utils.shutdown import StopSignal

EVERYTHING = [
    "agents/dqn",
    "agents/ppo",
    "agents/sac",
    "environments/gymnasium",
    "environments/atari_openai",
]
SPECS_AND_SEED = ("time_step_spec", "action_spec", "num_envs", "seed", "env_steps")
SPECS_OF_EXPERIENCE = ("data_spec", "num_envs", "sequence_length", "seed", "training_spec")
SET_BY_THE_PROGRAM = {
    "train": ("root_dir", "seed", "restart_behavior", "stop", "dry_run", "execution"),
    "configure_tensorflow": ("execution",),
    "RewardScaler": ("num_envs", "discount"),
    "Evaluator": ("environment", "policy", "stochastic_policy", "seed"),
    "CollectDriver": ("environment", "seed"),
    "gymnasium_environment": ("seed", "render"),
    "atari_environment": ("seed", "render"),
    "create_dqn_agent": SPECS_AND_SEED,
    "create_ppo_agent": SPECS_AND_SEED,
    "create_sac_agent": SPECS_AND_SEED,
    "ActorCritic": ("observation_spec", "action_spec"),
    "ReplayBuffer": SPECS_OF_EXPERIENCE,
    "Rollout": SPECS_OF_EXPERIENCE,
    "small_cnn_encoder": ("side",),
}


def message_of(function, *arguments):
    with pytest.raises(UserError) as caught:
        function(*arguments)
    return configuration.explain_call_error(caught.value)


@pytest.mark.usefixtures("any_config")
@pytest.mark.parametrize(
    ("runner", "said"),
    [
        (lambda seed, *factories: None, "train.runner = @.*: returned None instead of a Component"),
        (lambda seed: None, "train.runner = @.*: too many positional arguments"),
    ],
)
def test_a_runner_of_another_kind_is_named(tmp_path, runner, said):
    configuration.load(gin_files("dqn"), bindings("dqn"))
    with gin.unlock_config():
        gin.bind_parameter("train.runner", runner)
    for start in (train_loop.build_bound, lambda seed: train(tmp_path, seed, "fail", StopSignal())):
        assert re.search(said, message_of(start, 1))


@pytest.mark.usefixtures("any_config")
def test_environments_are_closed_of_a_run_that_does_not_begin(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(VectorEnvironment, "close", lambda self: closed.append(self))
    configuration.load(gin_files("ppo"), bindings("ppo"))
    (tmp_path / "run.json").write_text("{}")
    train(str(tmp_path), 1, "fail", StopSignal(), dry_run=True)
    assert len(closed) == 2  # those of training and evaluation
    message_of(train, str(tmp_path), 1, "fail", StopSignal())
    assert len(closed) == 4


@pytest.mark.parametrize("warm_up", [100, 250])
def test_a_warm_up_that_leaves_nothing_to_train_is_refused(tmp_path, warm_up):
    lengths = {"train__num_env_steps": 100, "initialize_replay_buffer__num_env_steps": warm_up}
    configuration.load(gin_files("dqn"), bindings("dqn", **lengths))
    said = message_of(train, str(tmp_path / "run"), 1, "resume", StopSignal())
    assert "train.num_env_steps = 100 includes the warm-up" in said
    assert f"initialize_replay_buffer.num_env_steps = {warm_up} leaves nothing to train" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("any_config")
def test_a_warm_up_that_the_buffer_does_not_keep_is_refused(tmp_path):
    lengths = {"train__num_env_steps": 500, "initialize_replay_buffer__num_env_steps": 301}
    configuration.load(gin_files("dqn"), bindings("dqn", **lengths))
    said = message_of(train, str(tmp_path / "run"), 1, "resume", StopSignal())
    assert "num_env_steps = 301, but ReplayBuffer.capacity = 300 keeps only the last" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("any_config")
@pytest.mark.parametrize(
    ("algorithm", "overrides", "told"),
    [
        ("a3c", {"asynchronous_runner__use_locking": True}, ["asynchronous_runner.use_locking"]),
        (
            "dqn",
            {"Evaluator__num_env_steps": 50},
            ["train.num_eval_episodes", "train.num_final_episodes"],
        ),
        (
            "sac",
            {
                "create_sac_agent__alpha_learning_rate": 0,
                "create_sac_agent__target_entropy": -2.0,
            },
            ["create_sac_agent.target_entropy"],
        ),
    ],
)
def test_what_has_no_effect_is_told(tmp_path, algorithm, overrides, told):
    configuration.load(gin_files(algorithm), bindings(algorithm, **overrides))
    train(str(tmp_path / "run"), 1, "resume", StopSignal(), dry_run=True)
    assert [text.split()[0] for text in configuration.warnings()] == told


@pytest.mark.usefixtures("any_config")
def test_defaults_of_training_are_in_force_and_told(tmp_path):
    configuration.load(gin_files("dqn"), [x for x in bindings("dqn") if "log_interval" not in x])
    train(str(tmp_path), 1, "resume", StopSignal(), dry_run=True)
    assert "train.log_interval = 1000\n" in configuration.operative_config()


@pytest.mark.usefixtures("any_config")
def test_memory_that_does_not_suffice_is_named(tmp_path, monkeypatch):
    def fail(*arguments):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating [9]\n in node")

    monkeypatch.setattr(train_loop.HostLoop, "train", fail)
    configuration.load(gin_files("ppo"), bindings("ppo"))
    said = message_of(train, str(tmp_path), 1, "resume", StopSignal())
    assert "does not suffice (OOM when allocating [9]). Make ReplayBuffer.batch_size" in said


@pytest.mark.usefixtures("any_config")
def test_a_schedule_that_fails_later_is_named(tmp_path):
    def table(counter):
        return tf.gather([0.1, 0.2], counter // 100)

    configuration.load(gin_files("dqn"), bindings("dqn", train__num_env_steps=200))
    with gin.unlock_config():
        gin.bind_parameter("create_dqn_agent.epsilon", table)
    said = message_of(train, str(tmp_path), 1, "resume", StopSignal(), True)
    assert "the schedule of the epsilon raised after 200 environment steps: InvalidArg" in said


@pytest.mark.usefixtures("any_config")
def test_losses_need_names_of_their_own(tmp_path, monkeypatch):
    names = ("loss", "epsilon", "episodes", "policy_share", "q_mean")
    monkeypatch.setattr(DqnAgent, "loss_names", names)
    configuration.load(gin_files("dqn"), bindings("dqn"))
    said = message_of(train, str(tmp_path), 1, "resume", StopSignal(), True)
    assert "more than one value named epsilon, episodes, policy_share. Give the loss" in said


@pytest.mark.parametrize(
    "name", [f"{owner}.{name}" for owner, names in SET_BY_THE_PROGRAM.items() for name in names]
)
def test_what_the_program_passes_cannot_be_bound(name):
    instead = {
        "root_dir": "use --root_dir",
        "seed": "use --seed",
        "restart_behavior": "use --restart_behavior",
        "dry_run": "use --explain",
        "execution": "use --eager or --exact_graph",
        "num_envs": "bind that of the environment, such as gymnasium_environment.num_envs",
        "render": "pipeline.evaluate --video=FILE.mp4 renders an episode",
    }
    why = instead.get(name.rpartition(".")[2], "the program sets it")
    message = message_of(configuration.load, EVERYTHING, [f"{name} = 1"])
    assert message == f"--gin_bindings: {name} cannot be bound: {why}."


@pytest.mark.parametrize("name", ["DqnAgent.td_errors_loss_fn", "SacAgent.reward_scale_factor"])
def test_what_belongs_to_tf_agents_cannot_be_bound(name):
    message = message_of(configuration.load, EVERYTHING, [f"{name} = 1"])
    assert f"{name} cannot be bound, because this program does not use" in message


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("num_env_steps", 0, 1),
        ("log_interval", -1, 0),
        ("eval_interval", -1, 0),
        ("checkpoint_interval", -10_000, 0),
        ("num_eval_episodes", 0, 1),
        ("num_final_episodes", 0, 1),
    ],
)
@pytest.mark.parametrize("dry_run", [True, False])
def test_numbers_that_are_too_small_are_refused(tmp_path, name, value, least, dry_run):
    configuration.load(gin_files("ppo"), bindings("ppo", **{f"train__{name}": value}))
    root_dir = tmp_path / "run"
    message = message_of(train, root_dir, 1, "resume", StopSignal(), dry_run)
    assert message == f"train.{name} = {value}: must be a whole number, at least {least}."
    assert not root_dir.exists()


@gin.configurable(module="train_loop_test")
def falling_schedule(counter, slope=1.0):
    return 1e-3 * (1.0 - slope * tf.cast(counter, tf.float32) / 300.0)


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        (
            "learning_rate = @falling_schedule",
            "learning_rate is -.* after .*: must be finite and at",
        ),
        (
            "epsilon = @falling_schedule\nfalling_schedule.slope = -1e6",
            "epsilon is .* in \\[0, 1\\]",
        ),
        ("learning_rate = @falling_schedule\nfalling_schedule.slope = 1e38", "is -|is nan"),
    ],
)
@pytest.mark.usefixtures("any_config")
def test_a_schedule_that_leaves_its_range_is_refused(binding, message):
    configuration.load(gin_files("dqn"), bindings("dqn"))
    with gin.unlock_config():
        gin.parse_config(f"create_dqn_agent.{binding}")
    with pytest.raises(UserError, match=message):
        train(None, 1, "fail", StopSignal(), dry_run=True)
