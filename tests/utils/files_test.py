"""Tests of locks, and of what must be on the disk before something else relies on it."""

import contextlib
import errno
import fcntl
import io
import os
import pathlib
import signal
import stat
import subprocess
import sys
import threading
from typing import Any

import pytest
import tensorflow as tf
from conftest import ROOT
from damages import file_sizes_limited

from pipeline.runs.tensorboard_log import EventLog
from pipeline.utils import files
from pipeline.utils.errors import UserError, WriteError
from pipeline.utils.jsonl import JsonlLog, read_jsonl


@pytest.fixture
def synced(monkeypatch):
    """Returns a list of synced paths, as named at that time, and of the renamings in between."""
    events: list[Any] = []
    fsync, rename = os.fsync, pathlib.Path.rename

    def recorded_fsync(descriptor):
        fsync(descriptor)
        events.append(pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    def recorded_rename(path, target):
        events.append(("rename", pathlib.Path(target)))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(pathlib.Path, "rename", recorded_rename)
    return events


def test_a_text_is_on_the_disk_before_it_gets_its_name_and_the_name_after(tmp_path, synced):
    path = tmp_path / "run.json"
    for text in ("old", "new"):
        synced.clear()
        files.write_text(path, text)
        assert synced == [tmp_path / ".tmp-run.json", ("rename", path), tmp_path]
        assert path.read_text() == text


def test_a_text_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "run.json"
    files.write_text(path, "old")
    (tmp_path / ".tmp-run.json").mkdir()
    with pytest.raises(WriteError, match=f"cannot write {path}: Is a directory"):
        files.write_text(path, "new")
    assert path.read_text() == "old"


@pytest.mark.parametrize(
    ("number", "code"), [(errno.EACCES, 2), (errno.EPERM, 2), (errno.EROFS, 75), (errno.ENOSPC, 75)]
)
def test_what_this_user_may_not_write_is_not_to_be_tried_again(tmp_path, monkeypatch, number, code):
    def refuse(*arguments, **kwargs):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(pathlib.Path, "write_text", refuse)
    with pytest.raises(WriteError, match=os.strerror(number)) as raised:
        files.write_text(tmp_path / "run.json", "new")
    assert raised.value.exit_code == code


def test_a_new_folder_is_entered_into_each_above_it(tmp_path, synced):
    for _ in range(2):
        files.make_folder(tmp_path / "runs" / "x" / "checkpoints")
    assert synced == [tmp_path, tmp_path / "runs", tmp_path / "runs" / "x"]
    assert (tmp_path / "runs" / "x" / "checkpoints").is_dir()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_file_system_may_be_unable_to_sync_folders(tmp_path, monkeypatch, kind, number):
    """VirtualBox's shared folders answer with EINVAL; a disk that fails is another matter."""
    fsync = os.fsync

    def refuse(descriptor):
        if (kind == "folder") == stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    path = tmp_path / "runs" / "run.json"
    is_refused = (kind, number) != ("folder", errno.EINVAL)
    with pytest.raises(OSError) if is_refused else contextlib.nullcontext():
        files.make_folder(path.parent)
        with files.replacing(path) as temporary:
            temporary.write_text("new")
    assert path.exists() != is_refused


@pytest.mark.parametrize("name", ["link", "link/checkpoints"])
def test_a_link_to_no_folder_is_named(tmp_path, name):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with (
        pytest.raises(UserError, match=f"--root_dir={tmp_path}.*: {tmp_path}/link is a link that"),
        files.named_errors(tmp_path / name),
    ):
        files.make_folder(tmp_path / name)


@pytest.mark.parametrize("kind", [JsonlLog, EventLog])
def test_a_log_is_on_the_disk_once_it_is_synced_and_once_it_is_cut(tmp_path, synced, kind):
    log = kind(tmp_path / ("metrics.jsonl" if kind is JsonlLog else "events"))
    log.sync()  # nothing is there yet
    log.write({"env_steps": 10, "loss": 1.0})
    assert not synced
    log.sync()
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert synced == [file, file.parent]
    synced.clear()
    log.truncate_after(*[20] * (1 if kind is JsonlLog else 3))
    assert synced[1:] == [("rename", file), file.parent] and synced[0].parent == file.parent


def test_a_disk_that_refuses_the_rest_of_a_record_and_its_removal_tears_no_line(
    tmp_path, monkeypatch
):
    """A copy-on-write file system needs space to cut a file, too."""

    class Disk(io.FileIO):
        room = 20  # bytes, of which the first record takes 17

        def write(self, data):
            self.check()
            data = data[: Disk.room]
            Disk.room -= len(data)
            return super().write(data)

        def truncate(self, *size):
            self.check()
            return super().truncate(*size)

        def check(self):
            if not Disk.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "metrics.jsonl"
    monkeypatch.setattr(pathlib.Path, "open", lambda self, mode, buffering: Disk(self, mode))
    log = JsonlLog(path)
    log.write({"env_steps": 1})
    with pytest.raises(OSError, match="No space left"):
        log.write({"env_steps": 2})
    Disk.room = 1_000
    for env_steps in 2, 3:
        log.write({"env_steps": env_steps})
    monkeypatch.undo()
    assert path.read_text() == "".join(f'{{"env_steps": {n}}}\n' for n in (1, 2, 3))


@pytest.mark.parametrize("kind", [JsonlLog, EventLog])
def test_a_log_that_cannot_be_cut_stays_and_takes_no_more_space(tmp_path, kind):
    log = kind(tmp_path / ("metrics.jsonl" if kind is JsonlLog else "events"))
    for env_steps in range(100):
        log.write({"env_steps": env_steps})
    log.close()
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    before = file.read_bytes()
    with file_sizes_limited() as set_limit:
        set_limit(500)
        with pytest.raises((WriteError, tf.errors.OpError)):
            log.truncate_after(*[90] * (1 if kind is JsonlLog else 3))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]
    assert file.read_bytes() == before


