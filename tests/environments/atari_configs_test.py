import gin
import pytest
from conftest import ROOT

from pipeline.environments import atari
from pipeline.environments.deepmind_atari import deepmind_atari_environment
from pipeline.environments.gymnasium_envs import gymnasium_environment

FOLDER = ROOT / "gin_configs" / "environments"
NAMES = ["atari_deepmind", "atari_dopamine", "atari_machado", "atari_openai", "gymnasium"]


def parse(name, *bindings):
    gin.parse_config_files_and_bindings(
        [str(FOLDER / f"{name}.gin")], bindings, skip_unknown=["train", "CollectDriver"]
    )


def test_all_files_are_tested_and_say_what_they_are():
    assert sorted(path.stem for path in FOLDER.glob("*.gin")) == NAMES
    for path in FOLDER.glob("*.gin"):
        first_line, second_line = path.read_text().splitlines()[:2]
        assert first_line.startswith("# ") and first_line.endswith(".")
        assert second_line in ("", "#")


@pytest.mark.parametrize(
    ("name", "num_actions", "sticky", "noop_max", "cuts"),
    [
        ("atari_machado", 18, 0.25, 0, False),
        ("atari_dopamine", 4, 0.25, 0, False),
        ("atari_openai", 4, 0.0, 30, True),
    ],
)
def test_atari_protocols(name, num_actions, sticky, noop_max, cuts):
    parse(name, "atari_environment.game = 'breakout'", "atari_environment.num_envs = 1")
    env = atari.atari_environment(1)
    assert env.batch_size == 1
    assert env.action_spec().maximum == num_actions - 1
    assert isinstance(env.episodes.vector, atari.LifeLossAtariVector) == cuts
    assert gin.query_parameter("atari_environment.repeat_action_probability") == sticky
    assert gin.query_parameter("atari_environment.noop_max") == noop_max
    assert gin.query_parameter("evaluation/atari_environment.num_envs") == 8
    with gin.config_scope("evaluation"):
        evaluation = atari.atari_environment(2, num_envs=1)
    assert evaluation.action_spec().maximum == num_actions - 1
    assert type(evaluation.episodes.vector) is atari.AtariVector


def test_a_lost_life_is_terminal_in_training_only():
    parse("atari_deepmind", "deepmind_atari_environment.game = 'breakout'")
    env = deepmind_atari_environment(1)
    with gin.config_scope("evaluation"):
        evaluation = deepmind_atari_environment(2)
    for each, cuts in ((env, True), (evaluation, False)):
        each.reset()
        rows = [each.step([1]) for _ in range(120)]
        cut = [row for row in rows if row.step_type == 1 and row.discount == 0]
        assert bool(cut) == cuts


def test_gymnasium():
    parse("gymnasium", "gymnasium_environment.name = 'CartPole-v1'")
    assert gymnasium_environment(1).observation_spec().shape == (4,)
