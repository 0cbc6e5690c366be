"""Tests of the commit protocol with failed saves and damaged checkpoints."""

from __future__ import annotations

import errno
import math
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest
import tensorflow as tf
from damages import DAMAGES, file_sizes_limited, flip, unreadable

from pipeline.checkpointing import checkpoints as checkpoints_module
from pipeline.checkpointing import manifest
from pipeline.checkpointing.checkpoints import Checkpoints, Part, Restored, return_mean_of
from pipeline.checkpointing.saveables import HostState, Tensors, Variables
from pipeline.utils import files
from pipeline.utils.errors import UserError, WriteError


class Number:
    """Smallest possible part of a checkpoint: a number."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def save(self, folder: pathlib.Path, earlier: pathlib.Path | None = None) -> None:
        (folder / "number").write_text(str(self.value))

    def restore(self, folder: pathlib.Path) -> None:
        self.value = int((folder / "number").read_text())


def numbered(folder: pathlib.Path, *steps: int) -> tuple[Checkpoints, Number]:
    """Returns checkpoints of a number that equals the step, and the number."""
    number = Number()
    checkpoints = Checkpoints(folder, {"number": number})
    for step in steps:
        number.value = step
        checkpoints.save(step)
    return checkpoints, number


def restore(checkpoints: Checkpoints, path: pathlib.Path | None = None) -> Restored:
    restored = checkpoints.restore(path)
    assert restored is not None
    return restored


def names(folder: pathlib.Path) -> list[str]:
    return sorted(x.name for x in folder.iterdir())


# The protocol. ------------------------------------------------------------------------------------


def test_the_newest_are_kept_and_restored(tmp_path: pathlib.Path) -> None:
    checkpoints, number = numbered(tmp_path / "a" / "b", 0, 10, 20, 10**11)
    assert names(tmp_path / "a" / "b") == ["step-0000000020", "step-100000000000"]
    number.value = -1
    restored = restore(checkpoints)
    assert (restored.env_steps, restored.warnings, number.value) == (10**11, [], 10**11)
    assert restored.path == checkpoints.latest() == checkpoints.at(10**11)
    checkpoints.restore(checkpoints.at(20))
    assert number.value == 20
    with pytest.raises(UserError, match="No checkpoint of step 7 .* Steps: 20, 100000000000"):
        checkpoints.at(7)


def test_without_a_checkpoint_there_is_nothing_to_restore(tmp_path: pathlib.Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        checkpoints = Checkpoints(folder, {}, writable=False)
        assert checkpoints.restore() is None
        assert checkpoints.latest() is None
        assert checkpoints.best() is None
        with pytest.raises(UserError, match="Steps: none"):
            checkpoints.at(1)


def test_a_second_save_at_one_step_supersedes_the_first(tmp_path: pathlib.Path) -> None:
    checkpoints, number = numbered(tmp_path, 1, 2)
    for value in (22, 222):
        number.value = value
        path = checkpoints.save(2)
    assert names(tmp_path) == ["step-0000000001", "step-0000000002.2"]
    assert checkpoints.at(2) == checkpoints.latest() == path
    number.value = 0
    checkpoints.restore()
    assert number.value == 222


def test_the_best_is_kept_until_another_is_better(tmp_path: pathlib.Path) -> None:
    checkpoints, number = numbered(tmp_path)
    for step, return_mean in ((1, 5.5), (2, None), (3, 5.5), (4, -7.0)):
        checkpoints.save(step, return_mean)
    assert names(tmp_path) == ["step-0000000001", "step-0000000003", "step-0000000004"]
    reader = Checkpoints(tmp_path, {"number": number}, writable=False)
    best = reader.best()
    assert best == (checkpoints.at(1), 5.5)
    assert restore(reader, best.path).env_steps == 1
    checkpoints.save(5, 6.0)
    checkpoints.save(6, math.nan)
    checkpoints.save(7)
    assert names(tmp_path) == ["step-0000000005", "step-0000000006", "step-0000000007"]
    assert checkpoints.best() == (checkpoints.at(5), 6.0)


def test_every_evaluated_checkpoint_has_its_return(tmp_path: pathlib.Path) -> None:
    checkpoints, _ = numbered(tmp_path)
    means = 5.0, None, 3.0
    paths = [checkpoints.save(step, mean) for step, mean in enumerate(means, 1)]
    assert checkpoints.best() == (paths[0], 5.0)
    assert return_mean_of(paths[0]) == 5.0
    assert return_mean_of(paths[2]) == 3.0
    assert return_mean_of(checkpoints.save(4)) is None


def test_a_checkpoint_whose_manifest_is_damaged_is_not_the_best(tmp_path: pathlib.Path) -> None:
    checkpoints, _ = numbered(tmp_path)
    checkpoints.save(1, 5.5)
    (checkpoints.save(2, 6.0) / "manifest.json").write_text('{"manifest": ')
    assert checkpoints.best() == (checkpoints.at(1), 5.5)


def test_a_second_save_at_one_step_is_its_best(tmp_path: pathlib.Path) -> None:
    checkpoints, _ = numbered(tmp_path)
    checkpoints.save(1, 5.5).rename(tmp_path / "kept")
    second = checkpoints.save(1, 5.5).rename(tmp_path / "step-0000000001.1")
    (tmp_path / "kept").rename(tmp_path / "step-0000000001")
    assert checkpoints.best() == (second, 5.5)


@pytest.mark.parametrize("method", ["read_bytes", "open"])  # for the manifest, for the part's file
def test_a_checkpoint_that_cannot_be_read_now_is_neither_passed_over_nor_removed(
    tmp_path: pathlib.Path, method: str
) -> None:
    checkpoints, number = numbered(tmp_path, 1, 2)
    said = "Cannot read .*2: .*Input/output error.\n.*move that folder away"
    with unreadable(checkpoints.at(2), method), pytest.raises(WriteError, match=said):
        checkpoints.restore()
    assert restore(checkpoints).env_steps == number.value == 2


def test_a_part_that_cannot_be_read_now_is_not_a_misfit(undamaged: pathlib.Path) -> None:
    run = Run(undamaged)
    path = run.checkpoints.at(2) / "state"
    with unreadable(path, "read_bytes"), pytest.raises(WriteError) as error:
        run.checkpoints.restore()
    assert str(error.value) == f"Cannot restore {path.parent}: [Errno 5] Input/output error."


def test_a_folder_that_cannot_be_read_now_is_not_one_without_checkpoints(
    tmp_path: pathlib.Path,
) -> None:
    checkpoints, _ = numbered(tmp_path / "checkpoints", 1)
    said = "Cannot read .*checkpoints: .*Input/output error"
    with unreadable(tmp_path / "checkpoints", "iterdir"), pytest.raises(WriteError, match=said):
        checkpoints.restore()
    assert restore(checkpoints).env_steps == 1


def test_the_best_is_not_removed_because_it_cannot_be_read_now(tmp_path: pathlib.Path) -> None:
    checkpoints, _ = numbered(tmp_path)
    best = checkpoints.save(1, 5.5)
    checkpoints.save(2)
    said = "Cannot read .*step-0000000001: .*Input/output"
    with unreadable(best, "read_bytes"):
        for step in (3, 4):
            checkpoints.save(step)
        with pytest.raises(WriteError, match=said):
            checkpoints.best()
    assert names(tmp_path) == [f"step-000000000{step}" for step in (1, 3, 4)]
    assert checkpoints.best() == (best, 5.5)


def test_what_cannot_be_removed_now_stops_no_save(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, _ = numbered(tmp_path, 1, 2)
    left = tmp_path / ".tmp-step-0000000003" / "number"
    left.mkdir(parents=True)  # by an earlier try
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, ignore_errors=False: path == left.parent)
        with pytest.raises(WriteError, match="File exists"):
            checkpoints.save(3)
    checkpoints.save(3)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
        checkpoints.save(4)
        Checkpoints(tmp_path, {})  # a new start
    kept = ["step-0000000003", "step-0000000004"]
    assert names(tmp_path) == [".tmp-removed-step-0000000002", *kept]
    Checkpoints(tmp_path, {})
    assert names(tmp_path) == kept


def test_only_the_writer_sweeps_what_a_killed_process_left(tmp_path: pathlib.Path) -> None:
    numbered(tmp_path, 1)
    (tmp_path / ".tmp-step-0000000002" / "number").mkdir(parents=True)
    Checkpoints(tmp_path, {}, writable=False)
    assert len(names(tmp_path)) == 2
    Checkpoints(tmp_path, {})
    assert names(tmp_path) == ["step-0000000001"]


class NumberThatFails(Number):
    def save(self, folder: pathlib.Path, earlier: pathlib.Path | None = None) -> None:
        super().save(folder, earlier)
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_part_that_cannot_be_saved_leaves_the_others_as_they_were(
    tmp_path: pathlib.Path,
) -> None:
    numbered(tmp_path, 1, 2)
    number = Number(7)
    checkpoints = Checkpoints(tmp_path, {"number": number, "replay": NumberThatFails()})
    with pytest.raises(WriteError, match="step 3 .*No space left on device"):
        checkpoints.save(3)
    assert names(tmp_path) == ["step-0000000001", "step-0000000002"]
    assert restore(Checkpoints(tmp_path, {"number": number})).env_steps == 2
    assert number.value == 2


@pytest.mark.parametrize("limit", [0, 500, 20_000])
def test_a_full_disk_leaves_the_previous_checkpoint_intact(
    tmp_path: pathlib.Path, limit: int
) -> None:
    weights = tf.Variable(tf.ones([10_000]))
    checkpoints = Checkpoints(tmp_path, {"agent": Variables(weights=weights)})
    checkpoints.save(1)
    weights.assign_add(tf.ones([10_000]))
    with file_sizes_limited() as set_limit, pytest.raises(WriteError, match="step 2"):
        set_limit(limit)
        checkpoints.save(2)
    assert names(tmp_path) == ["step-0000000001"]
    assert restore(checkpoints).warnings == []
    assert weights.numpy().max() == 1.0


def test_everything_is_synced_before_it_gets_its_name_and_the_name_after(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    sync, rename = files.sync, pathlib.Path.rename

    def recorded_sync(path: pathlib.Path) -> None:
        sync(path)
        events.append(path.relative_to(tmp_path).as_posix())

    def recorded_rename(path: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
        events.append(f"rename {target.name}")
        return rename(path, target)

    for module in (manifest, checkpoints_module):
        monkeypatch.setattr(module, "sync", recorded_sync)
    monkeypatch.setattr(pathlib.Path, "rename", recorded_rename)
    checkpoints, _ = numbered(tmp_path, 1)
    new = ".tmp-step-0000000001"
    contents = {new, f"{new}/manifest.json", f"{new}/number", f"{new}/number/number"}
    assert set(events[:4]) == contents
    assert events[4:] == ["rename step-0000000001", "."]


# Saves step 3 after steps 1 and 2 in child processes. Each is killed before a later disk operation
# than the previous one, until one survives. Prints what the next process finds.
KILL = """
import os, pathlib, shutil, signal, sys
from pipeline.checkpointing import manifest
from pipeline.checkpointing.checkpoints import Checkpoints

