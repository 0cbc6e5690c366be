"""Tests of actors in threads: 1,000 starts and stops, Ctrl-C, and a process that dies."""

import faulthandler
import random
import signal
import time

import pytest
import run_processes
from host_loops import PLAN, Run, actor_threads
from tiny_runs import build_components

from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.training.asynchronous import Actors
from pipeline.utils.errors import UserError

pytestmark = pytest.mark.crash

STARTS = 1_000
SECONDS = 120  # limit for one start and one stop together
LONG = PLAN._replace(num_env_steps=10**9, eval_interval=0, log_interval=500)


@pytest.fixture(autouse=True)
def no_late_dump():
    yield
    faulthandler.cancel_dump_traceback_later()


def test_no_start_or_stop_of_two_actors_ends_in_a_deadlock(tmp_path, monkeypatch, capfd):
    # Components take seconds to build, so all runs share them and leave the environment open.
    monkeypatch.setattr(VectorEnvironment, "close", lambda self: None)
    with capfd.disabled():  # shows what the watchdog writes before it ends the process
        _start_and_stop(tmp_path)


def _start_and_stop(tmp_path):
    parts = build_components("a3c", asynchronous_runner__scheduler="threads")
    moments = random.Random(1)
    env_steps = 0
    for _ in range(STARTS):
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        runner = Actors(parts.runner.actors, parts.env_steps, "threads", seed=1)
        run = Run(tmp_path / "run", LONG, parts=parts._replace(runner=runner))
        run.train_until(env_steps + moments.randrange(1, 60))
        run.close()
        assert run.loop.env_steps > env_steps
        env_steps = run.loop.env_steps
        assert not actor_threads()


def test_ctrl_c_stops_the_actors_of_a_process_within_two_seconds(tmp_path):
    overrides = {"asynchronous_runner__scheduler": "threads", "train__num_env_steps": 10**7}
    run = run_processes.Run(tmp_path, "a3c", **overrides)
    with run.start_until(run_processes.TRAINING, env_steps=100) as process:
        process.send_signal(signal.SIGINT)
        asked, line = time.monotonic(), " "
        while line and not line.startswith("stopped; the same command resumes"):
            line = process.stdout.readline()
        stopped = time.monotonic()
        assert process.wait(timeout=20) == 130
    assert line
    assert stopped - asked < 2


def test_an_actor_whose_environment_s_process_dies_ends_the_run(tmp_path):
    overrides = {
        "asynchronous_runner__scheduler": "threads",
        "gymnasium_environment__vectorization_mode": "async",
    }
    run = Run(tmp_path / "run", PLAN, "a3c", **overrides)
    environment = run.parts.runner.environments[0]
    run.at(130, lambda: environment.episodes.vector.processes[0].kill())
    with pytest.raises(UserError, match=r"the process of environment 0 has died(.|\n)*is intact"):
        run.train()
    run.close()
    assert not actor_threads()
