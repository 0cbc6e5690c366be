import pathlib

import pytest

from pipeline import configuration
from pipeline.circumstances import Circumstances

CONFIG = """
import pipeline.environments.atari
import pipeline.train_loop

atari_environment.num_threads = {threads}
evaluation/atari_environment.num_threads = {threads}
atari_environment.num_envs = {envs}
train.num_env_steps = {steps}
"""


def circumstances(monkeypatch: pytest.MonkeyPatch, schedule: str = "", **values: int):
    text = CONFIG.format(**{"threads": 1, "envs": 8, "steps": 100, **values}) + schedule
    monkeypatch.setattr(configuration, "operative_config", lambda: text)
    settings = {"threads": {"intra_op": 1}, "execution": "graph", "onednn": "1"}
    return Circumstances(settings)


SPREAD = "linear_schedule.num_steps = @whole_run()\n"


@pytest.mark.parametrize(
    "now, schedule, differ",
    [
        ({"threads": 2}, "", []),  # of emulators, in training and in evaluation
        ({"envs": 4}, "", ["atari_environment.num_envs: 8 in the checkpoint, 4 here"]),
        ({"steps": 200}, "", []),
        ({"steps": 200}, SPREAD, ["train.num_env_steps: 100 in the checkpoint, 200 here"]),
    ],
)
def test_only_what_moves_bits_is_compared(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    now: dict[str, int],
    schedule: str,
    differ: list[str],
) -> None:
    circumstances(monkeypatch, schedule).save(tmp_path)
    resumed = circumstances(monkeypatch, schedule, **now)
    assert resumed.differences() == []  # nothing was restored yet
    resumed.restore(tmp_path)
    assert resumed.differences() == differ