class Number:
    value = 1
    def save(self, folder, earlier=None):
        (folder / "number").write_text(str(self.value))
    def restore(self, folder):
        self.value = int((folder / "number").read_text())

def killed_before(function, at):
    def wrapper(*args, **kwargs):
        calls.append(function)
        if len(calls) > at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return wrapper

for at in range(1000):
    folder = pathlib.Path(sys.argv[1]) / str(at)
    number, calls = Number(), []
    checkpoints = Checkpoints(folder, {"number": number})
    for number.value in (1, 2):
        checkpoints.save(number.value)
    number.value = 3
    child = os.fork()
    if child == 0:
        for name in ("mkdir", "open", "rename", "fsync", "rmdir", "unlink"):
            setattr(os, name, killed_before(getattr(os, name), at))
        pathlib.Path.write_text = killed_before(pathlib.Path.write_text, at)
        checkpoints.save(3)
        os._exit(0)
    survived = os.waitpid(child, 0)[1] == 0
    for path in folder.glob("step-*"):
        manifest.verify(path)
    restored = Checkpoints(folder, {"number": number}).restore()
    left = len(list(folder.iterdir()))
    print(restored.env_steps, number.value, len(restored.warnings), left)
    if survived:
        break
"""


def test_a_save_killed_at_any_point_leaves_one_whole_checkpoint_or_the_other(
    tmp_path: pathlib.Path,
) -> None:
    command = [sys.executable, "-c", KILL, str(tmp_path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    found = [tuple(map(int, line.split())) for line in output.splitlines()]
    assert len(found) > 10
    # First the two old ones, then all three until the oldest is pruned, then the two newest.
    assert list(dict.fromkeys(found)) == [(2, 2, 0, 2), (3, 3, 0, 3), (3, 3, 0, 2)]


# Damage. ------------------------------------------------------------------------------------------


class Run:
    """Run with a part of each kind, all of which hold the same number."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.weights = tf.Variable([0.0, 0.0])
        self.state = HostState(number=0)
        self.carry = tf.constant(0, tf.int64)
        parts: dict[str, Part] = {
            "agent": Variables(weights=self.weights),
            "state": self.state,
            "carry": Tensors(lambda: self.carry, lambda carry: setattr(self, "carry", carry)),
        }
        self.checkpoints = Checkpoints(folder, parts)

    def set(self, number: int) -> None:
        self.weights.assign([number, number])
        self.state["number"] = number
        self.carry = tf.constant(number, tf.int64)

    def get(self) -> list[float]:
        return [*self.weights.numpy().tolist(), self.state["number"], self.carry.numpy().item()]


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("undamaged")
    run = Run(folder)
    for step in (1, 2):
        run.set(step)
        run.checkpoints.save(step)
    return folder


