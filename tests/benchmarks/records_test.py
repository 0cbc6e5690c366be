import hashlib
import itertools
import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_benchmarks import make_suite

from pipeline.benchmarks import records, results
from pipeline.benchmarks.planned_runs import Run, plan
from pipeline.utils.errors import UserError
from pipeline.utils.jsonl import JsonlLog
from pipeline.utils.processor import machine

IF_KNOWN = {
    "source_sha256": "cd",
    "own_modules": {"my_envs": "ef"},
    "device": "CPU",
    "encoder_precision": "float32",
}
METRICS = [
    # env_steps, env_steps_per_second, return_mean_100
    (10, 1.0, None),
    (20, 10.0, 2.0),
    (60, 20.0, 5.0),
]


@pytest.fixture
def run(tmp_path) -> Run:
    """Returns a run whose folder is as `pipeline.train` leaves it."""
    run = plan(make_suite(budget=60), tmp_path)[0]
    run.folder.mkdir(parents=True)
    for name in ("run.json", "result.json"):
        write_json(run, name)
    metrics, evaluations = (JsonlLog(run.folder / f"{x}.jsonl") for x in ("metrics", "eval"))
    for env_steps, rate, mean in METRICS:
        metrics.write(
            {"env_steps": env_steps, "env_steps_per_second": rate, "return_mean_100": mean}
        )
    evaluations.write({"env_steps": 30, "return_mean": 4.5, "return_std": 1.0, "returns": [4.5]})
    config = "import pipeline.agents.dqn\nEvaluator.greedy = False\n"
    (run.folder / "operative_config.gin").write_text(config)
    return run


def write_json(run, name, **changes):
    contents: dict[str, dict] = {
        "run.json": {
            "command": "python -m pipeline.train --seed=1",
            "git_revision": None,
            "versions": {"python": "3.11.7"},
            "threads": {"intra_op": 1, "inter_op": 2},
            "onednn": "0",
            **IF_KNOWN,
            "cpu_model": "of the run",
            "cpu_count": 64,
            "earlier_starts": [{"git_revision": x} for x in ("ab", None, "cd", "ab")],
            "inexact_resumes": [{"env_steps": 20, "why": ["another processor"]}],
        },
        "result.json": {
            "evaluation": {"return_mean": 2.0, "return_std": 1.0, "returns": [1.0, 3.0]},
            "env_steps": 61,
            "updates": 50,
            "episodes": 7,
            "wall_seconds": 12.5,
            "weights_sha256": "ab",
        },
    }
    value = {k: v for k, v in (contents[name] | changes).items() if v != "missing"}
    (run.folder / name).write_text(json.dumps(value))


IDENTITY = {
    "suite": "tiny",
    "algorithm": "dqn",
    "environment": "A-v1",
    "config": "dqn_cartpole",
    "seed": 1,
    "protocol": "any",
    "score": "evaluation",
    "budgets": [],
    "num_seeds": 1,
    "num_env_steps": 60,
}


def test_record_of_a_finished_run(run):
    record = records.finished(run, workers=2)
    config = (run.folder / "operative_config.gin").read_bytes()
    assert record == IDENTITY | {
        "status": "finished",
        "error": None,
        "env_steps": 61,
        "updates": 50,
        "episodes": 7,
        "wall_seconds": 12.5,
        # 10 steps at 10 per second and 40 at 20; the first interval does not count.
        "env_steps_per_second": pytest.approx(50 / 3),
        "workers": 2,
        "evaluation_returns": [1.0, 3.0],
        "evaluation_policy": "sampled",
        "curve": [[20, 2.0], [60, 5.0]],
        "iterations": [],
        "evaluations": [[30, 4.5]],
        "weights_sha256": "ab",
        "config_sha256": hashlib.sha256(config).hexdigest(),
        "command": "python -m pipeline.train --seed=1",
        "git_revision": None,
        "versions": {"python": "3.11.7"},
        "threads": {"intra_op": 1, "inter_op": 2},
        "onednn": "0",
        **IF_KNOWN,
        "cpu_model": "of the run",  # not of the machine that writes the record
        "cpu_count": 64,
        "earlier_revisions": ["ab", "cd"],
        "inexact_resumes": 1,
    }


