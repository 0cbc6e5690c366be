import json
import os
import pty
import re
import shlex
import shutil
import signal

import pytest
from conftest import FINISHED_RUN_FLAGS, ROOT, assert_refused, run_binary, start_binary
from run_processes import files_of

from pipeline import cli
from pipeline.configuration import list_configs
from pipeline.utils.jsonl import read_jsonl
from pipeline.utils.progress import score_text


@pytest.fixture
def copied_run(finished_run, tmp_path):
    return shutil.copytree(finished_run.root_dir, tmp_path / "copy")


# Results of a finished run.


def test_files_of_a_run(finished_run):
    names = {path.name for path in finished_run.root_dir.iterdir()}
    events = {name for name in names if name.startswith("events.out.tfevents.")}
    assert len(events) == 1
    assert names - events == {
        "operative_config.gin",
        "run.json",
        "metrics.jsonl",
        "eval.jsonl",
        "result.json",
        "checkpoints",
        ".lock",
    }
    assert not list(finished_run.root_dir.rglob(".tmp-*"))


def test_run_json(finished_run):
    run = json.loads((finished_run.root_dir / "run.json").read_text())
    assert run.keys() == {
        "command",
        "seed",
        "num_envs",
        "observation_space",
        "action_space",
        "execution",
        "threads",
        "onednn",
        "encoder_precision",
        "device",
        "versions",
        "cpu_model",
        "cpu_count",
        "git_revision",
        "source_sha256",
        "own_modules",
        "has_checkpoint",
        "resumed_at_env_steps",
        "earlier_starts",
        "inexact_resumes",
    }
    assert (run["seed"], run["num_envs"], run["resumed_at_env_steps"]) == (1, 8, [])
    assert "--gin_file=dqn_cartpole" in run["command"]
    assert run["has_checkpoint"] is True
    assert run["own_modules"] == {}
    assert run["threads"].keys() == {"intra_op", "inter_op"}
    assert (run["onednn"], run["execution"]) == ("0", "graph")
    assert run["encoder_precision"] == "float32"
    assert run["versions"].keys() >= {"python", "tensorflow", "tf-agents", "gymnasium"}


