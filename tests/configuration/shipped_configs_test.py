"""Tests that every shipped config builds, and every agent with every suitable environment."""

import itertools
import re

import gin
import numpy as np
import pytest
from ale_py.vector_env import AtariVectorEnv
from conftest import ROOT
from gymnasium.vector import VectorEnv

from pipeline import configuration
from pipeline.benchmarks import suites
from pipeline.checkpointing.exactness import configured_otherwise
from pipeline.environments import atari
from pipeline.training.train_loop import train
from pipeline.utils.errors import UserError
from pipeline.utils.shutdown import StopSignal

pytestmark = pytest.mark.usefixtures("any_config", "one_game_each")

NAMES = [name for name, _ in configuration.list_configs()]
READY = [name for name in NAMES if "/" not in name]
AGENTS = [name for name in NAMES if name.startswith("agents/")]
ENVIRONMENTS = [name for name in NAMES if name.startswith("environments/")]
GAMES = [  # configs of one game
    name for name in READY if name.endswith("_pong") and f"{name.rpartition('_')[0]}_atari" in READY
]

DISCRETE = {
    "agents/a2c",
    "agents/a3c",
    "agents/async_nstep_q",
    "agents/dqn",
    "agents/impala",
    "agents/nstep_q",
    "agents/ppo",
    "agents/trpo",
}
CONTINUOUS = {
    "agents/a2c",
    "agents/a3c",
    "agents/impala",
    "agents/ppo",
    "agents/sac",
    "agents/trpo",
}


class OneGame(VectorEnv):
    """Says that it has `num_envs` environments, but loads one, whose start all of them show."""

    def __init__(self, game, num_envs, **settings):
        self.num_envs = num_envs
        self._one = AtariVectorEnv(game, 1, **settings)
        self.metadata = self._one.metadata
        self.single_observation_space = self._one.single_observation_space
        self.single_action_space = self._one.single_action_space

    def reset(self, *, seed=None, options=None):
        observations, info = self._one.reset(seed=seed[:1], options=options)
        return np.repeat(observations, self.num_envs, 0), info

    def close(self, **kwargs):
        self._one.close(**kwargs)


@pytest.fixture
def one_game_each(monkeypatch):
    # Loading games would take most of the time, and no test of this file steps them.
    monkeypatch.setattr(atari, "AtariVectorEnv", OneGame)


def build(files, *bindings):
    """Builds everything without training, as `--explain` does."""
    configuration.load(files, bindings)
    train(None, 1, "fail", StopSignal(), dry_run=True)
    assert configuration.warnings() == []


def bound(files, *bindings):
    """Returns all bindings in force, as sorted lines."""
    configuration.load(files, bindings)
    return sorted(gin.config_str().splitlines())


def unread():
    """Returns the list of bindings that nothing has read."""
    _, _, listed = configuration.explain().partition("# Bound, but not used in this run:\n")
    return listed


def test_every_ready_run_has_a_result():
    results = (ROOT / "docs" / "results" / "README.md").read_text()
    suite = (ROOT / "docs" / "results" / "classic" / "classic.jsonl").read_text()
    of_one_game = [name for name in READY if not name.endswith("_atari")]
    assert len(of_one_game) > 30
    missing = [n for n in of_one_game if f"| `{n}` |" not in results and f'"{n}"' not in suite]
    assert not missing


def test_explain_knows_of_what_only_training_makes_and_what_only_the_graph_calls():
    bindings = ["Watchdog.timeout = 60", "Patience.give_up_after = 1", "huber_loss.threshold = 2.5"]
    build(["dqn_cartpole"], *bindings)
    assert not unread()
    assert "huber_loss.threshold = 2.5" in configuration.operative_config()


def test_a_schedule_that_is_not_bound_is_told_with_its_flags():
    rate = "create_dqn_agent.learning_rate = @lr/linear_schedule()"
    with pytest.raises(RuntimeError) as caught:
        build(["dqn_cartpole"], "create_dqn_agent.gradient_clip_norm = None", rate)
    message = configuration.explain_call_error(caught.value)
    assert message and "linear_schedule.num_steps have no values: add --gin_bindings" in message


def budgets_of_the_page():
    """Returns the environment steps by ready run, from the table in the documentation."""
    page = (ROOT / "docs/algorithms/index.md").read_text()
    table = page.partition("| config | environment | environment steps |")[2].partition("\n\n")[0]
    budgets: dict[str, int] = {}
    for line in table.splitlines()[2:]:
        _, runs, _, numbers, _ = line.split("|")
        names = re.findall("`(.*?)`", runs)
        steps = [int(number.replace(",", "")) for number in numbers.split(";")]
        budgets |= zip(names, steps * len(names) if len(steps) == 1 else steps, strict=True)
    return budgets


def test_the_documentation_lists_every_ready_run_with_its_budget():
    budgets = budgets_of_the_page()
    assert budgets.keys() == set(READY)
    for name, steps in budgets.items():
        configuration.load([name])
        assert gin.query_parameter("train.num_env_steps") == steps, name
    assert all(comment.endswith(".") for _, comment in configuration.list_configs())


# Agents by the first word of a run's name, where the two differ.
ALGORITHMS = {"nstep": "nstep_q", "dqn3": "dqn", "a3c": "a2c", "async": "nstep_q"}


def factory_of(name):
    """Returns the Atari environment of a ready run or of an environment's file."""
    is_deepmind = name.startswith("dqn3_") or name.endswith("_deepmind")
    return "deepmind_atari_environment" if is_deepmind else "atari_environment"


