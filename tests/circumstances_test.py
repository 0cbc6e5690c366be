import pathlib

import pytest

from pipeline import configuration
from pipeline.circumstances import Circumstances, configured_otherwise

CONFIG = """
import pipeline.environments.atari
import pipeline.train_loop

atari_environment.num_threads = {threads}
evaluation/atari_environment.num_threads = {threads}
atari_environment.num_envs = {envs}
train.num_env_steps = {steps}
"""


def circumstances(
    monkeypatch: pytest.MonkeyPatch, schedule: str = "", seed: int = 1, **values: int
):
    text = CONFIG.format(**{"threads": 1, "envs": 8, "steps": 100, **values}) + schedule
    monkeypatch.setattr(configuration, "operative_config", lambda: text)
    settings = {"threads": {"intra_op": 1}, "execution": "graph", "onednn": "1"}
    return Circumstances(settings, seed)


SPREAD = "linear_schedule.num_steps = @whole_run()\n"


@pytest.mark.parametrize(
    "now, schedule, differ",
    [
        ({"threads": 2}, "", []),  # of emulators, in training and in evaluation
        ({"envs": 4}, "", ["atari_environment.num_envs: 8 in the checkpoint, 4 here"]),
        ({"seed": 2}, "", ["seed: 1 in the checkpoint, 2 here"]),
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


def test_a_finished_run_s_configuration_is_compared_with_what_is_bound_now(tmp_path):
    path = tmp_path / "operative_config.gin"
    imports = "import pipeline.agents.dqn\nimport pipeline.environments.gymnasium"
    text = imports + CONFIG.format(threads=1, envs=8, steps=100)
    path.write_text(f"{text}rate/linear_schedule.final = 1\n")
    more = "GAMES = 8\nevaluation/atari_environment.num_envs = %GAMES\n"
    more += "gymnasium_environment.kwargs = {'b': 1, 'a': 2}\n"
    path.write_text(path.read_text() + more)
    with configuration.preserved():
        configuration.load([str(path)])
        assert configured_otherwise(path) == []
        harmless = ["evaluation/atari_environment.num_threads = 2", "train.num_env_steps = 50"]
        harmless += ["train.log_interval = 1"]  # of which the file says nothing
        changed = ["atari_environment.num_envs = 4", "GAMES = 2"]
        changed += ["train.create_agent = @create_dqn_agent"]
        configuration.load([str(path)], [*harmless, *changed])
        path.write_text(path.read_text() + "train.create_agent = @create_sac_agent\n")
        assert configured_otherwise(path) == [
            "atari_environment.num_envs: 8 there, 4 here",
            "GAMES: 8 there, 2 here",
            "train.create_agent: @create_sac_agent there, @create_dqn_agent here",
        ]
