"""Searches whose trials `fake_training` trains."""

import json
import re
import shutil
import sys
import time

import preloaded
import pytest
from tiny_benchmarks import StopWhen, start_fake
from tiny_searches import PATIENT, make_search, run

from pipeline import configuration
from pipeline.benchmarks.train_process import TrainProcess
from pipeline.configuration.statements import Binding
from pipeline.tuning import tuner
from pipeline.tuning.halving import Trial
from pipeline.tuning.search_folder import SearchFolder, read_search, read_trials
from pipeline.tuning.search_report import write
from pipeline.utils.errors import RETRY_CODE, RetryableError, UserError


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert run(folder, PATIENT, 6)
    return folder


def trained(folder, search, num_trials):
    """Returns the trials of a search after all have been trained."""
    assert run(folder, search, num_trials)
    return read_trials(folder)


def test_the_best_of_each_bracket_is_trained_to_the_end(uninterrupted):
    trials = SearchFolder(uninterrupted, PATIENT)
    with trials:
        found = trials.trials
    assert [len(found[n].returns) for n in range(6)].count(2) == 2
    for of_bracket in ((0, 1, 2), (3, 4, 5)):
        qualities = {n: found[n].parameters["fake.quality"] for n in of_bracket}
        best = max(qualities, key=qualities.__getitem__)
        assert [n for n in of_bracket if len(found[n].returns) == 2] == [best]
        assert found[best].returns == ((qualities[best],), (qualities[best],))
    for log in uninterrupted.glob("tiny/*/seed-1.log"):
        number = int(log.parent.name.removeprefix("trial-"))
        assert log.read_text().count("started") == len(found[number].returns)


def test_a_killed_search_ends_as_if_it_had_not_been(tmp_path, uninterrupted):
    for number_of_records in (1, 4):
        process = preloaded.Popen([sys.executable, "-m", "tiny_searches", str(tmp_path)])
        path = tmp_path / "trials.jsonl"
        while not (path.exists() and len(path.read_text().splitlines()) > number_of_records):
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        process.wait()
    assert run(tmp_path, PATIENT, 6, workers=1)
    records = (tmp_path / "trials.jsonl").read_text()
    assert records == (uninterrupted / "trials.jsonl").read_text()


def test_a_stopped_search_goes_on(tmp_path, uninterrupted):
    has_result = StopWhen(lambda: any(x.returns for x in read_trials(tmp_path).values()))
    assert not run(tmp_path, PATIENT, 6, stop=has_result)
    assert run(tmp_path, PATIENT, 6)
    records = (tmp_path / "trials.jsonl").read_text()
    assert records == (uninterrupted / "trials.jsonl").read_text()


