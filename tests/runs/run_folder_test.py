import errno
import json
import os
import pathlib

import pytest

from pipeline import configuration
from pipeline.runs import run_folder, source_revision
from pipeline.runs.run_folder import RunFolder
from pipeline.utils.errors import UserError
from pipeline.utils.files import write_text

THREADS = {"intra_op": 1, "inter_op": 1}


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "deep" / "run")


@pytest.fixture
def config(monkeypatch):
    """Replaces the operative config with the only item of a list, which tests may change."""
    text = ["train.num_env_steps = 100\n"]
    monkeypatch.setattr(configuration, "operative_config", lambda: text[0])
    return text


def begin(folder, seed=1, env_steps=0):
    folder.open("resume", seed)
    return folder.describe(seed, 4, {"threads": THREADS}, env_steps)


def test_a_new_run_is_described(folder, config):
    assert begin(folder) == []
    description = folder.read_json("run.json")
    assert description["seed"] == 1
    assert description["num_envs"] == 4
    assert description["threads"] == THREADS
    assert description["resumed_at_env_steps"] == []
    assert description["command"].startswith("python ")
    assert {"python", "tensorflow", "tf-agents", "numpy"} <= description["versions"].keys()
    assert (folder.path / "operative_config.gin").read_text() == config[0]


def test_resuming_notes_where_it_went_on_and_keeps_how_it_was_started_before(
    folder, config, monkeypatch
):
    for env_steps, flag in ((0, "--a"), (100, "--b"), (250, "--c")):
        monkeypatch.setattr("sys.argv", ["train.py", flag])
        assert begin(folder, env_steps=env_steps) == []
    description = folder.read_json("run.json")
    assert description["resumed_at_env_steps"] == [100, 250]
    assert description["command"] == "python -m pipeline.train --c"
    earlier = description["earlier_starts"]
    assert [start["command"] for start in earlier] == [
        "python -m pipeline.train --a",
        "python -m pipeline.train --b",
    ]
    of_run = {"has_checkpoint", "resumed_at_env_steps", "earlier_starts", "inexact_resumes"}
    assert earlier[0].keys() == description.keys() - of_run
    assert description["inexact_resumes"] == []


def test_a_run_that_has_had_a_checkpoint_knows_so(folder, config):
    begin(folder)
    folder.check_none_lost()
    folder.note_checkpoint()
    with pytest.raises(UserError, match="run.json says that .* but .*checkpoints holds none"):
        folder.check_none_lost()
    for env_steps in (0, 100):  # a warm start has a checkpoint before its first step
        begin(folder, env_steps=env_steps)
        with pytest.raises(UserError, match="--restart_behavior=restart"):
            folder.check_none_lost()


def test_a_run_whose_run_json_was_deleted_does_not_begin_anew_over_its_results(folder, config):
    begin(folder)
    (folder.path / "run.json").unlink()
    folder.check_none_lost()
    folder.metrics.write_text("{}\n")
    with pytest.raises(UserError, match="has the results of a run, but .*checkpoints holds none"):
        folder.check_none_lost()


def test_a_program_that_has_changed_since_the_last_start_is_told(folder, config, monkeypatch):
    begin(folder)
    assert begin(folder, env_steps=100) == []
    monkeypatch.setattr(source_revision, "source_sha256", lambda: "another")
    (message,) = begin(folder, env_steps=200)
    assert message.startswith("warning: this program has changed since the last start")
    assert begin(folder, env_steps=300) == []


def test_modules_of_the_user_that_have_changed_since_the_last_start_are_told(
    folder, config, monkeypatch
):
    digests = {"maze": "1", "walls": "1"}
    monkeypatch.setattr(source_revision, "own_modules", lambda: dict(digests))
    begin(folder)
    digests |= {"maze": "2", "doors": "1"}  # the latter is new, for example because it was moved
    (message,) = begin(folder, env_steps=100)
    assert message.startswith("warning: modules of your own (maze) have changed since the last")
    assert begin(folder, env_steps=200) == []


def test_what_keeps_a_resume_from_being_exact_is_told_and_kept(folder, config):
    begin(folder)
    folder.open("resume", 1)
    (message,) = folder.describe(1, 4, {"threads": THREADS}, 70, ["another processor"])
    assert message == "warning: the run is inexact from here on: another processor"
    begin(folder, env_steps=90)
    (inexact,) = folder.read_json("run.json")["inexact_resumes"]
    assert inexact == {"env_steps": 70, "why": ["another processor"]}


