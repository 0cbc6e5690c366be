import json
import pathlib

import numpy as np
import pytest
from conftest import run_binary
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from PIL import Image

from pipeline import plot
from pipeline.utils import errors


def make_run(
    folder: pathlib.Path,
    curve: dict[int, float | None],
    evaluations: dict[int, tuple[float, float]] | None = None,
    command: str | None = None,
) -> plot.Run:
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for step, mean in curve.items():
            file.write(json.dumps({"env_steps": step, "return_mean_100": mean}) + "\n")
        file.write('{"env_steps": 99')  # the run is writing this line
    if evaluations is not None:
        with (folder / "eval.jsonl").open("w") as file:
            for step, (mean, std) in evaluations.items():
                record = {"env_steps": step, "return_mean": mean, "return_std": std, "returns": []}
                file.write(json.dumps(record) + "\n")
    if command is not None:
        (folder / "run.json").write_text(json.dumps({"command": command}))
    return plot.read_run(folder)


def lines(figure: Figure) -> dict[str, np.ndarray]:
    """Returns the curves by label; curves without a label are numbered."""
    drawn = figure.axes[0].get_lines()
    return {str(line.get_label()): np.asarray(line.get_xydata()) for line in drawn}


def evaluation_bars(figure: Figure) -> list[list[list[float]]]:
    """Returns the two ends of each error bar of the only group with evaluations."""
    (container,) = figure.axes[0].containers
    assert isinstance(container, ErrorbarContainer)
    return [segment.tolist() for segment in container.lines[2][0].get_segments()]


def legend(figure: Figure) -> list[str]:
    drawn = figure.axes[0].get_legend()
    assert drawn is not None
    return [text.get_text() for text in drawn.get_texts()]


def test_single_run_is_its_curve_and_its_evaluations(tmp_path: pathlib.Path) -> None:
    run = make_run(
        tmp_path / "a",
        {0: None, 1000: 10.0, 2000: 20.0},
        {1000: (12.0, 3.0)},
        "python train.py --gin_file=dqn_cartpole.gin",
    )
    figure = plot.draw([run])
    axes = figure.axes[0]
    assert lines(figure)["a"].tolist() == [[1000, 10], [2000, 20]]
    assert evaluation_bars(figure) == [[[1000, 9], [1000, 15]]]
    assert axes.get_title() == "dqn_cartpole"
    assert axes.get_xlabel() == "environment steps"
    assert legend(figure) == ["a"]


def test_seeds_of_one_experiment_share_a_colour_and_a_mean(tmp_path: pathlib.Path) -> None:
    runs = [
        make_run(tmp_path / "dqn_seed1", {0: 0.0, 200: 20.0},
                 {100: (1.0, 0.0), 200: (5.0, 0.0), 300: (1.0, 0.0)}),
        make_run(tmp_path / "dqn_seed2", {100: 30.0, 300: 50.0},
                 {160: (1.0, 0.0), 202: (7.0, 9.0), 309: (1.0, 0.0)}),
        make_run(tmp_path / "ppo", {100: 1.0, 200: 2.0}),
    ]  # fmt: skip
    figure = plot.draw(runs)
    drawn = figure.axes[0].get_lines()
    assert [line.get_linewidth() for line in drawn[:3]] == [0.8, 0.8, 2.2]
    assert len({line.get_color() for line in drawn[:-1]}) == 1
    assert drawn[-1].get_color() != drawn[0].get_color()
    assert legend(plot.draw([*runs, runs[0]])) == legend(figure)
    mean = lines(figure)["dqn (mean of 2 runs)"]
    assert mean.tolist() == [[100, 20.0], [200, 30.0]]
    # Only the second evaluations were due at the same time, give or take a step.
    assert evaluation_bars(figure) == [[[201, 5.0], [201, 7.0]]]
    assert legend(figure) == ["dqn (mean of 2 runs)", "ppo"]


