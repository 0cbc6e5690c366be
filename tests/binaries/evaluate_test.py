import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
from typing import Any

import gymnasium
import imageio.v2 as imageio
import imageio_ffmpeg
import numpy as np
import pytest
from conftest import ROOT, assert_refused, run_binary, start_binary
from run_processes import files_of

from pipeline import configuration
from pipeline.checkpointing.checkpoints import Checkpoints
from pipeline.training.train_loop import train
from pipeline.utils.shutdown import StopSignal

SUMMARY = re.compile(
    r"evaluation of (?P<run>.+) after (?P<steps>[\d,]+) environment steps: (?P<mean>[-\d.,]+) ± "
    r"(?P<std>[\d.,]+) \(min (?P<min>[-\d.,]+), max (?P<max>[-\d.,]+)\) over (?P<episodes>\d+) "
    "episodes"
)


class BlindEnv(gymnasium.Env):
    """Environment with CartPole's spaces that cannot be rendered."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action):
        return np.zeros(4, np.float32), 1.0, True, False, {}


class OddEnv(BlindEnv):
    """Environment whose frames have odd sides; the number of the step is their grey level.

    It does not store its render_mode, and it chooses SDL's driver when it is built.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode=None):
        self.driver = os.environ.get("SDL_VIDEODRIVER")

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return super().reset(seed=seed)

    def step(self, action):
        self.time += 1
        observation, reward, *_ = super().step(action)
        return observation, reward, self.time == 5, False, {}

    def render(self):
        assert self.driver == "dummy"
        return np.full((75, 101, 3), 40 * min(self.time, 5), np.uint8)


class FailingEnv(BlindEnv):
    def step(self, action):
        raise KeyError("no such room")


class GlobalEnv(BlindEnv):
    """Draws its rewards from the generators of the process."""

    def step(self, action):
        return np.zeros(4, np.float32), random.random() + np.random.random(), True, False, {}


class EndlessEnv(OddEnv):
    def step(self, action):
        observation, reward, *_ = super().step(action)
        return observation, reward, False, False, {}


class TidyEnv(BlindEnv):
    """Removes a folder when it is closed."""

    def close(self):
        shutil.rmtree("of environments")


env_class: Any
for env_class in (BlindEnv, OddEnv, FailingEnv, GlobalEnv, EndlessEnv, TidyEnv):
    gymnasium.register(f"{env_class.__name__}-v0", env_class, disable_env_checker=True)


def other_environment(name):
    """Returns a flag that evaluates the run in another environment, one of this module."""
    return f"--gin_bindings=evaluation/gymnasium_environment.name = 'evaluate_test:{name}-v0'"


@pytest.fixture(autouse=True)
def module_on_path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}:{pathlib.Path(__file__).parent}")


def evaluate(root_dir, *flags):
    return run_binary("evaluate", f"--root_dir={root_dir}", *flags)


def summary(ended):
    assert (ended.returncode, ended.stderr) == (0, "")
    found = SUMMARY.fullmatch(ended.stdout.splitlines()[-1])
    assert found, ended.stdout
    return found.groupdict()


def assert_mistake(message, root_dir, *flags):
    assert_refused(message, "evaluate", f"--root_dir={root_dir}", *flags)


def read_video(path):
    reader: Any
    with imageio.get_reader(path) as reader:
        return reader.get_meta_data(), list(reader.iter_data())


@pytest.fixture(scope="module")
def greedy(finished_run, tmp_path_factory):
    """Returns a finished evaluation, its file, and the files of the run before it."""
    output = tmp_path_factory.mktemp("greedy") / "new" / "returns.json"
    before = files_of(finished_run.root_dir)
    flags = "--num_episodes=20", f"--output={output}"
    return evaluate(finished_run.root_dir, *flags), output, before


def test_evaluation_says_what_it_found_and_writes_nothing_else(finished_run, greedy):
    ended, output, before = greedy
    found = summary(ended)
    result = json.loads((finished_run.root_dir / "result.json").read_text())
    assert found["run"] == str(finished_run.root_dir)
    assert found["steps"] == f"{result['env_steps']:,}"
    assert found["episodes"] == "20"
    assert float(found["min"]) <= float(found["mean"]) <= float(found["max"])
    assert float(found["min"]) >= 8  # no pole falls in fewer steps
    lines = ended.stdout.splitlines()
    assert lines[0] == "loading TensorFlow ..."
    assert all(line.startswith("evaluating: ") for line in lines[1:-2])
    assert lines[-3] == "evaluating: 20/20  100%"
    assert lines[-2] == f"wrote {output}"
    written = json.loads(output.read_text())
    assert written["env_steps"] == result["env_steps"]
    assert len(written["returns"]) == 20
    assert written["return_mean"] == pytest.approx(float(found["mean"]), abs=0.06)
    assert "\x1b" not in ended.stdout
    assert files_of(finished_run.root_dir) == before