@pytest.mark.parametrize("name", [name for name in READY if name not in GAMES])
def test_ready_run(name, tmp_path):
    bindings = []
    if name.endswith("_atari"):
        bindings.append(f"{factory_of(name)}.game = 'freeway'")
    if (
        name.endswith("_atari") and name != "sac_atari"
    ):  # large orthogonal weights take long to make
        bindings.append("nature_cnn_encoder.units = (8,)")
    if name.startswith(("a3c_", "async_")):  # all actors are alike, and all collectors
        bindings.append("asynchronous_runner.num_actors = 1")
    if name.startswith("impala_"):
        bindings.append("distributed_runner.num_collectors = 1")
    build([name], *bindings)
    algorithm = ALGORITHMS.get(name.split("_")[0], name.split("_")[0])
    assert gin.query_parameter("train.create_agent").selector == f"create_{algorithm}_agent"
    assert unread_by_mistake() == []
    # A finished run is not mistaken for one with another configuration, and can be started again.
    path, text = tmp_path / "operative_config.gin", configuration.operative_config()
    path.write_text(text)
    assert configured_otherwise(path) == []
    assert "tf_agents" not in text
    configuration.load([str(path)])


def test_what_the_smoke_suite_binds_is_read():
    smoke = suites.load("smoke")
    for experiment in smoke.experiments:
        build([experiment.config], *smoke.bindings, *experiment.bindings)
        assert unread_by_mistake() == []


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "results").rglob("best.gin")), ids=str)
def test_the_best_of_a_committed_search_can_be_trained(path):
    configuration.load([str(path)])
    assert gin.query_parameter("train.create_agent")


@pytest.mark.parametrize("name", GAMES)
def test_a_game_s_run_is_that_of_any_game_but_for_the_lines_of_its_file(name):
    algorithm, _, game = name.rpartition("_")
    lines = configuration.find_config(name).read_text().splitlines()
    own = [line for line in lines if line and not line.startswith(("#", "include"))]
    assert f'{factory_of(name)}.game = "{game}"' in own
    assert bound([name]) == bound([f"{algorithm}_atari"], *own)


def unread_by_mistake():
    # The observation decides the encoder: an agent's file also binds those that are not used.
    return [line for line in unread().splitlines() if "_encoder." not in line]


@pytest.mark.parametrize("name", [name for name in READY if name.endswith("_atari")])
def test_the_game_is_asked_for(name):
    with pytest.raises(UserError, match=f"{factory_of(name)}.game is not bound"):
        build([name])


def compositions():
    """Yields every agent with every environment; many are slow tests.

    These are the agents on Atari but PPO, and what a ready run has too: the agents that fit
    CartPole, SAC on Pendulum, and `ppo_atari`.
    """
    for agent, environment in itertools.product(AGENTS, ENVIRONMENTS):
        on_gymnasium = environment == "environments/gymnasium"
        for kind in ("discrete", "continuous"):
            if on_gymnasium:
                is_ready = agent in DISCRETE if kind == "discrete" else agent == "agents/sac"
            else:
                is_ready = kind == "discrete" and environment == "environments/atari_openai"
            is_often = (on_gymnasium or agent == "agents/ppo") and not is_ready
            marks = () if is_often else pytest.mark.crash
            yield pytest.param(agent, environment, kind == "continuous", marks=marks)


@pytest.mark.parametrize(("agent", "environment", "continuous"), compositions())
def test_composition(agent, environment, continuous):
    if environment == "environments/gymnasium":
        names = ("CartPole-v1", "Pendulum-v1")
        bindings = [f"gymnasium_environment.name = {names[continuous]!r}"]
    else:
        factory = factory_of(environment)
        bindings = [
            f"{factory}.game = 'pong'",
            f"{factory}.num_envs = 2",
            f"evaluation/{factory}.num_envs = 2",
            "nature_cnn_encoder.units = (8,)",
        ]
        if factory == "atari_environment":
            bindings.append(f"atari_environment.continuous = {continuous}")
        elif continuous:
            pytest.skip("its actions are a joystick's switches")
    if agent in ("agents/a3c", "agents/async_nstep_q"):
        bindings.append("asynchronous_runner.num_actors = 1")
    if agent == "agents/impala":
        bindings.append("distributed_runner.num_collectors = 1")
    if agent in (CONTINUOUS if continuous else DISCRETE):
        build([agent, environment], *bindings)
        # The order of the files does not matter.
        assert bound([agent, environment], *bindings) == bound([environment, agent], *bindings)
    else:
        with pytest.raises(UserError, match="needs (discrete|continuous) actions"):
            build([agent, environment], *bindings)


def test_no_agent_or_environment_is_left_out():
    assert set(AGENTS) == DISCRETE | CONTINUOUS
    assert "environments/gymnasium" in ENVIRONMENTS
    assert len(ENVIRONMENTS) == 5


@pytest.mark.parametrize(
    ("files", "binding", "message"),
    [
        (["dqn_cartpole"], "ReplayBufer.capacity = 1", ".*'ReplayBufer'.* Nearest: ReplayBuffer"),
        (["dqn_cartpole"], "ReplayBuffer.capasity = 1", ".*'capasity'.* Nearest: capacity"),
        (
            ["agents/dqn", "environments/atari_dopamine"],
            "atari_environment.game = 'breakuot'",
            ".*'breakuot'.* Nearest: breakout",
        ),
    ],
)
def test_mistakes(files, binding, message):
    with pytest.raises((UserError, RuntimeError)) as caught:
        build(files, binding)
    told = configuration.explain_call_error(caught.value) or str(caught.value)
    assert re.match(message, told)