FILES = [
    "manifest.json",
    "agent/variables.index",
    "agent/variables.data-00000-of-00001",
    "state/state.json",
    "carry/tensors.npz",
]


def test_the_files_that_the_tests_damage_are_all_the_files(undamaged: pathlib.Path) -> None:
    newest = undamaged / "step-0000000002"
    files = {x.relative_to(newest).as_posix() for x in newest.rglob("*") if x.is_file()}
    assert files == set(FILES)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.parametrize("file", FILES)
def test_damage_to_any_file_falls_back_to_the_checkpoint_before(
    tmp_path: pathlib.Path, undamaged: pathlib.Path, file: str, damage: Callable
) -> None:
    folder = shutil.copytree(undamaged, tmp_path / "checkpoints")
    damage(folder / "step-0000000002" / file)
    run = Run(folder)
    restored = restore(run.checkpoints)
    assert restored.env_steps == 1
    assert run.get() == [1, 1, 1, 1]
    (warning,) = restored.warnings
    assert warning.startswith(f"step-0000000002 is damaged: {file}")


def test_a_damaged_checkpoint_is_gone_once_the_run_has_saved_again(
    tmp_path: pathlib.Path, undamaged: pathlib.Path
) -> None:
    folder = shutil.copytree(undamaged, tmp_path / "checkpoints")
    (folder / "step-0000000002").rename(folder / "step-0000000004")
    (folder / "step-0000000004" / "agent" / "variables.index").unlink()
    run = Run(folder)
    assert restore(run.checkpoints).env_steps == 1
    run.checkpoints.save(3)
    assert names(folder) == ["step-0000000001", "step-0000000003"]


