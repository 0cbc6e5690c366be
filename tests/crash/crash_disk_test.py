"""Tests that a full disk causes at worst a clear message, and that the run then ends as usual."""

import errno
import functools
import resource
import subprocess

import pytest
from run_processes import TRAINING, WARMING_UP, Run, assert_same_end

from pipeline.checkpointing import manifest
from pipeline.utils.errors import RETRY_CODE

DISK_BYTES = 4 * 2**20


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a file system of `DISK_BYTES` and yields its folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", folder]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no file system may be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(path, spare):
    """Fills the disk with a file, except for `spare` bytes."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1024))
        except OSError as error:
            assert error.errno == errno.ENOSPC
        file.truncate(max(file.tell() - spare, 0))


def assert_at_worst_a_clear_message(run, code):
    assert "Traceback" not in run.output
    assert code in (0, RETRY_CODE), run.output
    if code:
        (error,) = (line for line in run.output.splitlines() if line.startswith("error: "))
        assert str(run.path) in error
    for path in run.checkpoints:
        manifest.verify(path)


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """Returns a function from an algorithm to a finished run that had enough space."""

    @functools.cache
    def twin(algorithm):
        run = Run(tmp_path_factory.mktemp(algorithm), algorithm)
        assert run.finish() == 0, run.output
        return run

    return twin


@pytest.mark.crash
@pytest.mark.parametrize(("algorithm", "spare"), [("dqn", 0), ("ppo", 6_000), ("sac", 60_000)])
def test_a_full_file_system(tmp_path, small_disk, twins, algorithm, spare):
    run = Run(tmp_path, algorithm, Patience__give_up_after=3.0).at(small_disk / "run")
    with run.start_until(TRAINING, env_steps=150) as process:
        fill(small_disk / "ballast", spare)
        code = run.finish(process)
    assert_at_worst_a_clear_message(run, code)
    assert run.checkpoints
    (small_disk / "ballast").unlink()
    assert run.finish() == 0, run.output
    assert_same_end(run, twins(algorithm))


@pytest.mark.crash
def test_a_file_system_that_was_full_from_the_start(tmp_path, small_disk, twins):
    run = Run(tmp_path, "ppo", Patience__give_up_after=3.0).at(small_disk / "run")
    fill(small_disk / "ballast", spare=0)
    assert_at_worst_a_clear_message(run, run.finish())
    (small_disk / "ballast").unlink()
    assert run.finish() == 0, run.output
    assert_same_end(run, twins("ppo"))


@pytest.mark.crash
@pytest.mark.parametrize(
    ("algorithm", "phase", "limit"),
    [("dqn", WARMING_UP, 1), ("ppo", TRAINING, 3_000), ("sac", TRAINING, 30_000)],  # bytes per file
)
def test_a_limit_on_the_size_of_files(tmp_path, twins, algorithm, phase, limit):
    run = Run(tmp_path, algorithm, Patience__give_up_after=3.0)
    with run.start_until(phase) as process:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        code = run.finish(process)
    assert_at_worst_a_clear_message(run, code)
    assert run.finish() == 0, run.output
    assert_same_end(run, twins(algorithm))
