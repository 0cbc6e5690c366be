"""Tests that exported policies give the actions of `load_policy` in their own runtimes."""

import itertools
import pathlib
import re
import shutil
import subprocess
import sys
import types
from typing import Any

import gymnasium
import numpy as np
import pytest
import tensorflow as tf
from conftest import ROOT, combinations, run_binary, user_environment
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from scripted_environments import SamplingEnv
from tiny_runs import build_components

import pipeline
from pipeline.checkpointing.checkpoints import Restored
from pipeline.exported_policy import (
    ExportedPolicy,
    load_export,
    write_onnx,
    write_saved_model,
    write_tflite,
)
from pipeline.ops.normalizers import RunningMoments
from pipeline.runs import pretrained
from pipeline.runs.saved_run import SavedRun
from pipeline.saved_policy import RestoredAgent, SavedPolicy
from pipeline.utils.errors import UserError, WriteError

SPACES = {
    "dqn": (Box(-1, 1, (3,), np.float32), Discrete(4, start=2)),
    "ppo": (
        Dict(flag=Discrete(3), picture=Box(0, 255, (4, 36, 36), np.uint8)),
        MultiDiscrete([2, 3]),
    ),
    "sac": (Box(-1, 1, (3,), np.float64), Box(-0.1, 0.3, (2,), np.float64)),
    "a2c": (
        Dict(
            bits=MultiBinary(3),
            bool=Box(0, 1, (2,), np.bool_),
            half=Box(-1, 1, (2,), np.float16),
            int8=Box(-9, 9, (2,), np.int8),
            int64=Box(-9, 9, (2,), np.int64),
            places=MultiDiscrete([3, 4], start=[1, -1]),
            uint32=Box(0, 9, (2,), np.uint32),
        ),
        Discrete(3),
    ),
}

# Those of PPO and A2C are normalised by the bindings of `tiny_runs`.
NORMALIZED = {
    "dqn": {"create_dqn_agent__normalize_observations": True},
    "sac": {"create_sac_agent__normalize_observations": True},
}
# Episodes to play, and a return that they exceed.
PLAYED = {
    "dqn_acrobot": (20, -90),
    "dqn_mountain_car": (20, -110),
    "ppo_cartpole": (20, 475),
    "ppo_lunarlander_continuous": (20, 200),
    "ppo_lunarlander_tuned": (20, 200),
    "ppo_pong_fast": (1, 10),
    "sac_pendulum": (20, -250),
}
OFTEN = "ppo_cartpole", "ppo_pong_fast", "sac_pendulum"


class SpacesEnv(SamplingEnv):
    def __init__(self, algorithm):
        super().__init__(*SPACES[algorithm])


gymnasium.register("Spaces-v0", entry_point=f"{__name__}:SpacesEnv")


@pytest.fixture(scope="module")
def restored(request):
    """Returns an agent with random weights."""
    parts = build_components(
        request.param,
        gymnasium_environment__name=f"{__name__}:Spaces-v0",
        gymnasium_environment__kwargs={"algorithm": request.param},
        **NORMALIZED.get(request.param, {}),
    )
    parts.close()
    agent = parts.agent
    trained = {id(variable) for variable in tf.nest.flatten(agent.gradient_variables())}
    for number, variable in enumerate(agent.policy.variables()):
        if id(variable) in trained:
            fan_in = np.prod(variable.shape[:-1]) if variable.shape.rank > 1 else 400
            values = np.random.default_rng(number).normal(0, 2 / fan_in**0.5, variable.shape)
            variable.assign(values.astype(variable.dtype.name))
    for moments in agent.submodules:
        if isinstance(moments, RunningMoments):  # converters would drop a mean of 0
            moments.mean.assign(tf.fill(moments.mean.shape, tf.constant(0.25, tf.float64)))
    return RestoredAgent(agent, *SPACES[request.param], Restored(pathlib.Path(), 0, []))