def test_a_binding_lets_actions_be_sampled(finished_run, greedy):
    flags = "--num_episodes=20", "--gin_bindings=Evaluator.greedy = False"
    sampled = summary(evaluate(finished_run.root_dir, *flags))
    assert sampled["mean"] != summary(greedy[0])["mean"]


def test_what_was_found_is_shown_also_if_it_cannot_be_written(finished_run, tmp_path):
    output = tmp_path / "of environments" / "x.json"
    flags = f"--output={output}", other_environment("TidyEnv"), "--num_episodes=1"
    ended = run_binary("evaluate", f"--root_dir={finished_run.root_dir}", *flags, cwd=tmp_path)
    assert ended.returncode == 75
    assert SUMMARY.fullmatch(ended.stdout.splitlines()[-1])


def steps_of(path):
    """Returns the step of a checkpoint's folder, formatted as in the summary."""
    return f"{int(path.name.split('-')[1].split('.')[0]):,}"


def test_checkpoint_of_a_step(finished_run):
    first = min((finished_run.root_dir / "checkpoints").glob("step-*"))
    flag = f"--checkpoint={steps_of(first).replace(',', '_')}"
    # The length of evaluations during training has no effect here.
    bound = "--gin_bindings=Evaluator.num_env_steps = 5_000"
    typo = "--gin_bindings=evalution/gymnasium_environment.num_envs = 2"
    others = "--gin_bindings=train.num_final_episodes = 3"
    ended = evaluate(finished_run.root_dir, "--num_episodes=2", flag, bound, typo, others)
    assert "warning: --gin_bindings: Evaluator.num_env_steps is not used here" in ended.stdout
    assert "train.num_final_episodes is not used here" in ended.stdout
    assert "Nearest: evaluation/gymnasium_environment.num_envs" in ended.stdout
    played = summary(ended)
    assert (played["steps"], played["episodes"]) == (steps_of(first), "2")


def test_damaged_checkpoint_is_passed_over(finished_run, tmp_path):
    run = shutil.copytree(finished_run.root_dir, tmp_path / "run")
    newest = max((run / "checkpoints").glob("step-*"))
    (newest / "agent" / "variables.index").write_bytes(b"")
    ended = evaluate(run, "--num_episodes=2")
    assert f"warning: {newest.name} is damaged" in ended.stdout
    assert int(summary(ended)["steps"].replace(",", "")) < int(newest.name.split("-")[1])


def test_video_is_what_browsers_play(finished_run, tmp_path):
    path = tmp_path / "new" / "episode.mp4"
    best = Checkpoints(finished_run.root_dir / "checkpoints", {}, writable=False).best()
    assert best
    flags = ["--num_episodes=1", "--checkpoint=best", f"--video={path}"]
    ended = evaluate(finished_run.root_dir, *flags)
    assert summary(ended)["episodes"] == "1"
    assert summary(ended)["steps"] == steps_of(best.path)
    (told,) = re.findall(f"wrote {path}: an episode of return (.*)\n", ended.stdout)
    about, frames = read_video(path)
    assert about["codec"] == "h264"
    assert about["pix_fmt"].startswith("yuv420p")
    assert about["fps"] == 50  # CartPole's frame rate
    assert about["size"] == (600, 400)
    assert len(frames) == float(told) + 1  # the reward is 1 per step
    assert frames[0].std() > 10  # the frame is not blank
    assert (frames[0].astype(int) != frames[-1]).any()
    assert [file.name for file in path.parent.iterdir()] == ["episode.mp4"]
    # The index precedes the frames, so that a browser can start at once.
    data = path.read_bytes()
    assert 0 < data.index(b"moov") < data.index(b"mdat")


def test_a_video_of_a_pretrained_policy_is_recorded_alone(tmp_path):
    path = tmp_path / "cartpole.mp4"
    limit = "--gin_bindings=Evaluator.max_episode_steps = 100"
    ended = run_binary("evaluate", "--pretrained=ppo_cartpole", f"--video={path}", limit)
    assert (ended.returncode, ended.stderr) == (0, "")
    truncated = "an episode of return 100.0, which was truncated (Evaluator.max_episode_steps)"
    assert ended.stdout.splitlines()[-1] == f"wrote {path}: {truncated}"