def test_metrics_are_objects_with_rising_steps(finished_run):
    records = read_jsonl(finished_run.root_dir / "metrics.jsonl")
    for record in records:
        assert list(record)[:7] == [
            "env_steps",
            "updates",
            "episodes",
            "wall_seconds",
            "env_steps_per_second",
            "return_mean_100",
            "episode_length_mean_100",
        ]
        assert record.keys() >= {"loss", "epsilon", "learning_rate"}
    steps = [record["env_steps"] for record in records]
    # One record at each multiple of the interval after the warm-up, and one at the end.
    assert [step // 200 for step in steps] == [2, 3, 4, 5, 6]
    assert steps == sorted(set(steps))
    assert records[-1]["updates"] > 0
    assert records[-1]["episode_length_mean_100"] == records[-1]["return_mean_100"]


def test_evaluations(finished_run):
    records = read_jsonl(finished_run.root_dir / "eval.jsonl")
    assert [record["env_steps"] // 400 for record in records] == [1, 2, 3]
    for record in records:
        assert record.keys() == {"env_steps", "return_mean", "return_std", "returns"}
        assert len(record["returns"]) == 3
        assert record["return_mean"] == pytest.approx(sum(record["returns"]) / 3)


def test_result(finished_run):
    result = json.loads((finished_run.root_dir / "result.json").read_text())
    last = read_jsonl(finished_run.root_dir / "metrics.jsonl")[-1]
    assert result.keys() == {
        "evaluation",
        "env_steps",
        "updates",
        "episodes",
        "wall_seconds",
        "weights_sha256",
    }
    assert result["evaluation"].keys() == {"return_mean", "return_std", "returns"}
    assert len(result["evaluation"]["returns"]) == 5
    assert 1_200 <= result["env_steps"] < 1_216
    for key in ("env_steps", "updates", "episodes"):
        assert result[key] == last[key]
    assert re.fullmatch("[0-9a-f]{64}", result["weights_sha256"])


def test_operative_config_starts_the_same_run(finished_run, tmp_path):
    config = finished_run.root_dir / "operative_config.gin"
    ended = run_binary("train", f"--root_dir={tmp_path}/run", f"--gin_file={config}")
    assert (ended.returncode, ended.stderr) == (0, "")
    first, second = (
        json.loads((folder / "result.json").read_text()) | {"wall_seconds": 0}
        for folder in (finished_run.root_dir, tmp_path / "run")
    )
    assert first == second
    assert (tmp_path / "run" / "operative_config.gin").read_text() == config.read_text()


# Output of the program.


def test_nothing_but_the_program_speaks(finished_run):
    assert finished_run.stderr == ""
    starts = (
        "loading TensorFlow ...",
        "building the graph for ",
        "warming up the replay buffer: ",
        "training: ",
        "evaluating: ",
        "evaluation of the final weights: ",
        f"{finished_run.root_dir}/result.json ",
        f"  {cli.python_command()} -m pipeline.plot ",
        f"  {cli.python_command()} -m pipeline.evaluate ",
    )
    lines = finished_run.stdout.splitlines()
    assert [line for line in lines if not line.startswith(starts)] == []
    assert len(lines) < 30


def test_lines_are_plain_where_there_is_no_terminal(finished_run):
    assert "\x1b" not in finished_run.stdout
    assert "\r" not in finished_run.stdout


def test_first_sign_of_life(finished_run):
    assert finished_run.stdout.startswith("loading TensorFlow ...\n")
    assert finished_run.first_line_seconds < 5  # about 1 on an idle machine


def test_evaluation_is_told_at_the_end(finished_run):
    evaluation = json.loads((finished_run.root_dir / "result.json").read_text())["evaluation"]
    mean, std = (score_text(evaluation[name]) for name in ("return_mean", "return_std"))
    words = f"evaluation of the final weights: {mean} ± {std} over 5 episodes"
    lines = finished_run.stdout.splitlines()
    before = lines[lines.index(words) - 1]
    assert before.startswith("training: ") and f"evaluation {mean}" in before


def test_what_to_do_next_can_be_pasted_into_a_shell(finished_run):
    plot, evaluate = finished_run.stdout.splitlines()[-2:]
    assert f"--root_dir={finished_run.root_dir}" in shlex.split(plot)
    assert f"--root_dir={finished_run.root_dir}" in shlex.split(evaluate)
    assert f"--video={finished_run.root_dir}/episode.mp4" in shlex.split(evaluate)


def test_terminal_gets_a_panel(tmp_path):
    controller, terminal = pty.openpty()
    process = start_binary(
        "train",
        f"--root_dir={tmp_path}/run",
        *FINISHED_RUN_FLAGS,
        "--gin_bindings=train.num_env_steps = 400",
        "--exact_graph",
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    shown = b""
    while chunk := read_terminal(controller):
        shown += chunk
    os.close(controller)
    assert process.wait(timeout=60) == 0
    assert "━".encode() in shown
    assert shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h") > 0  # the cursor is visible again
    assert json.loads((tmp_path / "run" / "run.json").read_text())["execution"] == "exact graph"


def read_terminal(controller):
    try:
        return os.read(controller, 1 << 16)
    except OSError:  # raised on Linux when the other end is closed
        return b""


def test_list_configs():
    ended = run_binary("train", "--list_configs")
    assert (ended.returncode, ended.stderr) == (0, "")
    listed = [re.split(" {2,}", line) for line in ended.stdout.splitlines()]
    assert listed == [[name, comment] for name, comment in list_configs()]
    assert all(comment for _, comment in listed)


def test_output_that_nobody_reads_any_more_ends_a_program_quietly():
    process = start_binary("train", "--list_configs")
    assert process.stdout and process.stderr
    process.stdout.close()
    assert process.wait(timeout=60) == 128 + signal.SIGPIPE
    assert process.stderr.read() == ""


def test_explain_lists_bindings_with_their_places(tmp_path):
    flags = ["--gin_file=dqn_cartpole", "--gin_bindings=ReplayBuffer.batch_size = 7", "--explain"]
    ended = run_binary("train", f"--root_dir={tmp_path}/run", *flags)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert re.search(r"^ReplayBuffer.batch_size = 7 +# --gin_bindings \(overrides .*dqn.gin:\d+\)$",
                     ended.stdout, re.MULTILINE)  # fmt: skip
    assert re.search(r"^gymnasium_environment.name = 'CartPole-v1' +# .*dqn_cartpole.gin:\d+$",
                     ended.stdout, re.MULTILINE)  # fmt: skip
    assert re.search(r"^train.num_eval_episodes = \d+ +# default \(.*train_loop.py:\d+\)$",
                     ended.stdout, re.MULTILINE)  # fmt: skip
    assert "initialize_replay_buffer.num_env_steps" in ended.stdout
    assert not (tmp_path / "run").exists()


# A folder that holds a run.


def test_finished_run_is_told_and_left_alone(copied_run):
    before = files_of(copied_run)
    ended = run_binary("train", f"--root_dir={copied_run}", *FINISHED_RUN_FLAGS)
    assert (ended.returncode, ended.stderr) == (0, "")
    evaluation = json.loads((copied_run / "result.json").read_text())["evaluation"]
    assert f"{copied_run} is already finished, after 1_20" in ended.stdout
    assert f"evaluation of the final weights: {evaluation['return_mean']:.1f} " in ended.stdout
    assert files_of(copied_run) == before
    other = "--gin_bindings=create_dqn_agent.discount = 0.5"
    ended = run_binary("train", f"--root_dir={copied_run}", *FINISHED_RUN_FLAGS, other)
    assert ended.returncode == 2
    assert f"{copied_run} holds a finished run of another configuration:" in ended.stderr
    assert "  create_dqn_agent.discount: 0.99 there, 0.5 here\n" in ended.stderr
    assert files_of(copied_run) == before


def test_more_steps_go_on_with_a_finished_run(copied_run):
    more = "--gin_bindings=train.num_env_steps = 1_600"
    flags = [f"--root_dir={copied_run}", *FINISHED_RUN_FLAGS, more]
    # The learning rate is annealed over the whole run, so a longer run has another one.
    ended = run_binary("train", *flags, "--allow_inexact_resume")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "resuming" in ended.stdout
    (inexact,) = json.loads((copied_run / "run.json").read_text())["inexact_resumes"]
    assert inexact["why"] == ["train.num_env_steps: 1200 in the checkpoint, 1600 here"]
    assert "the configuration differs" in ended.stdout
    result = json.loads((copied_run / "result.json").read_text())
    assert 1_600 <= result["env_steps"] < 1_616
    steps = [record["env_steps"] for record in read_jsonl(copied_run / "metrics.jsonl")]
    assert [step // 200 for step in steps] == [2, 3, 4, 5, 6, 7, 8]
    (resumed_at,) = json.loads((copied_run / "run.json").read_text())["resumed_at_env_steps"]
    assert 1_200 <= resumed_at < 1_216


def test_a_run_whose_description_was_deleted_writes_it_again(copied_run):
    before, path = files_of(copied_run), copied_run / "run.json"
    path.write_text("")
    ended = run_binary("train", f"--root_dir={copied_run}", *FINISHED_RUN_FLAGS)
    assert ended.returncode == 2
    assert f"{path} is damaged" in ended.stderr and "delete it, and repeat" in ended.stderr
    path.unlink()
    ended = run_binary("evaluate", f"--root_dir={copied_run}")
    assert ended.returncode == 2 and "repeat the run's training command" in ended.stderr
    ended = run_binary("train", f"--root_dir={copied_run}", *FINISHED_RUN_FLAGS)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads(path.read_text())["seed"] == 1
    after = files_of(copied_run)
    assert after.keys() == before.keys()


def test_restart_moves_the_old_run_aside(copied_run):
    before = files_of(copied_run)
    ended = run_binary(
        "train",
        f"--root_dir={copied_run}",
        *FINISHED_RUN_FLAGS,
        "--gin_bindings=train.num_env_steps = 300",
        "--restart_behavior=restart",
        "--seed=2",
        "--eager",
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    aside = copied_run.with_name("copy.old-1")
    assert f"moved the old run to {aside}" in ended.stdout
    assert files_of(aside) == before
    begun_anew = json.loads((copied_run / "run.json").read_text())
    assert (begun_anew["seed"], begun_anew["execution"]) == (2, "eager")


def test_run_that_is_there_is_guarded(finished_run):
    before = files_of(finished_run.root_dir)
    flags = [f"--root_dir={finished_run.root_dir}", *FINISHED_RUN_FLAGS, "--seed=2"]
    assert_refused(".* was begun with --seed=1, not 2.*", "train", *flags)
    assert files_of(finished_run.root_dir) == before


# User errors.


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "say what to train: --gin_file=.*"),
        (["--gin_file=dqn_cartpol"], "no gin file .* named 'dqn_cartpol'. Nearest: dqn_cartpole.*"),
        (["--gin_file=dqn_cartpole", "--seed=one"], "flag --seed=one: .*"),
        (["--gin_file=dqn_cartpole", "--restart_behavior=x"], "flag --restart_behavior=x: .*"),
        (
            ["--gin_file=dqn_cartpole", "--eager", "--exact_graph"],
            ".*--exact_graph has no effect with --eager.*",
        ),
        (
            ["--gin_file=dqn_cartpole", "--ray_address=auto"],
            "--ray_address has no effect without --gin_file=runners/distributed.",
        ),
    ],
)
def test_mistakes_that_need_no_tensorflow(tmp_path, flags, message):
    assert assert_refused(message, "train", f"--root_dir={tmp_path}/run", *flags) == ""
    assert list(tmp_path.iterdir()) == []


def test_a_forgotten_agent_is_told_with_the_files_that_have_one(tmp_path):
    binding = "--gin_bindings=gymnasium_environment.name = 'CartPole-v1'"
    flags = [f"--root_dir={tmp_path}/run", "--gin_file=environments/gymnasium", binding]
    message = "train.create_agent is not bound. Add a --gin_file that binds it: .*agents/dqn, .*"
    assert_refused(message, "train", *flags)


def test_missing_root_dir():
    assert_refused("say where the run goes: --root_dir=.*", "train", "--gin_file=dqn_cartpole")


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("train.num_env_steps = 1_0x", "--gin_bindings:.*"),
        (
            "gymnasium_environment.name = 'CartPoel-v1'",
            ".*'CartPoel-v1'.* Nearest: CartPole-v1.*",
        ),
        (
            "evalution/gymnasium_environment.num_envs = 4",
            ".*evalution/gym.* is not used here.* Nearest: evaluation/gymnasium_envir.*",
        ),
    ],
)
def test_mistakes_in_the_configuration(tmp_path, binding, message):
    flags = ["--gin_file=dqn_cartpole", f"--gin_bindings={binding}"]
    said = assert_refused(message, "train", f"--root_dir={tmp_path}/run", *flags)
    assert said in ("", "loading TensorFlow ...\n")
    assert list(tmp_path.iterdir()) == []


def test_gin_file_may_not_import_what_it_likes(tmp_path):
    (tmp_path / "mine.py").write_text("print('mine was imported')\n")
    config = tmp_path / "config.gin"
    config.write_text("include 'dqn_cartpole.gin'\nimport mine\ntrain.num_env_steps = 3_000\n")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    flags = [f"--root_dir={tmp_path}/run", f"--gin_file={config}"]
    assert_refused(".*mine.*--allow_gin_imports.*", "train", *flags, env=environment)
    ended = run_binary("train", *flags, "--allow_gin_imports", "--explain", env=environment)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "mine was imported\n" in ended.stdout