def samples(space, number):
    space.seed(1)
    drawn = [space.sample() for _ in range(number)]
    return tf.nest.map_structure(lambda *leaves: np.stack(leaves), *drawn)


def by_saved_model(path):
    return tf.saved_model.load(str(path)).signatures["serving_default"]


def by_tflite(path):
    return tf.lite.Interpreter(str(path)).get_signature_runner("serving_default")


def by_onnx(path):
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    return lambda **inputs: {"action": session.run(["action"], inputs)[0]}


RUNTIMES = {
    "saved_model": (write_saved_model, by_saved_model),
    "tflite": (write_tflite, by_tflite),
    "onnx": (write_onnx, by_onnx),
}


@pytest.fixture(scope="module")
def played(restored):
    """Returns the action space, batches of observations and the actions of `load_policy`."""
    policy = SavedPolicy(restored)
    batches = [samples(policy.observation_space, number) for number in (1, 20)]
    return policy.action_space, [(batch, np.asarray(policy.predict(batch))) for batch in batches]


@pytest.mark.parametrize(
    ("restored", "name"),
    combinations(
        SPACES,
        RUNTIMES,
        # The program exports DQN to the other formats in a test below.
        often={*itertools.product(SPACES, RUNTIMES)} - {("dqn", "tflite"), ("dqn", "onnx")},
    ),
    indirect=["restored"],
)
def test_each_runtime_returns_the_same_actions(restored, played, name, tmp_path):
    write, runtime = RUNTIMES[name]
    write(ExportedPolicy(SavedPolicy(restored, name != "tflite")), tmp_path / "policy")
    act = runtime(tmp_path / "policy")
    action_space, batches = played
    for batch, expected in batches:
        leaves = batch.items() if isinstance(batch, dict) else [("", batch)]
        inputs = {f"observation_{key}".strip("_"): value for key, value in leaves}
        if name == "saved_model":
            inputs = {key: tf.constant(value) for key, value in inputs.items()}
        actions = np.asarray(act(**inputs)["action"])
        assert actions.dtype == expected.dtype
        np.testing.assert_allclose(actions, expected, rtol=1e-5, atol=1e-6)
        assert all(map(action_space.contains, actions))
    assert len(np.unique(expected)) > 1


@pytest.mark.parametrize(
    ("name", "dtype", "operation", "message"),
    [
        ("tflite", tf.uint64, lambda x: tf.cast(x, tf.float32), r"tf\.Cast\(.*ui64.*"),
        ("onnx", tf.float32, tf.math.log1p, "No Op registered for Log1p.*"),
    ],
)
def test_an_operation_that_a_format_lacks_is_named(name, dtype, operation, message, tmp_path):
    module: Any = tf.Module()
    signature = [tf.TensorSpec([None, 3], dtype, "observation")]
    module.act = tf.function(lambda x: {"action": operation(x)}, signature)
    with pytest.raises(UserError, match=rf"to {name} \({message}\)\. Choose another --format"):
        RUNTIMES[name][0](module, tmp_path / "policy")
    assert list(tmp_path.iterdir()) == []


def test_a_policy_is_converted_in_a_folder_whose_name_looks_like_a_pattern(tmp_path):
    module: Any = tf.Module()
    module.weight = tf.Variable(2.0)
    signature = [tf.TensorSpec([None, 3], tf.float32, "observation")]
    module.act = tf.function(lambda x: {"action": x * module.weight}, signature)
    folder = tmp_path / "run[rate=0.1]"
    folder.mkdir()
    for name in ("tflite", "onnx"):  # TensorFlow cannot load a SavedModel from such a folder
        write, runtime = RUNTIMES[name]
        write(module, folder / name)
        act = runtime(folder / name)
        assert np.array_equal(act(observation=np.ones([1, 3], np.float32))["action"], [[2, 2, 2]])


