"""Searches small enough to test, with trials that `fake_training` trains.

`python -m tiny_searches FOLDER` runs a search that tests can kill.
"""

import pathlib
import sys
from typing import Any
from unittest import mock

from tiny_benchmarks import start_fake

from pipeline.benchmarks.train_process import Machines, Start
from pipeline.tuning import tuner
from pipeline.tuning.search import Search
from pipeline.utils.shutdown import StopSignal


def make_search(**overrides) -> Search:
    fields: dict[str, Any] = {
        "name": "tiny",
        "config": "dqn_cartpole",
        "num_env_steps": 90,
        "parameters": {"fake.quality": ("uniform", 0, 1), "fake.other": ("log_int", 1, 100)},
        "bindings": (),
        "sampler": "random",
        "num_seeds": 1,
        "rungs": (10, 30),
        "reduction": 3,
        "num_concurrent": 4,
        "seed": 5,
    }
    return Search(**(fields | overrides))


# Every run waits after half of its steps until it is stopped. Started again, it finishes.
PATIENT = make_search(
    num_env_steps=20_000, rungs=(10_000,), bindings=("fake.patience = 0.05",), num_concurrent=3
)


def run(
    folder: pathlib.Path,
    search,
    num_trials: int,
    workers: int = 2,
    stop=None,
    start: Start = start_fake,
):
    with mock.patch.object(tuner, "_POLL_SECONDS", 0.01):
        on = Machines(folder, workers, start)
        return tuner.tune(search, on, num_trials, stop or StopSignal())


if __name__ == "__main__":
    run(pathlib.Path(sys.argv[1]), PATIENT, 6, workers=3)