def test_results_that_a_killed_search_has_not_recorded_are_found(tmp_path, uninterrupted):
    folder = tmp_path / "copy"
    shutil.copytree(uninterrupted, folder)
    path = folder / "trials.jsonl"
    records = path.read_text()
    lines = [json.loads(line) | {"returns": []} for line in records.splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for log in folder.glob("tiny/*/*/eval.jsonl"):  # The first evaluation at a rung counts.
        with log.open("a") as file:
            file.write(json.dumps({"env_steps": 15_000, "return_mean": 7.0}) + "\n")
    assert run(folder, PATIENT, 6)
    assert path.read_text() == records


def test_more_trials_continue_a_search(tmp_path):
    search = PATIENT._replace(rungs=(), bindings=())
    first = trained(tmp_path, search, 2)
    more = trained(tmp_path, search, 4)
    assert len(more) == 4
    assert {number: more[number] for number in first} == first


@pytest.mark.parametrize("workers", [1, 3])
def test_trials_with_the_same_values_are_trained_once(tmp_path, workers):
    search = PATIENT._replace(parameters={"fake.quality": ("choice", 0.25, 0.5)}, num_seeds=2)
    assert run(tmp_path, search, 9, workers)
    trials = read_trials(tmp_path)
    assert [len(trial.returns) for trial in trials.values()].count(2) == 3
    for trial in trials.values():
        quality = trial.parameters["fake.quality"]
        assert set(trial.returns) == {(quality, 2 * quality)}
    assert len(list(tmp_path.glob("tiny/trial-*"))) == 2


def test_a_failed_run_fails_all_trials_with_its_values(tmp_path):
    broken = tmp_path / "broken"
    broken.touch()
    search = make_search(
        parameters={"fake.quality": ("choice", 0.25, 0.5)},
        bindings=("fake.failing = '1'", f"fake.broken = '{broken}'"),
        rungs=(),
    )
    assert run(tmp_path / "search", search, 4)
    assert all(trial.error for trial in read_trials(tmp_path / "search").values())


def test_the_value_is_the_mean_over_seeds(tmp_path):
    search = PATIENT._replace(rungs=(), bindings=(), num_seeds=3)
    (trial,) = trained(tmp_path, search, 1).values()
    quality = trial.parameters["fake.quality"]
    assert trial.returns == ((pytest.approx(quality), 2 * quality, pytest.approx(3 * quality)),)
    assert trial.value(0) == pytest.approx(2 * quality)


def test_another_search_is_refused(tmp_path):
    search = PATIENT._replace(rungs=(), bindings=())
    run(tmp_path, search, 1)
    with pytest.raises(UserError, match=r"search\.seed: 5 then, 6 now"):
        run(tmp_path, search._replace(seed=6), 2)
    with pytest.raises(UserError, match=r"fake\.other_binding: nothing then, 1 now"):
        run(tmp_path, search._replace(bindings=("fake.other_binding = 1",)), 2)


def test_a_folder_is_for_one_process(tmp_path, impatient_locks):
    with (
        SearchFolder(tmp_path, PATIENT),
        pytest.raises(UserError, match="another search is running in"),
    ):
        run(tmp_path, PATIENT, 1)


def test_the_warnings_of_trials_are_told_once(tmp_path, capsys):
    def start(run):
        run.log.parent.mkdir(parents=True, exist_ok=True)
        run.log.write_text("warning: evalution/f.x is not used here.\n")
        return start_fake(run)

    search = PATIENT._replace(rungs=(), bindings=())
    run(tmp_path, search, 2, workers=1, start=start)
    assert capsys.readouterr().out.count("seed 1: warning: evalution/f.x is not used here.") == 1


def test_a_failed_trial_is_recorded_and_the_search_goes_on(tmp_path, capsys):
    (tmp_path / "broken").touch()
    bindings = ("fake.failing = '2'", f"fake.broken = '{tmp_path / 'broken'}'")
    search = PATIENT._replace(rungs=(), bindings=bindings, num_seeds=2)
    trials = trained(tmp_path / "search", search, 2)
    assert all("seed 2: exit code 2" in str(x.error) for x in trials.values())
    assert "error: the loss is NaN" in capsys.readouterr().out
    with pytest.raises(UserError, match="all 2 trials failed.*: error: the loss is NaN"):
        write(tmp_path / "search")


@pytest.mark.parametrize("rungs", [(), (10_000,)])
def test_a_trial_whose_evaluation_saw_no_episode_end_fails(tmp_path, rungs):
    """Its mean return is unknown. As 0, it would beat all trials with negative returns."""
    search = PATIENT._replace(rungs=rungs, bindings=("fake.quality = 'nan'",))
    search = search._replace(parameters={"fake.other": ("int", 1, 9)})
    trials = trained(tmp_path, search, 2)
    assert all("no episode ended in an evaluation" in str(x.error) for x in trials.values())


def test_a_run_that_was_killed_is_started_again(tmp_path, capsys):
    killed = {"fake.quality": ("uniform", 2, 3)}
    search = PATIENT._replace(rungs=(), bindings=(), parameters=killed)
    (trial,) = trained(tmp_path, search, 1).values()
    assert trial.returns
    assert "ended by signal 9 (Killed). The run will be restarted" in capsys.readouterr().out


def test_a_run_that_was_stopped_by_somebody_else_is_started_again(tmp_path, capsys):
    started = []

    def start(run):
        started.append(run.name)
        return ends_with(143, "stopped")(run) if len(started) == 1 else start_fake(run)

    search = PATIENT._replace(rungs=(), bindings=())
    run(tmp_path, search, 1, workers=1, start=start)
    (trial,) = read_trials(tmp_path).values()
    assert trial.returns and len(started) == 2
    assert "exit code 143. The run will be restarted" in capsys.readouterr().out


def ends_with(code, message, *names):
    """Returns a function that starts a process which fails, for trials of these names, or all."""
    program = f"import sys; print({message!r}); sys.exit({code})"

    def start(run):
        if names and run.experiment.name not in names:
            return start_fake(run)
        return TrainProcess(run, (sys.executable, "-c", program))

    return start


@pytest.mark.parametrize("workers", [1, 3])
def test_a_config_that_cannot_be_trained_ends_the_search(tmp_path, workers):
    started = []

    def start(run):
        started.append(run.name)
        return ends_with(2, "error: no configurable is named x")(run)

    with pytest.raises(UserError, match="no configurable is named x"):
        run(tmp_path, PATIENT, 9, workers=workers, start=start)
    assert len(started) == 3  # the values of one trial may be incompatible


@pytest.mark.parametrize(("failing", "workers"), [(0, 2), (1, 1), (1, 3)])
def test_a_trial_that_cannot_be_trained_fails_alone(tmp_path, failing, workers):
    search = PATIENT._replace(rungs=(), bindings=())
    start = ends_with(2, "error: 100 does not divide 256", f"trial-00{failing}")
    run(tmp_path, search, 3, workers=workers, start=start)
    trials = read_trials(tmp_path)
    assert "does not divide" in str(trials.pop(failing).error)
    assert len(trials) == 2 and all(trial.returns for trial in trials.values())


def test_what_is_no_fault_of_a_trial_ends_the_search_and_fails_no_trial(tmp_path):
    search = PATIENT._replace(rungs=(), bindings=())
    start = ends_with(RETRY_CODE, "error: cannot be resumed exactly here", "trial-001")
    with pytest.raises(RetryableError, match="(?s)trial-001.*cannot be resumed exactly here"):
        run(tmp_path, search, 2, workers=1, start=start)
    assert read_trials(tmp_path)[1].error is None
    assert all(trial.returns for trial in trained(tmp_path, search, 2).values())


@pytest.mark.parametrize("name", ["train.num_env_steps", "train_loop.train.num_env_steps"])
def test_bindings_do_not_change_the_budget(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.gin").write_text(f"{name} = 50")
    for binding in (f"{name} = 50", "include 'short.gin'"):
        with pytest.raises(UserError, match="set search.num_env_steps instead"):
            run(tmp_path / "search", PATIENT._replace(bindings=(binding,)), 1)


def test_rungs_are_where_evaluations_are(tmp_path):
    search = PATIENT._replace(rungs=(10_500,), num_env_steps=20_000)
    with pytest.raises(UserError, match=r"10_500 is not a multiple of train\.eval_interval"):
        run(tmp_path, search, 1)
    with pytest.raises(UserError, match=r'add "train\.eval_interval = 5_000"'):
        often = ("train.eval_interval = 10_000",)
        run(tmp_path, search._replace(rungs=(10_000, 15_000), bindings=often), 1)
    with pytest.raises(UserError, match="train.eval_interval = 0 makes none: add "):
        run(tmp_path, search._replace(bindings=("train.eval_interval = 0",)), 1)
    warm_up = ("STEPS = 1e4", "initialize_replay_buffer.num_env_steps = %STEPS")
    late = PATIENT._replace(rungs=(10_000,), num_env_steps=20_000, bindings=warm_up)
    with pytest.raises(UserError, match=r"10_000 is within the warm-up, .*num_env_steps = 10_000"):
        run(tmp_path, late, 1)
    parameters = {"initialize_replay_buffer.num_env_steps": ("int", 10, 10_000)}
    with pytest.raises(
        UserError, match=r"num_env_steps cannot be searched over with search\.rungs"
    ):
        run(tmp_path, search._replace(parameters=parameters), 1)
    parameters = {f"components.{name}": of for name, of in parameters.items()}
    with pytest.raises(
        UserError, match=r"num_env_steps cannot be searched over with search\.rungs"
    ):
        run(tmp_path, search._replace(parameters=parameters), 1)
    macros = ("INTERVAL = 3_500", "train.eval_interval = %INTERVAL")
    assert run(tmp_path, search._replace(bindings=macros), 1)


# The report.


def test_the_report_names_the_best_and_what_was_saved(uninterrupted):
    paths = write(uninterrupted)
    assert [path.name for path in paths] == ["report.md", "report.html", "best.gin"]
    text, page, best = (path.read_text() for path in paths)
    with SearchFolder(uninterrupted, PATIENT) as folder:
        trial = tuner.best_trial(folder.trials)
    assert trial is not None
    assert f"The best of 6 trials is trial {trial.number}" in text
    # Four of six trials were paused after half of their steps.
    assert "training all of them to the end would have taken 120,000, so 33% were saved" in text
    assert text.count("| not continued |") == 4
    assert text.count("\n| ") >= 6
    assert page.count("<svg") == 3
    assert "fake.quality" in page
    path = uninterrupted / "best.gin"
    assert best.startswith(f"# Trial {trial.number} of the search tiny, the best of 6 trials.")
    statements = configuration.read([str(path)], [])
    bound = {x.name: x.value for x in statements if isinstance(x, Binding)}
    assert bound["fake.quality"] == trial.parameters["fake.quality"]
    assert bound["train.num_env_steps"] == 20_000


def put(path, search, returns, errors=()):
    """Writes the records of trials with these returns; those in `errors` have failed."""
    with SearchFolder(path, search) as folder:
        folder.check_settings({})
        for number, of_trial in enumerate(returns):
            parameters = {"fake.quality": number / 10, "fake.other": 1 + 7 * number % 10}
            error = "the loss is NaN" if number in errors else None
            folder.put(Trial(number, parameters, of_trial, error))


def test_parameters_of_the_best_override_the_bindings_of_the_search(tmp_path):
    search = make_search(rungs=(10,), bindings=("fake.quality = 7.0",))
    put(tmp_path, search, [((1.0,), (2.0,)), ((3.0,), (4.0,))])
    *_, path = write(tmp_path)
    statements = configuration.read([str(path)], [])
    bound = {x.name: x.value for x in statements if isinstance(x, Binding)}
    assert bound["fake.quality"] == 0.1


def test_trials_are_listed_from_the_best_to_the_failed_and_counted_if_their_value_is_known(
    tmp_path,
):
    returns = [((1.0,),), ((9.0,), (2.0,)), ((3.0,), (4.0,)), (), ((8.0,), (8.0,))]
    put(tmp_path, make_search(rungs=(10,)), returns, errors=(4,))
    text = write(tmp_path)[0].read_text()
    listed = re.findall(r"^\| (\d) \| [a-z0-9 ]+ \|", text, re.MULTILINE)
    assert listed == ["2", "1", "0", "3", "4"]
    assert "The best of 4 trials is trial 2" in text


def test_a_parameter_is_important_for_the_returns_at_the_first_rung(tmp_path):
    # `put` gives trial n the parameters n / 10 and 1 + 7 n % 10.
    returns = [((float(n),), (1.0 + 7 * n % 10,)) for n in range(8)]
    put(tmp_path, make_search(rungs=(10,)), returns)
    text = write(tmp_path)[0].read_text()
    table = text.partition("Importance for the return after 10 steps")[2].partition("\n\n## ")[0]
    shares = dict(re.findall(r"`(fake\.\w+)` \| ([\d.]+)", table))
    assert float(shares["fake.quality"]) > 2 * float(shares["fake.other"])


def test_a_search_without_an_evaluated_trial_has_no_report(tmp_path):
    put(tmp_path, make_search(rungs=(10,)), [()])
    with pytest.raises(UserError, match=f"no trial in {tmp_path} has been evaluated yet"):
        write(tmp_path)


def test_where_all_returns_are_equal_no_parameter_is_important(tmp_path):
    put(tmp_path, make_search(rungs=(10,)), [((5.0,), (float(n),)) for n in range(8)])
    assert "Importance" not in write(tmp_path)[0].read_text()


def test_the_report_of_a_running_search_tells_which_trials_may_go_on(tmp_path):
    returns = [((1.0,), (2.0,)), ((3.0,),), ((2.0,),), ((4.0,),), ((5.0,),), ()]
    put(tmp_path, make_search(rungs=(10,)), returns)
    text = write(tmp_path)[0].read_text()
    states = re.findall(r"^\| (\d) \| ([a-z0-9 ]+) \|", text, re.MULTILINE)
    assert dict(states) == {
        "0": "finished",
        "1": "at 10 steps",
        "2": "not continued",
        "3": "at 10 steps",
        "4": "at 10 steps",
        "5": "begun",
    }
    assert "2 trials ended" in text and "taken 180, so 44% were saved" in text


def test_the_best_config_includes_files_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "er")
    (tmp_path / "mine.gin").write_text("include 'dqn_cartpole.gin'\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more.gin").write_text("fake.more = 1\n")
    search = PATIENT._replace(rungs=(), bindings=("include 'more.gin'",), config="mine.gin")
    run(tmp_path / "link" / "search", search, 1)
    *_, path = write(tmp_path / "link" / "search")
    statements = configuration.read([str(path)], [])
    bound = {x.selector for x in statements if isinstance(x, Binding)}
    assert {"train", "fake"} <= bound and "fake.more = 1\n" in path.read_text()
    monkeypatch.chdir("/")
    with pytest.raises(UserError, match="mine.gin.*Run the command in the folder of the search"):
        write(tmp_path / "link" / "search")


def test_the_best_config_keeps_the_values_of_the_search(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "mine.gin"
    config.write_text("fake.more = 1\nfake.quality = 2\nfake.less = 3\n")
    search = PATIENT._replace(rungs=(), bindings=(), config="mine.gin")
    run(tmp_path / "search", search, 1)
    *_, path = write(tmp_path / "search")
    before = path.read_text()
    config.write_text("fake.more = 9\nfake.quality = 7\nfake.new = 5\n")  # quality is a parameter
    write(tmp_path / "search")
    assert "Gin files have changed" not in before
    assert path.read_text().startswith(
        before[: before.index("fake.quality")]
        + "# Gin files have changed since the search, which began with these values.\n"
        "fake.more = 1\nfake.less = 3\n"
        "# When the search began, the gin files did not bind fake.new.\nfake.quality = "
    )


def test_the_report_tells_which_programs_made_the_runs(tmp_path):
    search = PATIENT._replace(rungs=(), bindings=())
    run(tmp_path, search, 2)
    assert "not all runs" not in write(tmp_path)[0].read_text().lower()
    for digest, start in enumerate(tmp_path.glob("tiny/trial-*/seed-1/run.json")):
        before = json.loads(start.read_text())
        start.write_text(json.dumps({**before, "own_modules": {"mine": str(digest)}}))
    text = write(tmp_path)[0].read_text()
    assert "Not all runs were made alike" in text
    assert "made with different modules of your own" in text


def test_the_search_is_read_back(uninterrupted):
    assert read_search(uninterrupted) == PATIENT


def test_fewer_trials_first_change_nothing_of_what_follows(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.tuning.search._STARTUP_TRIALS", 3)  # the others depend on these
    search = PATIENT._replace(sampler="tpe", bindings=())
    whole = trained(tmp_path / "whole", search, 9)
    run(tmp_path / "parts", search, 4)  # the second bracket is one trial, trained to the end
    run(tmp_path / "parts", search, 2)
    parts = trained(tmp_path / "parts", search, 9)
    assert [x.parameters for x in parts.values()] == [x.parameters for x in whole.values()]


def test_a_search_that_has_trained_nothing_may_be_corrected(tmp_path):
    start = ends_with(2, "error: no configurable is named x")
    with pytest.raises(UserError, match="the trials cannot be trained"):
        run(tmp_path, PATIENT, 3, workers=2, start=start)
    corrected = {"fake.quality": ("uniform", 0.5, 1)}
    assert run(tmp_path, PATIENT._replace(parameters=corrected, rungs=(), bindings=()), 1)


def test_a_process_that_cannot_be_started_fails_no_trial(tmp_path):
    def start(run):
        raise OSError(28, "No space left on device")

    with pytest.raises(RetryableError, match="cannot be started.*No space left"):
        run(tmp_path, PATIENT, 3, workers=1, start=start)
    assert trained(tmp_path, PATIENT._replace(rungs=(), bindings=()), 1)[0].returns


@pytest.mark.parametrize(
    "change",
    [{"parameters": {}}, {"number": "1"}, {"returns": 5}, {"returns": [["x"]]}, None],
    ids=str,
)
def test_a_damaged_record_is_named(tmp_path, uninterrupted, change):
    shutil.copytree(uninterrupted, tmp_path / "copy")
    path = tmp_path / "copy" / "trials.jsonl"
    records = path.read_text().splitlines()
    records[1] = json.dumps(json.loads(records[1]) | change) if change else records[1][:20]
    path.write_text("\n".join(records) + "\n")
    message = r"trials\.jsonl: line 2 is damaged" if change else r"trials\.jsonl, line 2: "
    for act in (lambda: run(tmp_path / "copy", PATIENT, 6), lambda: write(tmp_path / "copy")):
        with pytest.raises(UserError, match=message):
            act()


def test_a_missing_or_damaged_search_file_is_named(tmp_path, uninterrupted):
    shutil.copytree(uninterrupted, tmp_path / "copy")
    path = tmp_path / "copy" / "search.json"
    path.write_text("{")
    with pytest.raises(UserError, match="search.json is damaged .* restore it from a backup"):
        run(tmp_path / "copy", PATIENT, 6)
    path.unlink()
    with pytest.raises(UserError, match="its search.json is missing"):
        run(tmp_path / "copy", PATIENT, 6)
    with pytest.raises(UserError, match="contains no search"):
        write(tmp_path / "copy")