def test_a_single_record_is_a_dot_and_runs_without_common_steps_have_no_mean(tmp_path):
    figure = plot.draw([make_run(tmp_path / "a", {1000: 10.0})])
    assert figure.axes[0].get_lines()[0].get_marker() == "o"
    runs = [make_run(tmp_path / f"seed-{n}", {n * 1000: 1.0, n * 1500: 2.0}) for n in (1, 2)]
    assert [text.split(" (")[1] for text in legend(plot.draw(runs))] == [
        "no common steps of 2 runs)"
    ]


def test_an_evaluation_that_one_run_lacks_hides_no_other(tmp_path: pathlib.Path) -> None:
    curve: dict[int, float | None] = {0: 0.0, 400: 40.0}
    evaluations = {step: (step / 100, 0.0) for step in (100, 200, 300, 400)}
    runs = [
        make_run(tmp_path / "dqn_seed1", curve, evaluations),
        make_run(tmp_path / "dqn_seed2", curve, {201: (4.0, 0.0), 402: (6.0, 0.0)}),
    ]
    assert evaluation_bars(plot.draw(runs)) == [
        [[200.5, 2.0], [200.5, 4.0]],
        [[401, 4.0], [401, 6.0]],
    ]
    runs[1] = make_run(tmp_path / "dqn_seed3", curve)
    assert plot.draw(runs).axes[0].containers == []


def test_a_link_to_a_run_has_its_own_name(tmp_path: pathlib.Path) -> None:
    make_run(tmp_path / "job17", {100: 1.0})
    (tmp_path / "dqn_seed1").symlink_to(tmp_path / "job17")
    assert plot.read_run(tmp_path / "dqn_seed1").group == tmp_path / "dqn"


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("dqn_seed3", "dqn"),
        ("dqn-seed-3", "dqn"),
        ("dqn-seed12", "dqn"),
        ("units_64", "units_64"),  # may differ from units_128 in more than the seed
        ("slow-4", "slow-4"),
        ("dqn3", "dqn3"),
        ("ppo_pong", "ppo_pong"),
        ("_5", "_5"),
        ("5", "5"),
        ("seed", "seed"),
        ("seed-3", ""),
        ("seed3", ""),
    ],
)
def test_group_is_the_folder_without_the_seed(name: str, group: str) -> None:
    run = plot.Run(pathlib.Path("/runs", name), "", np.zeros([0, 2]), np.zeros([0, 3]), np.zeros(0))
    assert run.group == pathlib.Path("/runs", group)
    assert run.name == (name if group else f"runs/{name}")


def test_names_that_are_the_same_in_several_folders_get_more_of_their_paths(
    tmp_path: pathlib.Path,
) -> None:
    runs = []
    for name in ("old/s/dqn/seed-1", "old/s/dqn/seed-2", "new/s/dqn/seed-1", "new/s/dqn/seed-2"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        runs.append(make_run(tmp_path / name, {100: 1.0}))
    means = ["old/s/dqn (mean of 2 runs)", "new/s/dqn (mean of 2 runs)"]
    assert legend(plot.draw(runs)) == means
    twice = [make_run(tmp_path / f"x_seed1{more}", {1: 1.0}) for more in ("", "_seed1", "_seed2")]
    assert legend(plot.draw(twice)) == ["x_seed1", "x_seed1 (mean of 2 runs)"]
    alone = ["old/s/dqn/seed-1", "new/s/dqn/seed-1"]
    assert legend(plot.draw(runs[::2])) == alone


def test_seeds_of_different_experiments_are_not_mixed(tmp_path: pathlib.Path) -> None:
    runs = []
    for experiment, value in (("dqn-CartPole-v1", 500.0), ("ppo-Acrobot-v1", -80.0)):
        (tmp_path / experiment).mkdir()
        for seed in (1, 2):
            runs.append(make_run(tmp_path / experiment / f"seed-{seed}", {100: value, 200: value}))
    runs.append(make_run(tmp_path / "dqn-CartPole-v1" / "other", {100: 1.0, 200: 1.0}))
    figure = plot.draw(runs)
    named = {label: ends[:, 1].tolist() for label, ends in lines(figure).items() if "v1" in label}
    assert named == {
        "dqn-CartPole-v1 (mean of 2 runs)": [500, 500],
        "ppo-Acrobot-v1 (mean of 2 runs)": [-80, -80],
    }
    assert plot.draw(runs[:1]).axes[0].get_lines()[0].get_label() == "dqn-CartPole-v1/seed-1"


@pytest.mark.parametrize(
    ("command", "config"),
    [
        ("python a.py --gin_file=dqn_cartpole --seed=1", "dqn_cartpole"),
        ("python a.py --gin_file='my runs/x.gin'", "x"),
        ("a.py --gin_file agents/dqn -gin_file=environments/gymnasium", "dqn + gymnasium"),
        ("python a.py --gin_bindings='train.num_env_steps = 5'", ""),
        ("python a.py --gin_file='a$b^{_c$'", r"a\$b^{_c\$"),
        ("python a.py --gin_file='open", ""),
    ],
)
def test_title_is_the_config(tmp_path: pathlib.Path, command: str, config: str) -> None:
    run = make_run(tmp_path / "a", {1: 1.0}, command=command)
    assert run.config == config
    figure = plot.draw([run])
    assert figure.axes[0].get_title() == config
    figure.canvas.draw()  # fails if Matplotlib takes the title for a formula


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (500, "500"), (2500, "2.5k"), (500_000, "500k"), (1e6, "1M"), (2e9, "2G")],
)
def test_ticks_are_short(value: float, text: str) -> None:
    assert plot.short(value) == text


