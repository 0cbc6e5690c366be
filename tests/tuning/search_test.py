"""Search files, distributions and suggestions."""

import numpy as np
import pytest
from tiny_searches import make_search

from pipeline.tuning import search as searches
from pipeline.tuning.search import Told
from pipeline.utils.errors import UserError

_FILE = """
search.config = "dqn_cartpole"
search.num_env_steps = 1_000
search.parameters = {"create_dqn_agent.learning_rate": ("log_uniform", 1e-5, 1e-2)}
"""


@pytest.fixture
def load(tmp_path):
    def load(text):
        path = tmp_path / "mine.gin"
        path.write_text(text)
        return searches.load(str(path))

    return load


def test_a_file_describes_a_search(load):
    search = load(_FILE + "search.rungs = (100, 300)\nsearch.num_seeds = 2\n")
    assert search.name == "mine"
    assert search.parameters == {"create_dqn_agent.learning_rate": ("log_uniform", 1e-5, 1e-2)}
    assert search.ends == (100, 300, 1_000)
    assert (search.sampler, search.num_seeds) == ("tpe", 2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('search.config = ""', "search.config is not set"),
        ("search.num_env_steps = 0", "search.num_env_steps is not set"),
        ('search.sampler = "bayes"', "search.sampler = 'bayes'"),
        ("search.parameters = {}", "at least one parameter"),
        ("search.parameters = 3", "at least one parameter"),
        ('search.parameters = {"rate": ("uniform", 0, 1)}', "not the name of a parameter"),
        ('search.parameters = {"train.eval_interval": ("int", 1, 9)}', "cannot be searched over"),
        (
            'search.parameters = {"train_loop.train.eval_interval": ("int", 1, 9)}',
            "cannot be searched over",
        ),
        ('search.parameters = {"a.b": ("normal", 0, 1)}', '("log_uniform", low, high)'),
        ('search.parameters = {"a.b": ([1], 2)}', '("log_uniform", low, high)'),
        ('search.parameters = {"a.b": ("uniform", 1, 0)}', "low must be less than high"),
        ('search.parameters = {"a.b": ("log_uniform", 0, 1)}', "low must be greater than 0"),
        ('search.parameters = {"a.b": ("int", 0.5, 1)}', "int needs two whole numbers"),
        ('search.parameters = {"a.b": ("choice", (64, 64), (8,))}', "choices must be numbers"),
        ('search.parameters = {"a.b": 3}', "a distribution is one of"),
        ('search.sampler = "grid"', 'needs ("choice", value, ...)'),
        ('search.bindings = "a.b = 3"', "A tuple with one string needs a comma"),
        ("search.rungs = (1_000,)", "in increasing order, and all less than"),
        ("search.rungs = (300, 100)", "in increasing order, and all less than"),
        ("search.reduction = 1", "at least 2"),
        ("search.num_seeds = 0", "search.num_seeds = 0"),
        ("search.config = 3", "search.config = 3"),
        ("search.trials = 3", "has no parameter 'trials'"),
        ("suite.num_seeds = 3", "suite.num_seeds is not used here"),
    ],
)
def test_a_wrong_file_is_refused(load, line, message):
    with pytest.raises(UserError) as raised:
        load(f"{_FILE}{line}\n")
    assert message in str(raised.value)


def test_no_file(tmp_path):
    with pytest.raises(UserError, match=r"missing\.gin"):
        searches.load(str(tmp_path / "missing.gin"))


def told(quality, *returns, is_complete=False):
    parameters = {"fake.quality": quality, "fake.other": 10}
    return Told(parameters, list(returns) if returns else None, is_complete)


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_suggestions_are_in_range_and_depend_on_the_arguments_alone(sampler):
    search = make_search(sampler=sampler)
    seen = [told(0.1 * n, 0.1 * n, is_complete=n % 2 == 0) for n in range(1, 10)]
    values = [search.suggest(number, seen[:number]) for number in range(9)]
    assert values == [search.suggest(number, seen[:number]) for number in range(9)]
    assert all(0 <= x["fake.quality"] <= 1 and 1 <= x["fake.other"] <= 100 for x in values)
    assert len({x["fake.quality"] for x in values}) == 9
    assert make_search(sampler=sampler, seed=6).suggest(3, seen[:3]) != values[3]


def test_tpe_prefers_what_returned_much():
    search = make_search(sampler="tpe")
    seen = [told(n / 40, -abs(n / 40 - 0.2), is_complete=True) for n in range(40)]
    values = [search.suggest(number, seen)["fake.quality"] for number in range(40, 60)]
    assert sum(abs(value - 0.2) < 0.2 for value in values) >= 15


def test_a_grid_has_all_combinations():
    choices = {"a.b": ("choice", 1, 2), "c.d": ("choice", "x", None, True)}
    search = make_search(sampler="grid", parameters=choices)
    points = [tuple(search.suggest(number, []).values()) for number in range(6)]
    assert points == [(a, c) for a in (1, 2) for c in ("x", None, True)]


@pytest.mark.parametrize(("low", "high"), [(0.999, 0.9999), (1000.1, 1000.4), (0.0, 1e-6), (-1, 1)])
def test_rounding_leaves_many_values(low, high):
    search = make_search(parameters={"fake.quality": ("uniform", low, high)})
    values = [search.suggest(number, [])["fake.quality"] for number in range(30)]
    assert len(set(values)) > 25
    assert all(low <= value <= high and len(repr(value)) < 12 for value in values)


@pytest.mark.parametrize("kind", ["log_uniform", "log_int"])
def test_every_order_of_magnitude_is_equally_likely(kind):
    search = make_search(parameters={"fake.quality": (kind, 1, 10_000)})
    values = [search.suggest(number, [])["fake.quality"] for number in range(100)]
    assert 30 < np.median(values) < 300