def test_video_of_frames_with_odd_sides(finished_run, tmp_path):
    path = tmp_path / "odd.mp4"
    summary(evaluate(finished_run.root_dir, "--num_episodes=1", f"--video={path}",
                     other_environment("OddEnv")))  # fmt: skip
    check = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", path, "-f", "null", "-"]
    assert subprocess.run(check, capture_output=True, check=True).stderr == b""
    about, frames = read_video(path)
    assert (about["size"], about["fps"]) == ((102, 76), 10)
    np.testing.assert_allclose([frame.mean() for frame in frames], 40 * np.arange(6), atol=3)


def test_environment_that_cannot_render(finished_run, tmp_path):
    assert_mistake(
        ".*evaluate_test:BlindEnv-v0.* render.*",
        finished_run.root_dir,
        f"--video={tmp_path}/x.mp4",
        other_environment("BlindEnv"),
    )
    assert list(tmp_path.iterdir()) == []


def test_environment_that_raises(finished_run):
    assert_mistake(
        "environment evaluate_test:FailingEnv-v0 raised KeyError: 'no such room'.*",
        finished_run.root_dir,
        other_environment("FailingEnv"),
    )


def test_the_seed_fixes_what_environments_draw_from_generators_of_the_process(finished_run):
    flags = "--num_episodes=5", other_environment("GlobalEnv")
    first, again, other = (
        summary(evaluate(finished_run.root_dir, *flags, *seed))
        for seed in ([], ["--seed=1"], ["--seed=2"])
    )
    assert first == again and first["mean"] != other["mean"]


def test_mistakes(finished_run, tmp_path):
    run = finished_run.root_dir
    assert_mistake(f"there is no run {run}s. Nearest: {run}.", f"{run}s")
    assert_mistake(f"{tmp_path} holds no run: .*", tmp_path)
    assert_mistake("No checkpoint of step 7 in .*. Steps: .*", run, "--checkpoint=7")
    assert_mistake("checkpoint 'bset' must be latest, best, .*", run, "--checkpoint=bset")
    assert_mistake("--video=x.gif: the name must end in .mp4.", run, "--video=x.gif")
    assert_mistake("--output=x.csv: the name must end in .json.", run, "--output=x.csv")
    (tmp_path / "x.json").mkdir()
    output = f"--output={tmp_path / 'x.json'}"
    assert_mistake(f"{output} is a folder: choose another name.", run, output)
    output = f"--output={run / 'result.json'}"
    assert_mistake(f"{output} exists and does not hold an evaluation .*", run, output)
    assert_mistake("flag --num_episodes=0: .*", run, "--num_episodes=0")
    assert_mistake(".*'gredy'. Nearest: greedy.", run, "--gin_bindings=Evaluator.gredy = False")


def test_run_without_checkpoints(finished_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished_run.root_dir, run, ignore=shutil.ignore_patterns("step-*"))
    assert_mistake(f"{run} has no checkpoint yet: run its training command .*", run)
    assert_mistake(f"{run} has no best checkpoint yet, because .*", run, "--checkpoint=best")


@pytest.mark.parametrize("flags", [[], ["--video=x.mp4"]])
def test_interrupt_ends_it_quickly(finished_run, tmp_path, flags):
    flags = [f"--root_dir={finished_run.root_dir}", other_environment("EndlessEnv"), *flags]
    process = start_binary("evaluate", *flags, cwd=tmp_path)
    assert process.stdout is not None
    while not process.stdout.readline().startswith(("recording ", "evaluating: ")):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=10)
    assert process.returncode == 130
    assert stderr == "stopping\n"
    assert "±" not in stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.crash
@pytest.mark.usefixtures("any_config")
def test_the_papers_evaluation_of_dqn3(tmp_path):
    encoder = ["nature_cnn_encoder.filters = ((4, 8, 4),)", "nature_cnn_encoder.units = (8,)"]
    tiny = [*encoder, "ReplayBuffer.capacity = 100", "WARM_UP = 60"]
    lengths = ["train.num_env_steps = 80", "Evaluator.num_env_steps = 40"]
    game = "deepmind_atari_environment.game = 'breakout'"
    limit = "evaluation/deepmind_atari_environment.max_episode_frames = 120"
    configuration.load(["dqn3_atari"], [game, *tiny, *lengths, limit, "train.eval_interval = 70"])
    train(str(tmp_path / "run"), 1, "fail", StopSignal())
    flags = ["--checkpoint=best", "--num_episodes=3", f"--gin_bindings={limit}"]
    said = summary(evaluate(tmp_path / "run", *flags))
    assert (said["episodes"], said["steps"]) == ("3", "72")
