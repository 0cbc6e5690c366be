import shutil

import pytest
from tiny_benchmarks import make_suite, recorded, run, starts
from tiny_searches import PATIENT

from pipeline.benchmarks import suites
from pipeline.benchmarks.planned_runs import plan
from pipeline.benchmarks.suite_folder import SuiteFolder, read_plan
from pipeline.benchmarks.suites import Experiment
from pipeline.tuning.search_folder import SearchFolder
from pipeline.utils.errors import UserError


def test_a_second_benchmark_is_refused(tmp_path, impatient_locks):
    message = "another benchmark is running in .*choose another --output_dir"
    with SuiteFolder(tmp_path, "tiny"), pytest.raises(UserError, match=message):
        run(tmp_path, make_suite())
    assert starts(tmp_path) == {}


def test_a_benchmark_and_a_search_need_folders_of_their_own(tmp_path):
    run(tmp_path / "bench", make_suite())
    with pytest.raises(UserError, match="is the folder of a benchmark. Choose another --output_d"):
        SearchFolder(tmp_path / "bench", PATIENT)
    with SearchFolder(tmp_path / "search", PATIENT) as folder:
        folder.check_settings({})
    with pytest.raises(UserError, match="is the folder of a search. Choose another --output_dir"):
        run(tmp_path / "search", make_suite())


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to --output_dir=.*/file/bench: Not a dir"):
        run(tmp_path / "file" / "bench", make_suite())


def test_a_torn_line_does_not_spoil_the_next(tmp_path):
    run(tmp_path, make_suite())
    path = tmp_path / "tiny.jsonl"
    path.write_text(path.read_text()[:-5])
    run(tmp_path, make_suite(2))
    assert len(recorded(tmp_path)) == 4
    assert set(starts(tmp_path).values()) == {1}


# Runs with other settings.


def test_another_budget_is_refused(tmp_path):
    run(tmp_path, make_suite())
    with pytest.raises(UserError) as error:
        run(tmp_path, make_suite(2, budget=200))
    folder = tmp_path / "tiny" / "dqn-A-v1"
    assert str(error.value) == (
        f"{folder} has runs with other settings than the requested ones:\n"
        "  train.num_env_steps: 100 then, 200 now\n"
        f"Choose another --output_dir. Or, to run dqn-A-v1 from the start, delete {folder} and its "
        f"lines in {tmp_path / 'tiny.jsonl'}."
    )
    assert set(starts(tmp_path).values()) == {1}


def test_another_budget_is_refused_from_the_first_seed_that_has_begun_on(tmp_path):
    with SuiteFolder(tmp_path, "tiny") as folder:
        runs = plan(make_suite(2), tmp_path)
        folder.check_settings(runs)
        runs[0].folder.mkdir(parents=True)
        (runs[0].folder / "run.json").write_text("{}")  # nothing is recorded
        with pytest.raises(UserError, match="100 then, 200 now"):
            folder.check_settings(plan(make_suite(2, budget=200), tmp_path))


def test_another_binding_is_refused(tmp_path):
    run(tmp_path, make_suite(), bindings=["create_dqn_agent.discount = 0.5"])
    with pytest.raises(UserError, match="create_dqn_agent.discount: 0.5 then, 0.99 now\n"):
        run(tmp_path, make_suite(2))
    with pytest.raises(UserError, match="fake.x: nothing then, 1 now\n"):
        run(tmp_path, make_suite(), bindings=["create_dqn_agent.discount = 0.5", "fake.x = 1"])
    # The same value from another source is not a difference.
    assert run(tmp_path, make_suite(1, "create_dqn_agent.discount=0.5")) == (2, [], 0)


@pytest.mark.parametrize(("name", "value"), [("protocol", "another"), ("score", "training")])
def test_scores_of_another_kind_are_refused(tmp_path, name, value):
    suite = make_suite()
    run(tmp_path, suite)
    with pytest.raises(
        UserError, match=f"suite.{name}: '{getattr(suite, name)}' then, '{value}' now"
    ):
        run(tmp_path, suite._replace(num_seeds=2, **{name: value}))