def test_folder_without_a_finished_episode(tmp_path: pathlib.Path) -> None:
    with pytest.raises(errors.UserError, match="no folder .*missing"):
        plot.read_run(tmp_path / "missing")
    with pytest.raises(errors.UserError, match="holds no run: it has no metrics.jsonl"):
        plot.read_run(tmp_path)
    with pytest.raises(errors.UserError, match="metrics.jsonl has no finished episode"):
        make_run(tmp_path / "begun", {100: None})


def make_timed_run(folder: pathlib.Path) -> pathlib.Path:
    """Writes a run of 10, then 5 environment steps per second; the first record has no return."""
    make_run(folder, {0: 1.0}, {150: (12.0, 3.0)})
    records = [
        {"env_steps": 100, "wall_seconds": 10.0, "speed": 10, "note": "text"},
        {"env_steps": 200, "wall_seconds": 30.0, "speed": 5, "return_mean_100": 20.0},
        {"env_steps": 300, "wall_seconds": 50.0, "speed": None, "return_mean_100": 30.0},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in records))
    return folder


def test_returns_against_time_with_the_evaluations_when_they_were(tmp_path: pathlib.Path) -> None:
    figure = plot.draw([plot.read_run(make_timed_run(tmp_path / "a"), x="wall_seconds")])
    assert lines(figure)["a"].tolist() == [[30, 20], [50, 30]]
    assert evaluation_bars(figure) == [[[20, 9], [20, 15]]]
    assert figure.axes[0].get_xlabel() == "seconds of training"


