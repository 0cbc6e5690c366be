import gin
import pytest
from conftest import ROOT

from pipeline.environments import atari
from pipeline.environments.deepmind_atari import deepmind_atari_environment

FOLDER = ROOT / "gin_configs" / "environments"


def parse(name, *bindings):
    gin.parse_config_files_and_bindings(
        [str(FOLDER / f"{name}.gin")], bindings, skip_unknown=["train", "CollectDriver"]
    )


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
