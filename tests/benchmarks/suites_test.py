import ast
import pathlib

import gin
import pytest

from pipeline.benchmarks import planned_runs, suites
from pipeline.utils.errors import UserError

MINE = """
import pipeline.benchmarks.suites
suite.protocol = "any"
suite.experiments = (("dqn", "CartPole-v1", "dqn_cartpole", 100, "train.log_interval = 10"),)
"""
# Environments that gymnasium builds from another one with keyword arguments.
MADE_OF = {"LunarLanderContinuous-v3": ("LunarLander-v3", {"continuous": True})}


@pytest.fixture
def write(tmp_path):
    """Returns a function that writes a suite, `MINE` and further lines, and returns its path."""

    def write_suite(text: str = "") -> str:
        path = tmp_path / "mine.gin"
        path.write_text(MINE + text)
        return str(path)

    return write_suite


def test_the_shipped_suites():
    assert set(suites.shipped()) == {"smoke", "classic", "atari_small_budget", "atari5"}


@pytest.mark.parametrize("name", suites.shipped())
def test_every_experiment_is_what_it_says(name, tmp_path):
    suite = suites.load(name)
    runs = planned_runs.plan(suite._replace(num_seeds=1), tmp_path)
    longest: dict[str, int] = {}
    for run in runs:
        protocol = suite.protocol_of(run.experiment)
        longest[protocol] = max(longest.get(protocol, 0), run.num_env_steps)
    assert max(suite.budgets, default=0) <= min(longest.values())
    for run in runs:
        settings = run.settings
        algorithm, environment = run.experiment.algorithm, run.experiment.environment
        assert settings["train.create_agent"] == f"@create_{algorithm}_agent"
        assert run.num_env_steps == run.experiment.num_env_steps
        if "atari_environment.game" in settings:
            assert settings["atari_environment.game"] == repr(environment)
            sticky = {"0.25": "sticky 0.25", "0.0": "no sticky"}
            chance = settings["atari_environment.repeat_action_probability"]
            assert sticky[chance] in suite.protocol_of(run.experiment)
        else:
            made_of, kwargs = MADE_OF.get(environment, (environment, {}))
            assert settings["gymnasium_environment.name"] == repr(made_of)
            assert ast.literal_eval(settings.get("gymnasium_environment.kwargs", "{}")) == kwargs


@pytest.mark.parametrize(
    ("config", "bindings", "trained"),
    [
        ("ppo_cartpole", (), "CartPole-v1"),
        ("ppo_cartpole", ("NAME = 'Taxi-v3'", "gymnasium_environment.name = %NAME"), "Taxi-v3"),
        ("ppo_atari", ("atari_environment.game = 'pong'",), "pong"),
        ("dqn3_pong", (), "pong"),
    ],
)
def test_published_scores_are_of_the_environment_that_is_trained(
    tmp_path, config, bindings, trained
):
    suite = suites.load("classic")
    forgotten = suites.Experiment("ppo", "Acrobot-v1", config, 1_000_000, bindings)
    with pytest.raises(UserError, match=f"^ppo-Acrobot-v1 would train {trained}. Bind its env"):
        planned_runs.plan(suite._replace(experiments=(forgotten,)), tmp_path)
    old = ("gymnasium_environment.name = 'Acrobot-v0'",)
    for experiment, protocol in (
        (forgotten._replace(environment="mine"), suite.protocol),
        (forgotten._replace(config="ppo_cartpole", bindings=old), suite.protocol),
        (forgotten, "a protocol under which nothing is published"),
    ):
        other = suite._replace(experiments=(experiment,), protocol=protocol)
        assert planned_runs.plan(other, tmp_path)


def test_a_suite_may_include_another(tmp_path):
    """Then it may leave macros and experiments of the other unused."""
    path = tmp_path / "mine.gin"
    experiments = '(("dqn", "CartPole-v1", "dqn_cartpole", 5_000),)'
    path.write_text(
        f"include 'benchmarks/classic.gin'\nOWN = 1\nsuite.experiments = {experiments}\n"
    )
    assert [e.name for e in suites.load(str(path)).experiments] == ["dqn-CartPole-v1"]


def test_classic_has_every_agent_wherever_its_actions_fit():
    experiments = suites.load("classic").experiments
    by_algorithm = {
        algorithm: {e.environment for e in experiments if e.algorithm == algorithm}
        for algorithm in ("dqn", "ppo", "sac", "a2c", "trpo", "nstep_q")
    }
    discrete = {"CartPole-v1", "Acrobot-v1", "MountainCar-v0", "LunarLander-v3"}
    continuous = {"Pendulum-v1", "LunarLanderContinuous-v3"}
    assert by_algorithm == {
        "dqn": discrete,
        "ppo": discrete | continuous,
        "sac": continuous,
        "a2c": discrete | continuous,
        "trpo": discrete | continuous,
        "nstep_q": discrete,
    }