def test_an_evaluation_outside_the_records_is_where_it_was_or_left_out(
    tmp_path: pathlib.Path,
) -> None:
    folder = make_timed_run(tmp_path / "a")
    lines = [{"env_steps": step, "return_mean": 1.0, "return_std": 0.0} for step in (50, 200, 400)]
    (folder / "eval.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    run = plot.read_run(folder, x="wall_seconds")
    assert run.evaluations[:, 0].tolist() == [5, 30]
    assert run.evaluated_at.tolist() == [50, 200]


def test_an_evaluation_after_the_last_record_is_where_it_was(tmp_path: pathlib.Path) -> None:
    run = make_run(tmp_path / "a", {100: 10.0, 200: 20.0}, {50: (4.0, 1.0), 250: (12.0, 3.0)})
    assert run.evaluations[:, 0].tolist() == [50, 250]


def test_evaluations_at_the_same_steps_are_together_against_time_too(
    tmp_path: pathlib.Path,
) -> None:
    runs = []
    for seed, pace in ((1, 1.0), (2, 3.0)):
        folder = tmp_path / f"dqn_seed{seed}"
        make_run(folder, {1000: 1.0}, {1000: (10.0 * seed, 1.0)})
        with (folder / "metrics.jsonl").open("w") as file:
            for step in (500, 1000, 1500):
                record = {"env_steps": step, "wall_seconds": step * pace, "return_mean_100": 1.0}
                file.write(json.dumps(record) + "\n")
        runs.append(plot.read_run(folder, "wall_seconds"))
    # The mean of both evaluations is drawn at the mean of their times.
    assert evaluation_bars(plot.draw(runs)) == [[[2000.0, 10.0], [2000.0, 20.0]]]


def test_any_number_of_the_log_is_drawn_without_evaluations(tmp_path: pathlib.Path) -> None:
    figure = plot.draw([plot.read_run(make_timed_run(tmp_path / "a"), y="speed")])
    assert lines(figure)["a"].tolist() == [[100, 10], [200, 5]]
    assert not figure.axes[0].containers
    assert figure.axes[0].get_ylabel() == "speed"
    assert figure.axes[0].get_ylim()[0] == 0


def test_what_goes_below_zero_is_drawn_to_its_own_scale(tmp_path: pathlib.Path) -> None:
    figure = plot.draw([make_run(tmp_path / "a", {0: -21.0, 1000: -10.0})])
    assert figure.axes[0].get_ylim()[0] < -21


def test_what_is_no_number_of_the_log_is_named(tmp_path: pathlib.Path) -> None:
    folder = make_timed_run(tmp_path / "a")
    numbers = "env_steps, return_mean_100, speed, wall_seconds"
    for y in ("note", "losses"):
        with pytest.raises(errors.UserError, match=f"has no numeric field '{y}'; it has {numbers}"):
            plot.read_run(folder, y=y)


def test_binary_writes_the_picture(tmp_path: pathlib.Path) -> None:
    make_run(tmp_path / "a", {1000: 1.0, 2000: 2.0})
    output = tmp_path / "new" / "curve.PNG"
    ended = run_binary("plot", f"--root_dir={tmp_path / 'a'}", f"--output={output}")
    assert (ended.returncode, ended.stdout) == (0, f"wrote {output}\n")
    assert Image.open(output).size == (900, 500)


def test_a_drawing_that_fails_leaves_the_older_one(tmp_path: pathlib.Path) -> None:
    make_run(tmp_path / "run", {0: 1.0})
    output = tmp_path / "curve.png"
    output.write_text("an older one")
    (tmp_path / ".tmp-curve.png").mkdir()
    ended = run_binary("plot", f"--root_dir={tmp_path / 'run'}", f"--output={output}")
    assert (ended.returncode, output.read_text()) == (2, "an older one")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no run to draw"),
        (["--root_dir=missing/run"], "no folder missing/run"),
        (["--root_dir={run}", "--y=speed"], "{run}/metrics.jsonl has no numeric field 'speed'"),
        (["--root_dir={run}", "--output=curve.gif2"], "--output=curve.gif2: the name must end in"),
        (["--root_dir={run}", "--output=x.pgf"], "--output=x.pgf: the name must end in .png,"),
        (
            ["--root_dir={run}", "--output=/proc/x/curve.png"],
            "cannot write --output=/proc/x/curve.png: ",
        ),
    ],
)
def test_binary_names_the_mistake(
    tmp_path: pathlib.Path, arguments: list[str], message: str
) -> None:
    make_run(tmp_path / "a", {1000: 1.0})
    ended = run_binary("plot", *(argument.format(run=tmp_path / "a") for argument in arguments))
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: {message}".format(run=tmp_path / "a"))
    assert "Traceback" not in ended.stderr


def test_every_run_is_in_the_legend_and_no_name_is_warned_of(tmp_path, monkeypatch, recwarn):
    names = ["_hidden", "日本", "plain"]
    figure = plot.draw([make_run(tmp_path / name, {0: 1.0, 9: 2.0}) for name in names])
    assert legend(figure) == names
    ended = run_binary(
        "plot", f"--root_dir={tmp_path / names[1]}", f"--output={tmp_path / 'curve.png'}"
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not recwarn.list