def test_what_a_refused_call_asked_for_is_not_noted(tmp_path):
    run(tmp_path, make_suite())
    for _ in range(2):
        with pytest.raises(UserError, match="100 then, 200 now"):
            run(tmp_path, make_suite(budget=200))
    assert run(tmp_path, make_suite()) == (2, [], 0)


def test_an_edited_config_is_refused_even_if_only_the_record_is_left(tmp_path):
    config = tmp_path / "mine.gin"
    config.write_text("create_dqn_agent.n_step = 1\n")
    experiment = Experiment("dqn", "A-v1", str(config), 100)
    suite = make_suite()._replace(experiments=(experiment,))
    output_dir = tmp_path / "bench"
    assert run(output_dir, suite).finished == 1
    (output_dir / "tiny").rename(tmp_path / "elsewhere")
    config.write_text("create_dqn_agent.n_step = 5\n")
    with pytest.raises(UserError, match="create_dqn_agent.n_step: 1 then, 5 now"):
        run(output_dir, suite)


def test_settings_are_free_until_a_run_has_begun(tmp_path):
    with SuiteFolder(tmp_path, "tiny") as folder:
        for budget in (100, 200):
            folder.check_settings(plan(make_suite(budget=budget), tmp_path))
    assert run(tmp_path, make_suite()) == (2, [], 0)


def test_a_run_that_could_not_be_started_has_not_begun(tmp_path):
    in_the_way = tmp_path / "tiny" / "dqn-A-v1" / "seed-1.log"
    in_the_way.mkdir(parents=True)
    assert len(run(tmp_path, make_suite()).failed) == 1
    in_the_way.rmdir()
    only_a = suites.select_experiments(make_suite(budget=200), ["dqn-A-v1"])
    assert run(tmp_path, only_a) == (1, [], 0)


def test_what_was_asked_for_is_noted_before_anything_has_run(tmp_path):
    assert read_plan(tmp_path, "tiny") == {}
    with SuiteFolder(tmp_path, "tiny") as folder:
        for num_seeds in (1, 5, 2):
            folder.check_settings(plan(make_suite(num_seeds), tmp_path))
        only_b = suites.select_experiments(make_suite(7), ["dqn-B-v1"])
        folder.check_settings(plan(only_b, tmp_path))
    noted = read_plan(tmp_path, "tiny")
    assert {name: requested.num_seeds for name, requested in noted.items()} == {
        "dqn-A-v1": 5,
        "dqn-B-v1": 7,
    }


@pytest.mark.parametrize(
    "text",
    ["{", '{"a": 5}', '{"a": {"num_seeds": 5}}', '{"a": {"num_seeds": "x", "settings": {}}}'],
)
def test_a_damaged_plan_is_named(tmp_path, text):
    (tmp_path / "tiny.plan.json").write_text(text)
    with pytest.raises(UserError, match="tiny.plan.json is damaged"):
        read_plan(tmp_path, "tiny")


def test_runs_of_unknown_settings_are_refused(tmp_path):
    suite = make_suite()
    run(tmp_path, suite._replace(experiments=suite.experiments[:1]))
    (tmp_path / "tiny.plan.json").unlink()
    with pytest.raises(UserError, match=r"plan.json does not have dqn-A-v1, .* are not known"):
        run(tmp_path, suite)
    assert run(tmp_path, suite._replace(experiments=suite.experiments[1:])) == (1, [], 0)


def test_a_run_of_another_seed_is_not_taken_for_one_of_this_seed(tmp_path):
    run(tmp_path, make_suite())
    folder = tmp_path / "tiny" / "dqn-A-v1"
    (folder / "seed-1" / "run.json").write_text('{"seed": 1}')
    shutil.copytree(folder / "seed-1", folder / "seed-2")
    outcome = run(tmp_path, make_suite(2))
    assert (outcome.finished, outcome.left) == (3, 0)
    ((failed, reason),) = outcome.failed
    assert failed.seed == 2 and "was begun with --seed=1, not 2" in reason


def test_experiments_may_be_added(tmp_path):
    suite = make_suite()
    run(tmp_path, suite._replace(experiments=suite.experiments[:1]))
    assert run(tmp_path, suite) == (2, [], 0)
    assert set(starts(tmp_path).values()) == {1}