def test_resuming_with_another_configuration_says_what_changed(folder, config):
    begin(folder)
    config[0] = "train.num_env_steps = 200\n"
    (message,) = begin(folder, env_steps=50)
    assert message.startswith("warning: the configuration differs from that of the last start")
    before = folder.path / "operative_config.until-50.gin"
    assert before.read_text() == "train.num_env_steps = 100\n"
    assert "train.num_env_steps = 100" in message
    assert "train.num_env_steps = 200" in message
    assert begin(folder, env_steps=60) == []  # the change is reported once


def test_a_second_change_at_the_same_step_leaves_what_was_kept_of_the_first(folder, config):
    begin(folder)
    for number in (200, 300):  # no step that was taken with 200 was kept
        config[0] = f"train.num_env_steps = {number}\n"
        begin(folder, env_steps=50)
    before = folder.path / "operative_config.until-50.gin"
    assert before.read_text() == "train.num_env_steps = 100\n"
    assert (folder.path / "operative_config.gin").read_text() == config[0]


@pytest.mark.parametrize("third", [200, 300])
def test_a_run_that_goes_back_before_a_change_knows_which_values_trained_each_checkpoint(
    folder, config, third
):
    begin(folder)
    # The checkpoint of step 50 is damaged after the second start.
    for number, env_steps in ((200, 50), (third, 40)):
        config[0] = f"train.num_env_steps = {number}\n"
        begin(folder, env_steps=env_steps)
    for env_steps, number in ((30, 100), (40, 100), (45, third), (60, third)):
        text = folder.config_at(env_steps).read_text()
        assert text == f"train.num_env_steps = {number}\n"


def test_a_run_that_is_killed_while_it_goes_back_before_changes_loses_no_values(
    folder, config, monkeypatch
):
    begin(folder)
    for env_steps in (50, 60, 70, 80):
        config[0] = f"train.num_env_steps = {env_steps}\n"
        begin(folder, env_steps=env_steps)

    unlink = pathlib.Path.unlink

    def unlink_some(path, missing_ok=False):
        if not missing_ok and len([*folder.path.glob("*.until-*.gin")]) == 1:
            raise KeyboardInterrupt
        unlink(path, missing_ok)

    config[0] = "train.num_env_steps = 100\n"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pathlib.Path, "unlink", unlink_some)
        begin(folder, env_steps=40)
    for _ in range(2):
        assert folder.config_at(40).read_text() == config[0]
        begin(folder, env_steps=40)


def test_another_seed_is_refused(folder, config):
    begin(folder, seed=1)
    with pytest.raises(UserError, match="begun with --seed=1, not 2"):
        folder.open("resume", 2)


def test_fail_refuses_a_folder_with_a_run_and_takes_a_new_one(folder, config):
    folder.open("fail", 1)
    folder.describe(1, 4, {"threads": THREADS}, 0)
    with pytest.raises(UserError, match="already holds a run.*--restart_behavior=resume"):
        folder.open("fail", 1)


def test_restart_moves_old_runs_aside_and_loses_none(folder, config):
    for number in (1, 2):
        begin(folder, seed=number)
        (message,) = folder.open("restart", number + 1)
        aside = folder.path.with_name(f"run.old-{number}")
        assert message == f"moved the old run to {aside}"
        assert json.loads((aside / "run.json").read_text())["seed"] == number
        assert [path.name for path in folder.path.iterdir()] == [".lock"]


def test_restart_moves_the_run_that_a_link_leads_to(folder, config, tmp_path):
    begin(folder)
    folder.close()
    link = tmp_path / "link"
    link.symlink_to(folder.path)
    for name in (link, folder.path / ".." / "run"):
        (message,) = RunFolder(name).open("restart", 2)
        aside = pathlib.Path(message.removeprefix("moved the old run to "))
        assert aside.parent == folder.path.parent and (aside / "run.json").exists()
        assert link.samefile(folder.path) and os.listdir(link) == [".lock"]
        (aside / "run.json").rename(folder.path / "run.json")


def test_a_mount_point_is_not_moved_aside(folder, config, monkeypatch):
    begin(folder)
    monkeypatch.setattr(pathlib.Path, "is_mount", lambda path: True)
    with pytest.raises(UserError, match="mount point: .* such as --root_dir=.*/run/run\\."):
        folder.open("restart", 2)
    assert (folder.path / "run.json").exists()


@pytest.mark.parametrize(
    ("behavior", "seed", "message"),
    [("fail", 1, "already holds a run"), ("resume", 2, "was begun with --seed=1")],
)
def test_a_run_begun_while_another_waited_for_the_lock_is_noticed(
    folder, config, monkeypatch, behavior, seed, message
):
    work = run_folder.lock

    def wait(*args):
        monkeypatch.setattr(run_folder, "lock", work)
        first = RunFolder(folder.path)
        begin(first)
        first.close()
        return work(*args)

    monkeypatch.setattr(run_folder, "lock", wait)
    with pytest.raises(UserError, match=message):
        folder.open(behavior, seed)