def test_a_suite_of_ones_own_and_gins_config_stays(write, tmp_path):
    gin.parse_config("train.num_env_steps = 7", skip_unknown=True)
    before = gin.config_str()
    suite = suites.load(write())
    experiment = suites.Experiment(
        "dqn", "CartPole-v1", "dqn_cartpole", 100, ("train.log_interval = 10",)
    )
    assert suite == suites.Suite("mine", "any", "evaluation", 5, (), (), (experiment,))
    assert suites.load(write().removesuffix(".gin")) == suite
    assert gin.config_str() == before


@pytest.mark.parametrize(
    ("name", "hint"),
    [("clasic", "Nearest: classic. The shipped suites are atari5, atari_small_budget, classic,"),
     ("xyzzy", "The shipped suites are atari5, .*, smoke. Use one of them, or the path of a gin")],
)  # fmt: skip
def test_an_unknown_suite_names_the_nearest_and_all(name, hint):
    with pytest.raises(UserError, match=f"no suite is named '{name}'. {hint}"):
        suites.load(name)


def test_a_path_is_the_user_s(write, monkeypatch):
    path = pathlib.Path(write())
    monkeypatch.setenv("HOME", str(path.parent))
    assert suites.load(f"~/{path.name}").name == path.stem
    with pytest.raises(UserError, match="no suite is named 'xxx"):
        suites.load("x" * 300)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "suite.score = 'best'",
            "suite.score = 'best': must be evaluation or training or iteration",
        ),
        ("suite.score = None", "suite.score = None: must be evaluation or training or iteration"),
        ("suite.score = {'ppo': 'training'}", "suite.score = .*for every algorithm."),
        ("suite.num_seeds = 0", "suite.num_seeds = 0: must be a whole number, at least 1."),
        ("suite.budgets = (0,)", "suite.budgets.* = 0: must be a whole number, at least 1"),
        ("suite.budgets = (0.5,)", "suite.budgets = .*: must be a tuple of whole numbers"),
        ("suite.budgets = 250_000", "suite.budgets = 250000: must be a tuple of whole numbers"),
        ("suite.budgets = None", "suite.budgets = None: must be a tuple of whole numbers"),
        ("suite.experiments = 5", "suite.experiments = 5: must be a tuple of experiments."),
        ("suite.protocol = ''", "suite.protocol = '': must describe how scores are taken"),
        ("suite.protocol = {'ppo': 'any'}", "suite.protocol = .*for every algorithm."),
        ("suite.protocol = {'dqn': 5}", "suite.protocol = .*for every algorithm."),
        ("suite.bindings = 'train.x = 1'", "suite.bindings = .*: must be gin statements."),
        ("suite.experiments = ()", "suite.experiments = .*: a suite needs at least one."),
        ("suite.experiments = ('dqn', 'A-v1', 'x', 5)", "suite.experiments = 'dqn': must be "),
        ("suite.experiments = (('dqn', 'A-v1', 'x'),)", "suite.experiments = .*must be .algorithm"),
        ("suite.experiments = (('dqn', 'A-v1', 'x', 0),)", "suite.experiments = .*at least 1"),
        (
            "suite.experiments = (('dqn', 'A-v1', 'x', 2.5),)",
            ".* a whole number of environment",
        ),
        ("suite.experiments = (('dqn', 'A-v1', 'x', 5, 6),)", "suite.experiments = .*must be "),
        ("suite.experiments = (('dqn', 'A', 'x', 5), ('dqn', 'A', 'y', 6))", ".*dqn-A.*twice"),
        ("suite.sed = 1", ".*suite has no parameter 'sed'"),
        ("x/suite.num_seeds = 10", ".*x/suite.num_seeds is not used here.*in suite.bindings"),
    ],
)
def test_mistakes_in_a_suite(write, line, message):
    with pytest.raises(UserError, match=message):
        suites.load(write(line))


def test_experiments_are_chosen_by_name_or_pattern():
    suite = suites.load("atari5")
    chosen = suites.select_experiments(suite, ["ppo-*", "dqn-qbert", "*-phoenix"])
    games = ["battle_zone", "double_dunk", "name_this_game", "phoenix", "qbert"]
    assert [e.name for e in chosen.experiments] == [
        "dqn-phoenix",
        "dqn-qbert",
        *(f"ppo-{game}" for game in games),
    ]
    assert chosen._replace(experiments=suite.experiments) == suite


# Runs.


