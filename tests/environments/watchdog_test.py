import signal
import threading
import time

import gymnasium
import pytest
from run_processes import TRAINING, Run

from pipeline.environments import watchdog
from pipeline.environments.sync_vector import SyncVector
from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.environments.watchdog import Watchdog
from pipeline.utils.errors import UserError, WriteError
from pipeline.utils.shutdown import StopSignal


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_environment_that_hangs_ends_the_run_with_the_reason(tmp_path, mode):
    settings = {"gymnasium_environment__vectorization_mode": mode, "Watchdog__timeout": 1.0}
    run = Run(tmp_path, "dqn", **settings)
    with run.start_until(TRAINING, env_steps=1) as process:
        (tmp_path / "stuck").touch()
        assert run.finish(process) == 2
    assert "error: environment tiny_runs:Walk-v0 has not returned from a step" in run.output
    assert "for 1 s (Watchdog.timeout)" in run.output
    assert "is intact" in run.output
    assert "Traceback" not in run.output
    # The place is known only if the environment is in this process.
    assert ("it is at " in run.output) == (mode == "sync") == ("tiny_runs.py" in run.output)


@pytest.fixture
def environment():
    makes = [lambda: gymnasium.make("tiny_runs:Walk-v0")]
    environment = VectorEnvironment(lambda: SyncVector(makes), name="walk", seed=1)
    yield environment
    environment.close()


@pytest.fixture
def ended(monkeypatch):
    """Returns an event that is set when the watchdog would end the process."""
    ended = threading.Event()
    monkeypatch.setattr(watchdog, "exit_at_once", lambda code: ended.set())
    return ended


def test_many_short_calls_are_not_one_long_one(environment, ended, capsys):
    dog = Watchdog([environment.episodes], lambda: "", StopSignal(), timeout=0.5)
    started = time.monotonic()
    while time.monotonic() - started < 1.0:
        environment.episodes.cross(time.sleep, 0.05)
    assert not ended.is_set()
    time.sleep(1.0)  # time between calls is not limited
    assert not ended.is_set()
    environment.episodes.cross(ended.wait, 30.0)
    assert ended.is_set()
    dog.close()
    assert "environment walk has not returned" in capsys.readouterr().err


def test_advice_that_fails_keeps_neither_the_reason_nor_the_end_back(
    environment, ended, capsys, monkeypatch
):
    def unreadable():
        raise WriteError("Cannot read the checkpoints")

    raised = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: raised.set())
    Watchdog([environment.episodes], unreadable, StopSignal(), timeout=0.1)
    environment.episodes.cross(raised.wait, 10.0)
    assert ended.is_set() and raised.is_set()
    assert "environment walk has not returned" in capsys.readouterr().err


def test_the_place_is_that_of_the_environment_which_hangs(environment, ended, capsys):
    over = threading.Lock()

    def in_the_way():
        over.acquire()
        over.release()

    def cross():  # called like the method that steps every environment
        over.acquire()
        over.release()

    with over:
        calls = [(cross,), (environment.episodes.cross, in_the_way), (cross,)]
        threads = [threading.Thread(target=call, args=args) for call, *args in calls]
        for thread in threads:
            thread.start()
        while not environment.episodes.crossing:
            time.sleep(0.01)
        dog = Watchdog([environment.episodes], str, StopSignal(), timeout=0.1)
        ended.wait(10.0)
        dog.close()
    for thread in threads:
        thread.join()
    assert ended.is_set()
    said = capsys.readouterr().err
    assert f"it is at {__file__}:{in_the_way.__code__.co_firstlineno + 1}, in in_the_way." in said


def test_a_slow_call_may_end_after_a_signal(environment, ended, monkeypatch):
    monkeypatch.setattr(watchdog, "_TICK", 0.05)
    monkeypatch.setattr(watchdog, "_STOP_SECONDS", 1.0)
    environment.episodes.cross(time.sleep, 1.2)
    stop = StopSignal()
    stop.requested = True
    dog = Watchdog([environment.episodes], str, stop)
    environment.episodes.cross(time.sleep, 1.2)
    assert not ended.is_set()
    environment.episodes.cross(ended.wait, 30.0)
    assert ended.is_set()
    dog.close()


def test_a_negative_timeout_is_refused():
    with pytest.raises(UserError, match="Watchdog.timeout = -1: must be a number, at least 0"):
        Watchdog([], lambda: "", StopSignal(), timeout=-1)


@pytest.mark.parametrize("timeout", [0.0, 300.0])
def test_after_a_signal_a_call_may_take_some_seconds(environment, ended, monkeypatch, timeout):
    monkeypatch.setattr(watchdog, "_TICK", 0.05)
    monkeypatch.setattr(watchdog, "_STOP_SECONDS", 0.2)
    stop = StopSignal()
    dog = Watchdog([environment.episodes], lambda: "", stop, timeout=timeout)
    environment.episodes.cross(ended.wait, 0.4)
    assert not ended.is_set()
    stop.requested, stop.signal = True, signal.SIGINT
    environment.episodes.cross(ended.wait, 10.0)
    assert ended.is_set()
    dog.close()
