"""Tests of eager, graph and exact graph execution: what is equal, and where bits differ."""

import functools
import json

import numpy as np
import pytest
import tensorflow as tf
from conftest import assert_refused, run_binary
from tiny_runs import assert_same, bindings, build_components, gin_files, variables

from pipeline import configuration
from pipeline.benchmarks.eager_graph import paired_runs, report, updates
from pipeline.benchmarks.eager_graph.updates import (
    REWRITES,
    Updates,
    difference,
    differences,
    effects,
    largest,
    running,
    same_bits,
)
from pipeline.training.train_loop import train
from pipeline.utils.errors import UserError
from pipeline.utils.execution import Execution
from pipeline.utils.shutdown import StopSignal

NUM_UPDATES = 20


def float32(*values):
    return np.array(values, np.float32)


@pytest.fixture(autouse=True)
def graph_again():
    yield
    Execution.GRAPH.configure()


# The whole program.


@pytest.mark.parametrize(
    "algorithm", ["dqn", *(pytest.param(name, marks=pytest.mark.crash) for name in ("sac", "ppo"))]
)
def test_an_eager_run_evaluates_saves_and_resumes_as_an_exact_graph_does_and_in_no_other_way(
    algorithm, tmp_path, any_config, capsys
):
    def result(folder, num_env_steps, execution):
        lines = bindings(
            algorithm,
            train__num_env_steps=num_env_steps,
            train__eval_interval=0,
            train__num_final_episodes=2,
        )
        if algorithm == "ppo":
            lines.append("linear_schedule.num_steps = 600")
        else:
            lines.append("initialize_replay_buffer.num_env_steps = 60")
        configuration.load(gin_files(algorithm), lines)
        root_dir = tmp_path / folder
        ended = train(root_dir, 1, "resume", StopSignal(), execution=execution)
        assert json.loads((root_dir / "run.json").read_text())["execution"] == execution.value
        return {name: ended[name] for name in ("updates", "evaluation", "weights_sha256")}

    length = {"dqn": 144, "ppo": 96, "sac": 104}[algorithm]  # 20 updates and the warm-up
    result("eager", length - 20, Execution.EAGER)
    here = r"execution \(--eager, --exact_graph\): eager in the checkpoint, "
    for other in (Execution.GRAPH, Execution.EXACT_GRAPH):
        with pytest.raises(
            UserError, match=f"cannot be resumed exactly here:\n  {here}{other.value} here\n"
        ):
            result("eager", length, other)
    eager = result("eager", length, Execution.EAGER)
    assert "building the graph" not in capsys.readouterr().out
    assert eager == result("graph", length, Execution.EXACT_GRAPH)
    assert eager["updates"] >= NUM_UPDATES
    assert "building the graph" in capsys.readouterr().out


# The same updates in each execution.


class Case:
    """An algorithm's updates, and the weights after each of them in each execution."""

    def __init__(self, algorithm):
        parts = build_components(algorithm)
        self.agent, self.updates = parts.agent, Updates(parts, NUM_UPDATES)
        self.eager, self.graph, self.exact = (
            self.updates.run(execution)
            for execution in (Execution.EAGER, Execution.GRAPH, Execution.EXACT_GRAPH)
        )


@pytest.fixture(scope="module")
def case_of():
    return functools.cache(Case)


# Everyday, the whole program above shows the same of DQN's weights. Of all updates, the most
# rewrites change the bits of SAC's.
@pytest.mark.parametrize(
    "algorithm", ["sac", *(pytest.param(name, marks=pytest.mark.crash) for name in ("dqn", "ppo"))]
)
def test_weights_are_identical_with_an_exact_graph_and_drift_without(
    case_of, algorithm, record_property
):
    case = case_of(algorithm)
    assert same_bits(case.eager, case.exact)
    for before, after in zip(case.eager, case.eager[1:], strict=False):
        assert not same_bits([before], [after])
    drift = largest(case.eager, case.graph)
    record_property(f"largest difference of {algorithm} after {NUM_UPDATES} updates", drift)
    assert drift < 1e-6
    assert drift > 0 or algorithm == "dqn"  # no operation of its update is rounded differently