def test_nothing_is_written_to_a_folder_that_took_the_name(folder, config):
    begin(folder)
    folder.path.rename(folder.path.with_name("away"))
    another = RunFolder(folder.path)
    begin(another, seed=2)
    with pytest.raises(UserError, match="another one has its name"):
        folder.note_checkpoint()
    assert another.read_json("run.json")["seed"] == 2
    assert not another.read_json("run.json")["has_checkpoint"]
    another.close()


def test_the_working_directory_is_not_moved_aside(folder, config, monkeypatch):
    begin(folder, seed=1)
    folder.close()
    monkeypatch.chdir(folder.path)
    with pytest.raises(UserError, match="run cannot be moved .* pass --root_dir=run\\."):
        RunFolder(".").open("restart", 2)
    assert (folder.path / "run.json").exists()


def test_a_run_killed_before_it_was_described_is_gone_on_with(folder):
    folder.open("resume", 1)
    folder.checkpoints.mkdir()  # by a first start that then fails
    (folder.path / ".tmp-run.json").write_text("{")
    assert folder.open("fail", 1) == []
    (folder.checkpoints / "step-0000000100").mkdir()
    assert folder.open("resume", 1) == []
    with pytest.raises(UserError, match="already holds a run"):
        folder.open("fail", 1)


@pytest.mark.parametrize("behavior", ["resume", "restart", "fail"])
def test_a_folder_with_something_else_is_left_alone(folder, behavior):
    folder.path.mkdir(parents=True)
    (folder.path / "thesis.tex").write_text("...")
    with pytest.raises(UserError, match="holds files but no run"):
        folder.open(behavior, 1)
    assert os.listdir(folder.path) == ["thesis.tex"]


def test_a_root_dir_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match=f"cannot write to --root_dir={path}"):
            RunFolder(path).open("resume", 1)


def test_a_damaged_description_may_be_deleted(folder, config):
    begin(folder)
    write_text(folder.path / "operative_config.gin", config[0])
    folder.close()
    (folder.path / "run.json").unlink()
    assert begin(folder) == []
    assert folder.read_json("run.json")["seed"] == 1


def test_a_damaged_file_is_named(folder, config):
    begin(folder)
    (folder.path / "run.json").write_text('{"seed": 1')
    with pytest.raises(UserError, match="run.json is damaged"):
        folder.open("resume", 1)


@pytest.mark.parametrize(
    "evaluation", [None, [], {}, {"return_mean": "1", "return_std": 0.0, "returns": [1.0]}]
)
def test_a_result_without_its_evaluation_is_no_end(folder, config, evaluation):
    begin(folder)
    whole = {"return_mean": 1.0, "return_std": 0.0, "returns": [1.0]}
    folder.write_json("result.json", {"env_steps": 100, "evaluation": whole})
    assert folder.finished(1, 100)
    assert folder.finished(1, 101) is None
    folder.write_json("result.json", {"env_steps": 100, "evaluation": evaluation})
    with pytest.raises(UserError, match="result.json is damaged .*evaluation"):
        folder.finished(1, 100)


def test_a_file_that_cannot_be_read_is_not_called_damaged(folder, config):
    begin(folder)
    (folder.path / "run.json").unlink()
    (folder.path / "run.json").mkdir()
    with pytest.raises(UserError, match="cannot read .*run.json: Is a directory"):
        folder.read_json("run.json")


def test_a_folder_that_cannot_be_moved_aside_is_named(folder, config, monkeypatch):
    begin(folder)

    def busy(path, target):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(pathlib.Path, "rename", busy)
    with pytest.raises(UserError, match=f"--root_dir={folder.path}: Device or resource busy"):
        folder.open("restart", 1)


def test_a_reader_finds_a_configuration_while_it_is_replaced(folder, config, monkeypatch):
    begin(folder)
    before = config[0]
    config[0] = "train.num_env_steps = 200\n"
    seen = []

    def write(path, text):
        if path.name == "operative_config.gin":
            seen.append(path.read_text())
        write_text(path, text)

    monkeypatch.setattr(run_folder, "write_text", write)
    begin(folder, env_steps=50)
    assert seen == [before]
    aside = folder.path / "operative_config.until-50.gin"
    assert aside.read_text() == before
    assert (folder.path / "operative_config.gin").read_text() == config[0]


def test_a_second_process_is_kept_out_until_the_first_has_ended(folder, config, impatient_locks):
    begin(folder)
    for behavior in ("resume", "restart"):
        with pytest.raises(UserError, match="another process is training in"):
            RunFolder(folder.path).open(behavior, 1)
    folder.close()
    second = RunFolder(folder.path)
    assert begin(second, env_steps=10) == []
    second.close()