@pytest.mark.parametrize("kind", [JsonlLog, EventLog])
def test_a_log_that_was_deleted_begins_again(tmp_path, kind):
    log = kind(tmp_path / ("metrics.jsonl" if kind is JsonlLog else "events"))
    for loss in 1.0, 2.0:
        log.write({"env_steps": 10, "loss": loss})
        (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
        assert file.stat().st_size
        file.unlink()
        log.sync()
    log.close()


def test_a_log_that_another_machine_has_deleted_begins_again(tmp_path, monkeypatch):
    """NFS then knows the open file no longer."""
    log = JsonlLog(tmp_path / "metrics.jsonl")
    log.write({"env_steps": 1})
    (tmp_path / "metrics.jsonl").unlink()
    fstat = os.fstat

    def of_nfs(descriptor):
        if not (status := fstat(descriptor)).st_nlink:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return status

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", of_nfs)
        log.write({"env_steps": 2})
    log.close()
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"env_steps": 2}]


def test_a_log_that_an_editor_has_replaced_gets_the_next_records(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = JsonlLog(path)
    for env_steps in 1, 2:
        log.write({"env_steps": env_steps})
    subprocess.run(["sed", "-i", "1d", path], check=True)  # writes another file and renames it
    log.write({"env_steps": 3})
    log.sync()
    log.close()
    assert [record["env_steps"] for record in read_jsonl(path)] == [2, 3]


def test_the_lock_of_a_folder_that_was_moved_aside_is_not_enough(
    tmp_path, monkeypatch, impatient_locks
):
    """Otherwise two processes that restart a run at the same time would both train in it."""
    folder = tmp_path / "run"
    work = fcntl.flock

    def move_and_lock(file, operation):
        monkeypatch.setattr(fcntl, "flock", work)
        folder.rename(tmp_path / "aside")  # by another process, since the file was opened
        work(file, operation)

    monkeypatch.setattr(fcntl, "flock", move_and_lock)
    held = files.lock(folder / ".lock", "busy in", "--folder")
    with pytest.raises(UserError, match="busy in"):
        files.lock(folder / ".lock", "busy in", "--folder")
    held.close()


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def unsupported(file, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(UserError, match="no file locks .*choose another folder"):
        files.lock(tmp_path / ".lock", "busy in", "--folder")


def test_a_folder_that_was_moved_away_can_be_put_back_unless_its_name_was_taken(tmp_path):
    folder, away = tmp_path / "run", tmp_path / "away"
    held = files.lock(folder / ".lock", "busy in", "--folder")
    folder.rename(away)
    for take, free in (
        (lambda: None, lambda: None),
        (lambda: folder.symlink_to(folder), folder.unlink),  # a circle of links
    ):
        take()
        with pytest.raises(WriteError, match="run was moved or deleted .*Put it back"):
            held.check()
        free()
    folder.symlink_to(away)
    held.check()
    folder.unlink()
    away.rename(folder)
    held.check()
    folder.rename(away)
    for take in (folder.touch, lambda: (folder.unlink(), folder.mkdir())):
        take()
        with pytest.raises(UserError, match="another one has its name") as error:
            held.check()
        assert error.type is UserError  # waiting would not help
    held.close()


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_folder_stays_locked_if_the_lock_file_is_deleted(tmp_path, is_taken):
    path = tmp_path / ".lock"
    held = files.lock(path, "busy in", "--folder")
    path.unlink()
    if is_taken:
        other = files.lock(path, "busy in", "--folder")
        with pytest.raises(UserError, match="another process has begun in .*lock file .lock was"):
            held.check()
        other.close()
    else:
        held.check()
        with pytest.raises(UserError, match="busy in"):
            files.lock(path, "busy in", "--folder")


def test_a_process_that_was_forked_does_not_hold_the_lock(tmp_path):
    program = (
        "import multiprocessing, os, pathlib, sys, time\n"
        "from pipeline.utils import files\n"
        "held = files.lock(pathlib.Path(sys.argv[1]), 'busy in', '--folder')\n"
        "fork = multiprocessing.get_context('fork')\n"
        "child = fork.Process(target=time.sleep, args=(60,))\n"
        "child.start()\n"
        "print(child.pid, flush=True)\n"
        "os._exit(1)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout
        child = int(process.stdout.readline())
    try:
        files.lock(tmp_path / ".lock", "busy in", "--folder").close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_lock_that_is_released_within_a_moment_is_waited_for(tmp_path):
    """A child of a killed process holds its lock until the child runs another program."""
    held = files.lock(tmp_path / ".lock", "busy in", "--folder")
    threading.Timer(0.2, held.close).start()
    files.lock(tmp_path / ".lock", "busy in", "--folder").close()