def test_an_update_of_accumulated_gradients_has_several_batches():
    updates = Updates(build_components("dqn", create_dqn_agent__accumulate_updates=3), 2)
    assert len(updates.batches) == 6
    first, second = updates.run(Execution.GRAPH)
    updates.restore()
    for weights in (first, second):
        assert not same_bits([updates.weights()], [weights])
    assert not same_bits([first], [second])


def test_updates_leave_the_agent_as_it_was(case_of):
    agent, updates = case_of("sac").agent, case_of("sac").updates
    before = variables(agent)
    updates.run(Execution.GRAPH)
    updates.per_second(Execution.GRAPH, 0.0)
    assert_same(before, variables(agent))


# Each rewrite takes two graphs.
@pytest.mark.parametrize(
    "tried",
    [
        ("constant_folding", "arithmetic_optimization", "remapping", "dependency_optimization"),
        pytest.param(REWRITES, marks=pytest.mark.crash),
    ],
    ids=len,
)
def test_without_the_rewrites_that_are_responsible_a_graph_has_the_bits_of_eager(
    case_of, tried, monkeypatch
):
    assert set(tried) <= set(REWRITES)
    monkeypatch.setattr(updates, "REWRITES", tried)
    case = case_of("sac")
    found = effects(case.updates, case.eager, case.graph)
    assert found.keys() == set(tried)
    guilty = [rewrite for rewrite, effect in found.items() if effect.changes_bits]
    assert "arithmetic_optimization" in guilty
    assert "dependency_optimization" not in guilty
    assert same_bits(case.updates.run(Execution.GRAPH, guilty), case.eager)
    assert not same_bits(case.updates.run(Execution.GRAPH), case.eager)  # all rewrites are on again


def test_differences_are_by_variable_and_update():
    first = [{"w": float32(1, 0)}, {"w": float32(1, -2)}]
    second = [{"w": float32(1, 0)}, {"w": float32(1.5, -2.5)}]
    assert differences(first, second) == {"w": [(0.0, 0.0), (0.5, 0.5 / 1.5)]}
    assert difference(float32(0, 3), float32(1e-9, 3)).relative == 1.0
    assert difference(np.array([], np.int64), np.array([], np.int64)) == (0.0, 0.0)
    zeros = [{"w": float32(0.0)}], [{"w": float32(-0.0)}]
    assert not same_bits(*zeros)


def test_every_update_has_its_column_in_narrow_tables():
    apart = {"q/kernel": [difference(float32(0), float32(n)) for n in range(12)]}
    first, second = report.difference_tables(apart, "absolute")
    assert first.splitlines()[0].split() == ["after", "update", *map(str, range(1, 11))]
    assert second.splitlines()[0].split() == ["after", "update", "11", "12"]
    assert second.splitlines()[1].split() == ["q/kernel", "1.0e+01", "1.1e+01"]
    assert first.splitlines()[1].split()[1] == "0"


# Runs with the same seeds.


def write_run(folder, seed, execution, return_mean, config="x = 1", **of_start):
    folder.mkdir()
    start = {"seed": seed, "execution": execution, "source_sha256": "ab", **of_start}
    (folder / "run.json").write_text(json.dumps(start))
    (folder / "operative_config.gin").write_text(config)
    if return_mean is not None:
        result = {"evaluation": {"return_mean": return_mean}}
        (folder / "result.json").write_text(json.dumps(result))


def test_paired_runs_are_compared_by_seed(tmp_path):
    for seed in range(1, 11):
        write_run(tmp_path / f"a{seed}", seed, "graph", 400.0 + seed)
        way = "eager" if seed % 2 else "exact graph"
        write_run(tmp_path / f"b{11 - seed:02}", seed, way, 399.0 + seed)
    pairs = paired_runs.read_pairs(str(tmp_path))
    assert pairs == [(seed, 400.0 + seed, 399.0 + seed) for seed in range(1, 11)]
    text = report.of_pairs(pairs)
    assert "eager's bits: 1.0, 95 % bootstrap interval of 10 pairs [1.0, 1.0]," in text
    assert "does not contain 0 and is 0.0 wide" in " ".join(text.split())
    assert len(text.split("\n\n")[0].splitlines()) == 11