def test_later_checkpoints_that_nobody_found_damaged_are_not_removed(
    tmp_path: pathlib.Path,
) -> None:
    numbered(tmp_path, 8, 9)
    numbered(tmp_path, 1)
    assert names(tmp_path) == ["step-0000000001", "step-0000000008", "step-0000000009"]


@pytest.mark.parametrize("lost", ["number/number", "number", "manifest.json", "."])
def test_what_the_newest_checkpoint_has_lost_does_not_stop_the_next(
    tmp_path: pathlib.Path, lost: str
) -> None:
    checkpoints, number = numbered(tmp_path, 1)
    path = tmp_path / "step-0000000001" / lost
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    number.value = 2
    checkpoints.save(2)
    number.value = 0
    assert restore(checkpoints).env_steps == number.value == 2


def test_the_folder_is_made_again(tmp_path: pathlib.Path) -> None:
    checkpoints, number = numbered(tmp_path / "checkpoints", 1)
    shutil.rmtree(tmp_path / "checkpoints")
    checkpoints.save(2)
    assert restore(checkpoints).env_steps == 2 and number.value == 1


def test_if_none_is_intact_each_fault_is_named(
    tmp_path: pathlib.Path, undamaged: pathlib.Path
) -> None:
    folder = shutil.copytree(undamaged, tmp_path / "checkpoints")
    DAMAGES["emptied"](folder / "step-0000000001" / "state" / "state.json")
    flip(0.5)(folder / "step-0000000002" / "carry" / "tensors.npz")
    run = Run(folder)
    with pytest.raises(UserError) as error:
        run.checkpoints.restore()
    text = str(error.value)
    assert "step-0000000002 is damaged: carry/tensors.npz has changed" in text
    assert "step-0000000001 is damaged: state/state.json has 0 bytes, but" in text
    assert "--restart_behavior=restart" in text
    assert run.get() == [0, 0, 0, 0]