def test_a_saved_model_is_not_written_where_it_cannot_be_loaded(finished_run, tmp_path):
    output = tmp_path / "run[rate=0.1]" / "policy"
    ended = run_binary("export", f"--root_dir={finished_run.root_dir}", f"--output={output}")
    assert ended.returncode == 2
    assert "cannot load a SavedModel from a path that contains" in ended.stderr
    assert not output.parent.exists()


@pytest.mark.parametrize(("name", "suffix"), [("saved_model", ".onnx"), ("onnx", ".tflite")])
def test_an_output_that_is_named_like_another_format_is_refused(
    finished_run, name, suffix, tmp_path
):
    output = tmp_path / f"policy{suffix}"
    flags = f"--root_dir={finished_run.root_dir}", f"--output={output}", f"--format={name}"
    ended = run_binary("export", *flags)
    assert ended.returncode == 2
    assert f"is not a name for --format={name}. Pass --format={suffix[1:]}, or" in ended.stderr
    assert not output.exists()


PROGRAM = """
import gc, sys
gc.disable()  # The import takes less time.
import numpy as np
import tensorflow as tf
act = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
observation = np.random.default_rng(0).normal(0, 1, (50, 4)).astype(np.float32)
print(act(observation=tf.constant(observation))["action"].numpy().tolist())
assert not any(name.startswith(("pipeline", "tf_agents")) for name in sys.modules)
"""


def test_the_program_exports_what_tensorflow_alone_can_run(finished_run, tmp_path):
    output = tmp_path / "policy"
    flags = f"--root_dir={finished_run.root_dir}", f"--output={output}"
    ended = run_binary("export", *flags)
    assert ended.returncode == 0, ended.stderr
    assert "input   observation: float32 (batch, 4)" in ended.stdout
    assert "output  action: int64 (batch)" in ended.stdout
    command = [sys.executable, "-c", PROGRAM, str(output)]
    alone = subprocess.run(
        command, cwd=tmp_path, env=user_environment(), capture_output=True, text=True, check=True
    )
    observation = np.random.default_rng(0).normal(0, 1, (50, 4)).astype(np.float32)
    expected = pipeline.load_policy(finished_run.root_dir).predict(observation)
    assert alone.stdout.strip() == str(expected.tolist())
    again = run_binary("export", *flags)
    assert again.returncode == 2
    assert f"error: {output} exists already. Delete it" in again.stderr


@pytest.mark.parametrize("name", ["tflite", "onnx"])
def test_the_program_exports_the_other_formats(finished_run, name, tmp_path):
    output = tmp_path / "policy"
    flags = f"--root_dir={finished_run.root_dir}", f"--output={output}", f"--format={name}"
    ended = run_binary("export", *flags)
    assert ended.returncode == 0, ended.stderr
    assert "input   observation: float32 (batch, 4)" in ended.stdout
    assert "output  action: int64 (batch)" in ended.stdout
    observation = np.random.default_rng(0).normal(0, 1, (50, 4)).astype(np.float32)
    actions = RUNTIMES[name][1](output)(observation=observation)["action"]
    expected = pipeline.load_policy(finished_run.root_dir).predict(observation)
    np.testing.assert_array_equal(actions, expected)