def test_record_of_a_failed_run_has_the_same_keys(run):
    finished, failed = records.finished(run, 1), records.failed(run, "exit code 2\nno\nNaN")
    assert failed.keys() == finished.keys() - IF_KNOWN.keys()
    assert records.key(failed) == records.key(finished) == ("tiny", "dqn", "A-v1", 1)
    assert (failed["status"], failed["error"]) == ("failed", "exit code 2\nno\nNaN")
    assert records.last_words(failed) == "exit code 2: NaN"
    of_gin = "  Caller supplied values for: []\n  In call to configurable 'train' (<function>)"
    error = f"exit code 1\nE: no\n{of_gin}"
    assert records.last_words(failed | {"error": error}) == "exit code 1: E: no"
    assert records.last_words(failed | {"error": "exit code 1"}) == "exit code 1"
    assert (failed["cpu_model"], failed["cpu_count"]) == tuple(machine().values())
    assert failed["command"].startswith(f"python -m pipeline.train --root_dir={run.folder} ")
    lists = {"evaluation_returns", "curve", "iterations", "evaluations", "earlier_revisions"}
    known = {*IDENTITY, "status", "error", "command", "cpu_model", "cpu_count"}
    assert {
        name for name, value in failed.items() if value is None
    } == failed.keys() - lists - known
    assert all(failed[name] == [] for name in lists)
    assert {name: failed[name] for name in IDENTITY} == IDENTITY


def test_the_module_lists_every_key(run):
    listed = records.__doc__.split("which run;")[0] + records.__doc__
    assert all(name in listed for name in records.finished(run, 1))


def test_an_iteration_s_score_is_of_the_episodes_that_ended_in_it(run):
    thousands = [(100, 10, -200.0), (255, 20, -380.0), (500, 50, -740.0), (760, 90, 20.0)]
    (run.folder / "metrics.jsonl").unlink()
    log = JsonlLog(run.folder / "metrics.jsonl")
    for steps, episodes, total in thousands:
        log.write({"env_steps": 1000 * steps, "episodes": episodes, "return_sum": total})
    budgets = (250_000, 500_000, 750_000, 1_000_000)
    suite = run.suite._replace(score="iteration", budgets=budgets)
    iterations = run._replace(suite=suite, settings={"train.num_env_steps": "750000"})
    record = records.finished(iterations, 1)
    assert record["score"] == "iteration"
    # From the first record after the beginning (step 255,000) to the first one after the end.
    assert record["iterations"] == [[250_000, -19.0], [500_000, -360 / 30], [750_000, 760 / 40]]
    assert results.score_of(record) == results.score_of(record, 750_000) == 19.0
    assert results.score_of(record, 250_000) == -19.0
    assert results.score_of(record, 1_000_000) is None


def test_an_iteration_between_records_that_are_too_far_apart_has_no_score(run):
    (run.folder / "metrics.jsonl").unlink()
    log = JsonlLog(run.folder / "metrics.jsonl")
    for steps, episodes, total in [(260, 10, -200.0), (760, 90, 20.0)]:
        log.write({"env_steps": 1000 * steps, "episodes": episodes, "return_sum": total})
    suite = run.suite._replace(score="iteration", budgets=(250_000, 500_000))
    iterations = run._replace(suite=suite, settings={"train.num_env_steps": "750000"})
    assert records.finished(iterations, 1)["iterations"] == [[250_000, -20.0]]


@pytest.mark.parametrize("name", ["run.json", "result.json"])
def test_a_file_that_lacks_something_is_named(run, name):
    key = {"run.json": "threads", "result.json": "updates"}[name]
    write_json(run, name, **{key: "missing"})
    with pytest.raises(UserError, match=f"seed-1: a file of the run is damaged.*'{key}'"):
        records.finished(run, 1)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("result.json", {"evaluation": {"returns": None}}),
        ("result.json", {"evaluation": {"returns": ["x"]}}),
        ("run.json", {"earlier_starts": [5]}),
    ],
)
def test_a_value_of_another_kind_is_named(run, name, changes):
    write_json(run, name, **changes)
    with pytest.raises(UserError, match="seed-1: a file of the run is damaged"):
        records.finished(run, 1)