def test_flags_of_a_run(write):
    suite = suites.load(write("suite.bindings = ('train.log_interval = 5', 'a.b = 1')"))
    first, second = planned_runs.plan(suite._replace(num_seeds=2), pathlib.Path("out"), ["a.b = 2"])
    assert second.folder == pathlib.Path("out/mine/dqn-CartPole-v1/seed-2")
    assert second.log == pathlib.Path("out/mine/dqn-CartPole-v1/seed-2.log")
    assert second.name == "dqn-CartPole-v1 seed 2"
    assert second.arguments == [
        "--root_dir=out/mine/dqn-CartPole-v1/seed-2",
        "--gin_file=dqn_cartpole",
        "--gin_bindings=train.num_env_steps = 100",
        "--gin_bindings=train.log_interval = 5",
        "--gin_bindings=a.b = 1",
        "--gin_bindings=train.log_interval = 10",
        "--gin_bindings=a.b = 2",
        "--seed=2",
    ]
    # The last value of each setting counts.
    assert (second.settings["train.log_interval"], second.settings["a.b"]) == ("10", "2")
    assert (first.settings, first.seed) == (second.settings, 1)


def test_a_run_does_not_depend_on_the_folder_of_its_command(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more.gin").write_text("train.log_interval = 7\ninclude 'most.gin'")
    (tmp_path / "most.gin").write_text("a/b.c = @d()")
    suite = suites.load(write("suite.bindings = (\"include 'more.gin'\",)"))
    (run, *_) = planned_runs.plan(suite, tmp_path)
    assert run.bindings[1:3] == ("train.log_interval = 7", "a/b.c = @d()")


def test_a_binding_may_change_the_budget(write):
    for text in ("1_0", "1e1"):
        binding = f"train.num_env_steps = {text}"
        (run, *_) = planned_runs.plan(suites.load(write()), pathlib.Path("out"), [binding])
        assert (run.num_env_steps, run.settings["train.num_env_steps"]) == (10, "10")


def test_a_binding_may_name_a_module(write):
    binding = "pipeline.training.train_loop.train.num_env_steps = 10"
    (run, *_) = planned_runs.plan(suites.load(write()), pathlib.Path("out"), [binding])
    assert run.num_env_steps == 10


def test_a_trusted_config_may_import(tmp_path, write, monkeypatch):
    (tmp_path / "of_the_user.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "theirs.gin").write_text("import of_the_user\ninclude 'dqn_cartpole.gin'\n")
    suite = suites.load(
        write(f"suite.experiments = (('dqn', 'A-v1', '{tmp_path}/theirs.gin', 5),)")
    )
    with pytest.raises(UserError, match="--allow_gin_imports"):
        planned_runs.plan(suite, pathlib.Path("out"))
    (run, *_) = planned_runs.plan(suite, pathlib.Path("out"), flags=["--allow_gin_imports"])
    assert run.arguments[-1] == "--allow_gin_imports"


def test_an_environments_name_makes_one_folder():
    assert suites.Experiment("ppo", "ALE/Pong-v5", "x", 1).name == "ppo-ALE_Pong-v5"
    assert suites.Experiment("ppo", "mine:Maze-v0", "x", 1).name == "ppo-mine_Maze-v0"


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        (
            "train.num_env_steps = 1.5",
            "train.num_env_steps = 1.5: a benchmark needs a whole number",
        ),
        ("train.num_env_steps = %x", "train.num_env_steps = %x: a benchmark needs a whole"),
        ("train.num_env_steps = 0", "train.num_env_steps = 0: "),
        ("train.num_env_steps = 1e999", "train.num_env_steps = inf: a benchmark needs a whole"),
        ("train.num_env_steps =", "--gin_bindings: "),
        ("suite.num_seeds = 3", "suite.num_seeds is not a parameter of the runs: .*--suite"),
        ("import os", "--gin_bindings: `import os` is refused"),
    ],
)
def test_mistakes_in_bindings(write, binding, message):
    with pytest.raises(UserError, match=message):
        planned_runs.plan(suites.load(write()), pathlib.Path("out"), [binding])


def test_a_mistake_in_a_binding_of_the_suite_names_its_experiment(write):
    suite = suites.load(write("suite.bindings = ('train.log_interval 5',)"))
    with pytest.raises(UserError, match="cannot read .*\nIt is a binding of the suite or search"):
        planned_runs.plan(suite, pathlib.Path("out"))


def test_a_name_that_no_folder_can_have_is_refused(write):
    experiment = ("a" * 250, "b", "dqn_cartpole", 5)
    with pytest.raises(UserError, match="a name may have 200 bytes at most"):
        suites.load(write(f"suite.experiments = ({experiment},)"))


def test_a_missing_config_is_named(write):
    suite = suites.load(write("suite.experiments = (('dqn', 'A-v1', 'dqn_cartpol', 5),)"))
    with pytest.raises(UserError, match="named 'dqn_cartpol'. Nearest: dqn_cartpole"):
        planned_runs.plan(suite, pathlib.Path("out"))