@pytest.mark.parametrize("name", ["tflite", "onnx"])
def test_a_policy_with_bfloat16_encoders_is_exported_in_float32(name, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(ROOT / "pipeline" / "pretrained" / "ppo_pong_fast", run)
    config = run / "operative_config.gin"
    text = config.read_text()
    config.write_text(text.replace("policy = 'float32'", "policy = 'mixed_bfloat16'"))
    assert config.read_text() != text
    load_export(SavedRun(run, "latest"), False, name)[0](tmp_path / "policy")
    frames = np.random.default_rng(0).integers(0, 256, (9, 4, 84, 84), np.uint8)
    actions = RUNTIMES[name][1](tmp_path / "policy")(observation=frames)["action"]
    expected = pipeline.load_policy("pretrained:ppo_pong_fast").predict(frames)
    np.testing.assert_array_equal(actions, expected)


def _size(folder):
    return sum(path.stat().st_size for path in folder.rglob("variables.data*"))


def test_a_small_folder_of_a_run_plays_like_the_run(finished_run, tmp_path):
    output = tmp_path / "small"
    flags = f"--root_dir={finished_run.root_dir}", f"--output={output}", "--format=run"
    ended = run_binary("export", *flags)
    assert ended.returncode == 0, ended.stderr
    assert str(finished_run.root_dir) not in (output / "run.json").read_text()
    whole = pathlib.Path(finished_run.root_dir) / "checkpoints"
    assert _size(output) < min(map(_size, whole.glob("step-*/agent"))) / 2
    evaluations = [
        run_binary("evaluate", f"--root_dir={folder}", "--num_episodes=3").stdout.splitlines()[-1]
        for folder in (finished_run.root_dir, output)
    ]
    (expected,), (played,) = (line.partition(" after ")[2:] for line in evaluations)
    assert "over 3 episodes" in expected
    assert played == expected


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in OFTEN else pytest.mark.crash)
        for name in pretrained.names()
    ],
)
def test_pretrained_policies_play(name):
    num_episodes, solved = PLAYED[name]
    flags = [f"--pretrained={name}", f"--num_episodes={num_episodes}"]
    if name == "ppo_pong_fast":  # a single episode needs no more environments
        flags.append("--gin_bindings=evaluation/atari_environment.num_envs = 1")
    ended = run_binary("evaluate", *flags)
    assert ended.returncode == 0, ended.stderr
    (mean,) = re.findall(rf"evaluation of {name} after .*: (\S+) ±", ended.stdout)
    assert float(mean) > solved
    assert pipeline.load_policy(f"pretrained:{name}").env_steps > 0


def test_a_pretrained_policy_needs_an_output():
    ended = run_binary("export", "--root_dir=pretrained:dqn_acrobot")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "error: a pretrained policy has no folder of yours: pass --output.\n"


def test_an_unknown_name_is_answered_with_those_that_there_are():
    ended = run_binary("evaluate", "--pretrained=lunarlander")
    assert ended.returncode == 2
    assert "there is no pretrained policy 'lunarlander'. Nearest: ppo_lunarlander_tuned" in (
        ended.stderr
    )
    ended = run_binary("evaluate")
    assert ended.returncode == 2
    assert "--root_dir=runs/NAME, or --pretrained=NAME with one of" in ended.stderr


def test_the_checkpoint_that_is_asked_for_is_exported_into_the_run_s_folder(finished_run, tmp_path):
    root_dir = tmp_path / "run"
    shutil.copytree(finished_run.root_dir, root_dir)
    first = min((root_dir / "checkpoints").glob("step-*"))
    env_steps = int(first.name.split("-")[1].split(".")[0])
    flags = [f"--root_dir={root_dir}", "--format=run", f"--checkpoint={env_steps}"]
    before = set(root_dir.iterdir())
    ended = run_binary("export", *flags)
    assert ended.returncode == 0, ended.stderr
    (written,) = set(root_dir.iterdir()) - before
    assert pipeline.load_policy(written).env_steps == env_steps


def test_a_full_disk_is_named_without_tensorflow_s_operations(monkeypatch, tmp_path):
    def full(*args, **kwargs):
        raise tf.errors.ResourceExhaustedError(
            None,
            None,
            "{{function_node x/device:CPU:0}} /disk/part; No space left on device [Op:Save]",
        )

    monkeypatch.setattr(tf.saved_model, "save", full)
    policy: Any = types.SimpleNamespace(act=None)
    with pytest.raises(WriteError, match="^the policy cannot be written: No space left on device$"):
        write_saved_model(policy, tmp_path)