@pytest.mark.parametrize(
    ("seed", "execution", "return_mean", "config", "message"),
    [
        (1, "graph", 1.0, "x = 1", "has the same seed and kind as another"),
        (2, "graph", 1.0, "x = 1", "seed 2 has only one of its two runs"),
        (1, "eager", None, "x = 1", "odd is not finished"),
        (1, "eager", 1.0, "x = 2", "another configuration"),
    ],
)
def test_runs_that_make_no_pairs_are_refused(
    tmp_path, seed, execution, return_mean, config, message
):
    write_run(tmp_path / "even", 1, "graph", 1.0)
    if seed == 2:
        write_run(tmp_path / "eager", 1, "eager", 1.0)
    write_run(tmp_path / "odd", seed, execution, return_mean, config)
    with pytest.raises(UserError, match=message):
        paired_runs.read_pairs(str(tmp_path))


@pytest.mark.parametrize("name", ["source_sha256", "encoder_precision", "cpu_model"])
def test_runs_of_other_programs_or_machines_make_no_pairs(tmp_path, name):
    for seed in (1, 2):  # Pairs may differ from each other.
        write_run(tmp_path / f"graph{seed}", seed, "graph", 1.0, **{name: f"{seed}"})
        write_run(tmp_path / f"eager{seed}", seed, "eager", 1.0, **{name: f"{seed}"})
    assert len(paired_runs.read_pairs(str(tmp_path))) == 2
    write_run(tmp_path / "graph3", 3, "graph", 1.0)
    write_run(tmp_path / "eager3", 3, "eager", 1.0, **{name: "another"})
    with pytest.raises(UserError, match=f"differ in more than the kind of execution .{name} in"):
        paired_runs.read_pairs(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("operative_config.gin", None, "cannot read .*operative_config.gin: No such file"),
        ("run.json", '{"seed": 1}', "run.json lacks the execution or the seed"),
        ("result.json", '{"env_steps": 1}', "result.json lacks the final evaluation"),
    ],
)
def test_what_a_run_lacks_is_named(tmp_path, name, content, message):
    write_run(tmp_path / "run", 1, "graph", 1.0)
    (tmp_path / "run" / name).unlink()
    if content:
        (tmp_path / "run" / name).write_text(content)
    with pytest.raises(UserError, match=message):
        paired_runs.read_pairs(str(tmp_path))


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(UserError, match="the folder contains no run folders"):
        paired_runs.read_pairs(str(tmp_path))
    with pytest.raises(UserError, match="there is no such folder"):
        paired_runs.read_pairs(str(tmp_path / "missing"))


# The binary.


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "say what to compare"),
        (["--gin_file=dqn_cartpole", "--paired_runs=runs"], "say what to compare"),
        (["--paired_runs=runs", "--seed=2"], "--seed has no effect with --paired_runs"),
        (["--gin_file=dqn_cartpol"], "dqn_cartpole"),
        (["--gin_file=dqn_cartpole", "--num_updates=0"], "num_updates"),
        (["--gin_file=environments/gymnasium"], "train.create_agent is not bound"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_line(flags, message):
    assert_refused(f".*{message}.*", "parity", *flags)


@pytest.mark.crash
def test_the_binary_answers_all_questions():
    ended = run_binary("parity", "--gin_file=ppo_cartpole", "--num_updates=1")
    assert ended.returncode == 0, ended.stderr
    assert not ended.stderr
    for words in (
        "Largest absolute difference between eager and graph after each update",
        "Largest relative difference between eager and graph after each update",
        "Between eager and exact graph: the same bits in all variables after each of 1 updates.",
        "Responsible rewrites: ",
        "exact graph",
    ):
        assert words in ended.stdout


@pytest.mark.parametrize(("execution", "calls"), [(Execution.EAGER, 2), (Execution.GRAPH, 1)])
def test_eagerly_python_runs_at_every_call(execution, calls):
    called = []

    @tf.function(autograph=False)
    def double(x):
        called.append(x)
        return 2 * x

    with running(execution):
        double(tf.constant(1.0))
        double(tf.constant(1.0))
    assert len(called) == calls