def test_only_who_trains_is_advised_to_start_over(
    tmp_path: pathlib.Path, undamaged: pathlib.Path
) -> None:
    folder = shutil.copytree(undamaged, tmp_path / "checkpoints")
    parts: dict[str, Part] = {"agent": Number()}
    for writable in (True, False):
        with pytest.raises(UserError, match="does not fit this run") as misfit:
            Checkpoints(folder, parts, writable=writable).restore()
        assert ("--restart_behavior" in str(misfit.value)) == writable
    for step in (1, 2):
        (folder / f"step-000000000{step}" / "manifest.json").unlink()
    for writable in (True, False):
        with pytest.raises(UserError, match="No intact checkpoint") as damage:
            Checkpoints(folder, parts, writable=writable).restore()
        assert ("--restart_behavior" in str(damage.value)) == writable


def with_damaged_newest(tmp_path: pathlib.Path, undamaged: pathlib.Path) -> Run:
    """Returns a run with a copy of two checkpoints, the second of which lacks a file."""
    folder = shutil.copytree(undamaged, tmp_path / "checkpoints")
    (folder / "step-0000000002" / "state" / "state.json").unlink()
    return Run(folder)


def test_the_latest_is_not_one_that_is_known_to_be_damaged(
    tmp_path: pathlib.Path, undamaged: pathlib.Path
) -> None:
    run = with_damaged_newest(tmp_path, undamaged)
    run.checkpoints.restore()
    assert run.checkpoints.latest() == tmp_path / "checkpoints" / "step-0000000001"


def test_a_named_checkpoint_is_restored_or_refused_never_another(
    tmp_path: pathlib.Path, undamaged: pathlib.Path
) -> None:
    run = with_damaged_newest(tmp_path, undamaged)
    path = run.checkpoints.at(2)
    with pytest.raises(UserError) as error:
        run.checkpoints.restore(path)
    assert f"{path} is damaged: state/state.json is missing." in str(error.value)
    path.rename(tmp_path / "removed")
    with pytest.raises(UserError, match=f"{path} has been removed by the run. Repeat the command"):
        run.checkpoints.restore(path)


def test_a_reader_of_some_parts_neither_reads_nor_verifies_the_others(
    tmp_path: pathlib.Path, undamaged: pathlib.Path
) -> None:
    folder = shutil.copytree(undamaged, tmp_path / "checkpoints")
    (folder / "step-0000000002" / "carry" / "tensors.npz").unlink()
    weights = tf.Variable([0.0, 0.0])
    reader = Checkpoints(folder, {"agent": Variables(weights=weights)}, writable=False)
    restored = reader.restore()
    assert restored is not None and restored.env_steps == 2
    assert weights.numpy().tolist() == [2.0, 2.0]


def test_an_intact_checkpoint_of_other_parts_is_refused(
    tmp_path: pathlib.Path, undamaged: pathlib.Path
) -> None:
    other = Checkpoints(undamaged, {"agent": Number(), "rng": Number()})
    with pytest.raises(UserError, match=r"missing \['rng'\], left over \['carry', 'state'\]"):
        other.restore()
    reader = Checkpoints(undamaged, {"rng": Number()}, writable=False)
    with pytest.raises(UserError, match=r"missing \['rng'\], left over \[\]"):
        reader.restore()
    fewer = Checkpoints(undamaged, {"agent": Number()})
    with pytest.raises(UserError, match=r"missing \[\], left over \['carry', 'state'\]"):
        fewer.restore()


def test_another_format_is_refused_rather_than_passed_over(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, _ = numbered(tmp_path / "run", 1)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "_FORMAT_VERSION", 2)
        later, _ = numbered(tmp_path / "other", 2)
    later.at(2).rename(tmp_path / "run" / "step-0000000002")
    with pytest.raises(UserError, match="format 2; .* reads format 1"):
        checkpoints.restore()


def test_an_intact_checkpoint_of_other_variables_is_refused_by_name(
    tmp_path: pathlib.Path,
) -> None:
    Checkpoints(tmp_path, {"agent": Variables(a=tf.Variable([1.0]))}).save(1)
    other = Checkpoints(tmp_path, {"agent": Variables(a=tf.Variable([1, 2]))})
    with pytest.raises(UserError, match=r"does not fit this run: part 'agent': .*int32 \[2\]"):
        other.restore()