def test_a_log_with_words_for_numbers_is_named(run):
    rates = ({"env_steps": "x", "env_steps_per_second": 1.0} for _ in range(2))
    text = "".join(json.dumps(record) + "\n" for record in rates)
    (run.folder / "metrics.jsonl").write_text(text)
    with pytest.raises(UserError, match="seed-1: a file of the run is damaged"):
        records.finished(run, 1)


def test_a_score_from_far_beyond_a_budget_is_not_its(run):
    record = records.finished(run, 1) | {"num_env_steps": 1_000_000}
    record["evaluations"] = [[100_000, 1.0], [104_000, 2.0], [200_000, 3.0]]
    assert results.score_of(record, 100_000) == 1.0
    assert results.score_of(record, 101_000) == 2.0
    assert results.score_of(record, 110_000) is None
    # A little beyond the end of the run is its end.
    assert results.score_of(record, 1_001_000) == results.score_of(record) == 2.0


def test_returns_must_be_finite(run):
    write_json(run, "result.json", evaluation={"returns": [1.0, float("nan")]})
    with pytest.raises(UserError, match="seed-1: a return of the final evaluation is not finite"):
        records.finished(run, 1)


def test_one_log_interval_is_all_the_speed_there_is(run):
    lines = (run.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.folder / "metrics.jsonl").write_text(lines[1])
    assert records.finished(run, 1)["env_steps_per_second"] == 10.0
    (run.folder / "metrics.jsonl").write_text("")
    assert records.finished(run, 1)["env_steps_per_second"] is None


# Reading and writing.


def test_a_later_line_replaces_an_earlier_one(run, tmp_path):
    failed, finished = records.failed(run, "no"), records.finished(run, 1)
    other = failed | {"seed": 2}
    path = tmp_path / "tiny.jsonl"
    records.write(path, [failed, other, finished])
    assert records.read(path) == [finished, other]
    assert records.read(tmp_path / "none.jsonl") == []


def test_what_is_no_record_is_named(run, tmp_path):
    path = tmp_path / "x.jsonl"
    whole = records.finished(run, 1)
    for name in whole.keys() - IF_KNOWN.keys():
        line = json.dumps({key: value for key, value in whole.items() if key != name})
        path.write_text(f"{line}\n")
        with pytest.raises(UserError, match=f"x.jsonl, line 1: it lacks {name}; fix or delete"):
            records.read(path)


def test_a_disk_that_cannot_be_written_is_told(run):
    with pytest.raises(UserError, match="cannot write .*/missing/x.jsonl"):
        records.write(pathlib.Path(run.folder / "missing" / "x.jsonl"), [])


# Curves.


@given(
    steps=st.lists(st.integers(1, 10_000_000), unique=True, max_size=1000).map(sorted),
    budgets=st.lists(st.integers(1, 12_000_000), max_size=4),
)
def test_thinned_curves_keep_what_is_looked_up(steps, budgets):
    points = [[step, float(step % 7)] for step in steps]
    kept = records.thinned(points, budgets)
    assert len(kept) <= records.MAX_CURVE_POINTS + len(budgets)
    assert [point for point in points if point in kept] == kept
    if len(points) <= records.MAX_CURVE_POINTS:
        assert kept == points
    else:
        assert (kept[0], kept[-1]) == (points[0], points[-1])
        gaps = [b - a for a, b in itertools.pairwise(points.index(point) for point in kept)]
        assert max(gaps) <= len(points) / (records.MAX_CURVE_POINTS - 1) + 1
    for budget in budgets:
        at = [point for point in points if point[0] >= budget][:1]
        assert all(point in kept for point in at)


def test_a_chance_of_random_actions_in_evaluation_is_told(run):
    config = "import pipeline.agents.dqn\nEvaluator.epsilon = 0.05\nEvaluator.greedy = True\n"
    (run.folder / "operative_config.gin").write_text(config)
    assert records.finished(run, 1)["evaluation_policy"] == "0.05-greedy"
    macros = "NONE = None\nEPSILON = %NONE\nGREEDY = False\n"
    config = "Evaluator.epsilon = %EPSILON\nEvaluator.greedy = %GREEDY\n"
    (run.folder / "operative_config.gin").write_text(macros + config)
    assert records.finished(run, 1)["evaluation_policy"] == "sampled"
