import subprocess
import sys
from collections.abc import Callable, Sequence  # noqa: F401 - used in a string annotation
from pathlib import Path
from typing import Any, Literal  # noqa: F401 - likewise

import gin
import pytest

from pipeline import configuration
from pipeline.configuration import statements
from pipeline.utils.errors import UserError

Initializer = Callable[[], object]


@gin.configurable("make_fruit", module="pipeline.orchard")
def make_fruit(name=gin.REQUIRED, *, weight=1.0, count=3, basket=None, core=gin.REQUIRED):
    return name, weight, count, basket, core


@gin.configurable("make_basket", module="pipeline.orchard", denylist=["owner"])
def make_basket(size=2, owner="me"):
    if size < 0:
        raise UserError(f"make_basket.size is {size}: it must be positive.")
    return size, owner


@gin.configurable("make_crate", module="pipeline.orchard", denylist=["seed", "maker"])
def make_crate(
    seed=0,
    maker="me",
    slots: int = 4,  # a type here, a string where annotations are postponed
    layers: "int" = 1,
    limit: "int | None" = None,
    price: float = 1.0,
    lid: "bool" = False,
    label: str = "",
    sizes: "Sequence[int]" = (),
    extras: "dict[str, Any] | None" = None,
    sealed: "bool | None" = None,
    shares: "Sequence[float]" = (),
    span: "tuple[float, float] | None" = None,
    cells: "Sequence[tuple[int, int, int]]" = (),
    fill: "Callable[..., list[int | None]]" = make_fruit,
    paint: "Initializer" = make_fruit,
    wrap: "Callable[[int], int] | None" = None,
    builds: "Callable[..., Crate] | None" = None,
    pads: "float | tuple[float, float]" = 0.0,
    grade: "Literal[1, 2]" = 1,
    stamp: "float | Literal['auto']" = "auto",
    owner: "'Owner' | None" = None,  # type: ignore[name-defined]  # noqa: F821
    note: "how much to add" = None,  # type: ignore[valid-type]  # noqa: F722
    steps: [int] = (),  # type: ignore[misc, valid-type]
):
    del lid, label, sizes, extras, sealed, shares, span, cells, fill, paint, wrap, builds
    del pads, grade, stamp, owner, note, steps
    return slots, layers, limit, price


@gin.configurable("Crate", module="pipeline.orchard")
class Crate:
    pass


@gin.configurable("make_crate_or_pear", module="pipeline.orchard")
def make_crate_or_pear() -> "Crate | int":
    return Crate()


@gin.configurable("make_pears", module="pipeline.orchard")
def make_pears() -> "list[int]":
    return [1]


@gin.configurable("make_pear", module="pipeline.orchard")
def make_pear() -> int:
    return 1


@gin.configurable("make_filler", module="pipeline.orchard")
def make_filler() -> "Callable[..., list[int]]":
    return lambda: [1]


@gin.configurable("Pear", module="pipeline.orchard")
class Pear:
    pass


@gin.configurable("Filler", module="pipeline.orchard")
class Filler:
    def __call__(self):
        return [1]


@gin.configurable("plant", module="pipeline.orchard")
def plant(create_environment=None):
    return create_environment


def borrowed(reward_scale=1.0):
    return reward_scale


# Registered in the same way as TF-Agents' classes.
borrowed = gin.external_configurable(borrowed, "BorrowedAgent", module="tf_agents.agents.borrowed")


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """Replaces the shipped configs with a few of its own, and returns their folder."""
    files = {
        "agents/dqn.gin": "# DQN, Mnih et al.\nmake_fruit.weight = 2.5\nmake_fruit.core = 1\n",
        "dqn_cartpole.gin": "# DQN on CartPole.\ninclude 'agents/dqn.gin'\n"
        "make_fruit.name = 'apple'\nmake_fruit.weight = 7\n",
        "ppo_pong.gin": "\n# PPO on Pong.\n# Second line.\nmake_fruit.count = 1_000_000\n",
    }
    folder = tmp_path / "checkout" / "gin_configs"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    module = tmp_path / "checkout" / "pipeline" / "configuration" / "statements.py"
    monkeypatch.setattr(statements, "__file__", str(module))
    monkeypatch.chdir(tmp_path)
    return folder


def write(folder: Path, text: str, name: str = "mine.gin") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def message_of(*bindings: str, files=(), **kwargs) -> str:
    with pytest.raises(UserError) as caught:
        configuration.load(files, bindings, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_a_program_needs_before_tensorflow_does_not_import_it():
    modules = "pipeline.cli, pipeline.configuration, pipeline.utils.progress"
    code = f"import sys, {modules}, pipeline.utils.shutdown; sys.exit('tensorflow' in sys.modules)"
    root = Path(statements.__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


@pytest.mark.parametrize("name", ["dqn_cartpole", "dqn_cartpole.gin"])
def test_find_config_by_shipped_name(shipped, name):
    assert configuration.find_config(name) == shipped / "dqn_cartpole.gin"


def test_find_config_in_a_subfolder_and_by_path(shipped, tmp_path):
    assert configuration.find_config("agents/dqn") == shipped / "agents/dqn.gin"
    path = write(tmp_path, "")
    assert configuration.find_config(path) == Path(path)
    assert configuration.find_config("mine").resolve() == Path(path)


def test_the_installed_folder_goes_before_the_checkout(shipped, tmp_path):
    installed = tmp_path / "checkout" / "pipeline" / "gin_configs"
    installed.mkdir(parents=True)
    write(installed, "", "only_here.gin")
    assert configuration.find_config("only_here") == installed / "only_here.gin"


@pytest.mark.parametrize(
    "typo, near",
    [("dqn_cartpol", "dqn_cartpole"), ("agent/dqn", "agents/dqn"), ("pong", "ppo_pong")],
)
def test_find_config_suggests_names(shipped, typo, near):
    with pytest.raises(UserError, match=f"{typo}'.*Nearest:.*{near}"):
        configuration.find_config(typo)


def test_find_config_suggests_files_beside(shipped, tmp_path):
    write(tmp_path, "", "experiment.gin")
    with pytest.raises(UserError, match=f"Nearest: {tmp_path}/experiment"):
        configuration.find_config(f"{tmp_path}/experimnet.gin")


def test_list_configs_puts_ready_runs_first(shipped):
    (shipped / ".#ppo_pong.gin").symlink_to("me@here.1")  # by an editor with unsaved changes
    assert configuration.list_configs() == [
        ("dqn_cartpole", "DQN on CartPole."),
        ("ppo_pong", "PPO on Pong."),
        ("agents/dqn", "DQN, Mnih et al."),
    ]


def test_every_shipped_config_can_be_read_and_says_what_it_is():
    configs = dict(configuration.list_configs())
    assert {"dqn_cartpole", "agents/dqn", "environments/atari_openai"} <= set(configs)
    for name, comment in configs.items():
        assert comment, f"{name}.gin begins with no comment"
        list(statements.scan(statements.Source.read(configuration.find_config(name))))


def test_files_in_order_then_bindings_and_the_last_wins(shipped):
    configuration.load(["dqn_cartpole", "ppo_pong"], ["make_fruit.count = 50_000"])
    assert make_fruit() == ("apple", 7, 50_000, None, 1)


def test_a_value_can_be_looked_up_before_anything_is_imported(shipped):
    name = "configure_tensorflow.onednn"
    for bindings, expected in (
        ([], True),
        ([f"{name} = True", f"{name} = False", f"x/{name} = True"], False),
        ([f"{name} = False", f"pipeline.training.components.{name} = True"], True),
        ([f"components.{name} = False", "make_fruit.onednn = True"], False),
    ):
        assert configuration.uses_onednn(configuration.read([], bindings)) is expected


@pytest.mark.parametrize("value", ["1", "'off'", "None", "%fast", "@make_fruit"])
def test_what_is_looked_up_early_is_written_out(shipped, value):
    parsed = configuration.read([], [f"configure_tensorflow.onednn = {value}"])
    with pytest.raises(UserError, match=r"configure_tensorflow.onednn = .*True or False"):
        configuration.uses_onednn(parsed)


def test_loading_again_forgets_the_first(shipped):
    configuration.load(["dqn_cartpole"])
    configuration.load([], ["make_fruit.name = 'plum'", "make_fruit.core = 0"])
    assert make_fruit() == ("plum", 1.0, 3, None, 0)


def test_include_finds_files_beside_and_shipped_ones(shipped, tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    write(folder, "make_fruit.count = 9\n", "base.gin")
    path = write(folder, "include 'base.gin'\ninclude 'agents/dqn'\nmake_fruit.name = 'fig'\n")
    configuration.load([path])
    assert make_fruit() == ("fig", 2.5, 9, None, 1)


def test_references_macros_scopes_and_blocks():
    text = "\n".join(
        [
            "SIZE = 4",
            "make_fruit:",
            "  name = 'pear'",
            "  core = %SIZE",
            "make_fruit.basket = [@make_basket(), {'x': @big/make_basket()}]",
            "big/make_basket.size = %SIZE",
            "evaluation/make_fruit.count = -1",
        ]
    )
    configuration.load([], [text])
    assert make_fruit() == ("pear", 1.0, 3, [(2, "me"), {"x": (4, "me")}], 4)
    with gin.config_scope("evaluation"):
        assert make_fruit()[2] == -1


def test_unknown_configurable_names_place_and_nearest(tmp_path):
    path = write(tmp_path, "# Mine.\n\nmake_friut.count = 3\n")
    message = message_of(files=[path])
    assert f"{path}:3: no configurable is named 'make_friut'. Nearest: make_fruit" in message


@pytest.mark.parametrize(
    ("bindings", "told"),
    [
        (
            ["make_fruit.basket = [@make_bascet()]"],
            "--gin_bindings: no configurable is named 'make_bascet'. Nearest: make_basket",
        ),
        (["make_fruit.wieght = 1"], "make_fruit has no parameter 'wieght'. Nearest: weight."),
        (["make_fruit.zzz = 1"], "It has: name, weight, count, basket, core."),
        (["make_crate.paint = @Filler()"], "drop the parentheses"),  # it is called only to draw
        (
            ["make_basket.size = %SIZ", "SIZE = 3", "make_fruit.count = %SIZE"],
            "the macro %SIZ is not defined. Nearest: SIZE.",
        ),
        (
            ["SIZE = %OTHER", "OTHER = (1, %SIZE)", "make_fruit.count = %SIZE"],
            "the macros are circular: %SIZE -> %OTHER -> %SIZE",
        ),
        (["weight = 3"], "weight only defines a macro"),
        (["weight = 3"], "Write make_fruit.weight."),
        (["make_fruit.basket = true"], "true is written True: "),
        (
            ["make_fruit.basket = ['a', b]"],
            "cannot read `make_fruit.basket = ['a', b]`: b is not a Python literal",
        ),
        (["make_crate.extras = {[1]: 1}"], "cannot be the key of a dictionary"),
        (["import os"], "--gin_bindings: `import os` is refused"),
        (["import pipeline_of_another"], "is refused"),  # a name that merely begins like ours
    ],
)
def test_a_mistake_in_a_binding_is_named(bindings, told):
    assert told in message_of(*bindings)


def test_a_name_of_several_configurables_is_ambiguous():
    first, second = (
        gin.configurable("make_twin", module=module)(lambda size=1: size)
        for module in ("orchard.first", "orchard.second")
    )
    assert message_of("make_twin.size = 3") == (
        "--gin_bindings: 'make_twin' is ambiguous: write orchard.first.make_twin or "
        "orchard.second.make_twin."
    )
    configuration.load([], ["second.make_twin.size = 3"])
    assert (first(), second()) == (1, 3)


def test_a_parameter_that_the_program_sets():
    assert message_of("evaluation/make_basket.owner = 'you'") == (
        "--gin_bindings: evaluation/make_basket.owner cannot be bound: the program sets it."
    )
    assert message_of("make_basket.zzz = 1").endswith("It has: size.")


def test_a_parameter_that_a_flag_sets():
    assert message_of("make_crate.seed = 3").endswith(
        "make_crate.seed cannot be bound: use --seed."
    )
    message = message_of("seed = 3")
    assert "seed only defines a macro" in message and message.endswith("Write --seed.")


@pytest.mark.parametrize("parameter, index", [("slots", 0), ("layers", 1), ("limit", 2)])
def test_a_whole_number_written_as_a_float_becomes_one(parameter, index):
    configuration.load([], [f"make_crate.{parameter} = 2e4"])
    assert repr(make_crate()[index]) == "20000"
    assert repr(gin.query_parameter(f"make_crate.{parameter}")) == "20000"


@pytest.mark.parametrize("parameter", ["slots", "layers", "limit"])
@pytest.mark.parametrize("value", [0.5, True, "20", (1,)])
def test_what_is_no_whole_number_is_refused_where_one_is_needed(tmp_path, parameter, value):
    path = write(tmp_path, f"\nmake_crate.{parameter} = {value!r}\n")
    or_none = ", or None" if parameter == "limit" else ""
    assert message_of(files=[path]).endswith(
        f"mine.gin:2: make_crate.{parameter} = {value!r}: must be a whole number{or_none}."
    )


@pytest.mark.parametrize("value", [True, "0.99", (1,), None])
def test_what_is_no_number_is_refused_where_one_is_needed(value):
    message = message_of(f"make_crate.price = {value!r}")
    assert message.endswith(f"make_crate.price = {value!r}: must be a number.")


@pytest.mark.parametrize(
    "parameter, good, bad, wanted",
    [
        ("lid", [True, False], ["'False'", 0, None], "True or False"),
        ("label", ["'x'"], [5, None, "('x',)"], "text in quotes"),
        (
            "sizes",
            ["(64, 64)", "[64]"],
            [64, "'64'", None, "(64, 'a')", "(0.5,)", "[True]"],
            "a tuple of whole numbers",
        ),
        ("sealed", [None, True, False], ["'yes'", 1], "True or False, or None"),
        ("shares", ["(0.1, 1)", "()"], [0.1, "('a',)", None], "a tuple of numbers"),
        ("span", [None, "(-1, 1.0)"], [1.0, "(-1.0, 'a')", "'ab'"], "a pair of numbers"),
        ("cells", ["((1, 2, 3),)"], ["(1, 2, 3)", "((1, 0.5, 2),)"], "a tuple of (channels, "),
        ("fill", ["@make_fruit"], ["'make_fruit'", 5, None, "(1,)"], "a configurable reference"),
        ("paint", ["@make_fruit"], ["'make_fruit'", None], "a configurable reference"),
        ("extras", [None, "{'a': 1}"], ["'a'", 1, True], "a dictionary, or None"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_where_it_is_bound(parameter, good, bad, wanted):
    for value in good:
        configuration.load([], [f"make_crate.{parameter} = {value}"])
    for value in bad:
        message = message_of(f"make_crate.{parameter} = {value}")
        assert f"make_crate.{parameter} = {value}: must be {wanted}" in message
    is_called = wanted == "a configurable reference"
    configuration.load([], [f"make_crate.{parameter} = @make_fruit{'' if is_called else '()'}"])


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("pads", 1.5),
        ("pads", (0.5, 1.5)),
        ("grade", 2),
        ("stamp", "auto"),
        ("stamp", 0.5),
        ("owner", "me"),
        ("note", 3),
        ("steps", (1, 2)),
    ],
)
def test_what_an_annotation_does_not_rule_out_is_accepted(parameter, value):
    configuration.load([], [f"make_crate.{parameter} = {value!r}"])
    assert gin.query_parameter(f"make_crate.{parameter}") == value


def test_what_may_stand_for_a_whole_number_is_left_alone():
    bindings = ["N = 7", "make_crate.slots = %N", "make_crate.limit = None"]
    configuration.load([], [*bindings, "make_crate.price = 2.0"])
    assert [repr(value) for value in make_crate()] == ["7", "1", "None", "2.0"]
    configuration.load([], ["make_crate.layers = @make_pear()"])
    assert make_crate()[1] == 1


def test_whole_numbers_in_a_tuple_may_be_written_as_floats_too():
    configuration.load([], ["make_crate.sizes = (2e4, 3)"])
    assert repr(gin.query_parameter("make_crate.sizes")) == "(20000, 3)"


@pytest.mark.parametrize(
    "macro, value", [("N = 2e4", "%N"), ("N = 2e4", "(%N, 3)"), ("N = (2e4, 3)", "%N")]
)
def test_a_float_in_a_macro_is_no_whole_number(macro, value):
    parameter = "sizes" if "(" in macro + value else "slots"
    message = message_of(macro, f"make_crate.{parameter} = {value}")
    assert f"make_crate.{parameter} = {value}: must be a" in message
    assert "write 20000." in message or parameter == "sizes"


@pytest.mark.parametrize("maker", ["make_pear", "Pear", "big/make_pear"])
@pytest.mark.parametrize("parameter", ["fill", "paint"])
def test_what_is_to_be_called_is_not_called_where_it_is_bound(parameter, maker):
    message = message_of(f"make_crate.{parameter} = @{maker}()")
    assert message.endswith(f"= @{maker}(): drop the parentheses: write @{maker}.")
    assert "must be a configurable reference" in message_of(
        f"make_crate.{parameter} = %M", f"M = @{maker}()"
    )
    configuration.load([], [f"make_crate.{parameter} = @{maker}"])


@pytest.mark.parametrize("maker", ["make_filler", "make_fruit", "Filler"])
def test_what_returns_what_is_to_be_called_may_be_called(maker):
    configuration.load([], [f"make_crate.fill = @{maker}()", f"make_crate.wrap = @{maker}()"])


def test_a_function_is_refused_where_a_value_is_needed():
    for value in ("@make_pear", "@make_filler()"):
        assert message_of(f"make_crate.price = {value}").endswith(": must be a number.")
        assert message_of(f"make_crate.sizes = ({value},)").endswith("as in (64,).")
    configuration.load([], ["make_crate.price = @make_fruit()"])  # It does not say what it returns.


def test_a_macro_s_value_is_of_the_kind_too():
    assert message_of("make_crate.price = %P", "P = 1", "P = 'a'") == (
        "--gin_bindings: make_crate.price = %P: must be a number."
    )
    assert "a tuple of whole" in message_of("make_crate.sizes = (1, %N)", "N = %M", "M = 0.5")
    configuration.load([], ["make_crate.price = %P", "P = %Q", "Q = 2", "make_crate.sizes = (%Q,)"])


def test_what_belongs_to_tf_agents_is_refused():
    message = message_of("evaluation/BorrowedAgent.reward_scale = 2.0")
    assert "evaluation/BorrowedAgent.reward_scale cannot be bound, because" in message
    assert "Nearest" not in message_of("BorowedAgent.reward_scale = 2.0")


def test_what_belongs_to_tf_agents_is_not_told():
    configuration.load()
    make_basket()
    borrowed()
    assert "BorrowedAgent" in gin.operative_config_str()
    text = configuration.operative_config()
    assert "make_basket.size = 2" in text and "BorrowedAgent" not in text
    assert "make_basket.size = 2" in configuration.explain()
    assert "BorrowedAgent" not in configuration.explain()
    assert "BorrowedAgent" in gin.operative_config_str()  # gin's own record is unchanged
    configuration.load([], [text])


def test_a_constant_is_not_an_unknown_macro():
    configuration.load([], ["make_basket.size = %gin.REQUIRED"])


def test_missing_include(shipped, tmp_path):
    path = write(tmp_path, "\ninclude 'agents/dqm.gin'\n")
    message = message_of(files=[path])
    assert message.startswith(f"{path}:2: ") or message.startswith("mine.gin:2: ")
    assert "'agents/dqm.gin'. Nearest: agents/dqn" in message


def test_circular_include(tmp_path):
    first = write(tmp_path, "include 'b.gin'\n", "a.gin")
    write(tmp_path, "include 'a.gin'\n", "b.gin")
    assert "b.gin:1: 'a.gin' includes itself" in message_of(files=[first])


@pytest.mark.parametrize("value", ["Acrobot-v1", "ALE/Pong-v5", "my_envs:Maze-v0", "2048-v0", "x"])
def test_a_string_without_quotes_on_the_command_line(value):
    message = message_of(f"make_fruit.name={value}")
    assert f"strings need quotes, {value} has none" in message
    assert f"--gin_bindings=\"make_fruit.name='{value}'\"" in message
    is_name = value == "x"
    assert message.endswith("If it names a function or a class, write @x") is is_name


@pytest.mark.parametrize(
    ("value", "told"),
    [
        *((value, "write a finite number, or None") for value in ("inf", "nan", "-Infinity")),
        *((value, "write a decimal number") for value in ("1/3", "1e-3/2", "-1 / 3")),
    ],
)
def test_numbers_that_gin_cannot_read_need_no_quotes(value, told):
    message = message_of(f"make_crate.price = {value}")
    assert told in message and "strings need quotes" not in message


def test_a_string_without_quotes_in_a_file(tmp_path):
    path = write(tmp_path, "make_fruit:\n  count = 2\n  name = Acrobot-v1  # the two-link one\n")
    message = message_of(files=[path])
    assert message.startswith(f"{path}:3: ") and message.endswith("name = 'Acrobot-v1'")


@pytest.mark.parametrize(
    "text, reason",
    [
        ("make_fruit.count 5", "expected"),
        ("make_fruit.count = -%n", "only a number can follow a minus sign"),
        ("make_fruit.count = - @make_pear()", "only a number can follow a minus sign"),
        ("make_fruit.basket = (-%n, 1)", "only a number can follow a minus sign"),
        ("make_fruit.basket = {'a': -%n}", "only a number can follow a minus sign"),
        ("make_fruit.count = ", "Unable to parse value"),
        ("make_fruit.count = [1, 2", "left open"),
        ("make_fruit..count = True", "Malformatted"),
        ("make_fruit.count = 1e999", "cannot be written in gin"),
        ("make_fruit:\n    count = 1\n  name = 'x'", "unindent"),
    ],
)
def test_syntax_errors(text, reason):
    message = message_of(text)
    assert message.startswith("--gin_bindings: ") and reason in message


def test_a_minus_sign_before_a_number():
    configuration.load([], ["make_fruit.basket = (-5, - 0.5, -1e-3)"])
    assert gin.query_parameter("make_fruit.basket") == (-5, -0.5, -1e-3)


def test_the_line_is_that_of_the_text_editor(tmp_path):
    path = write(tmp_path, "# a\u2028name = relu\nmake_fruit.count = 5 steps\n")
    message = message_of(files=[path])
    assert "mine.gin:2: " in message and "relu" not in message


@gin.register(module="mine")
class Tree:
    @gin.register
    def ripen(self, days=1):
        return days


largest = gin.external_configurable(max, "largest", module="mine")


def test_a_method_is_named_with_its_class():
    message = message_of("ripen.days = 3")
    assert message.startswith("--gin_bindings: ") and "without class name" in message
    configuration.load([], ["Tree.ripen.days = 3"])


def test_a_function_written_in_c_may_be_bound():
    configuration.load([], ["largest.default = 3"])
    assert largest([]) == 3


def test_a_file_that_is_not_text(tmp_path):
    (tmp_path / "binary.gin").write_bytes(b"\xff\xfe\x00")
    assert "cannot read" in message_of(files=[str(tmp_path / "binary.gin")])


@pytest.mark.parametrize("statement", ["import side_effect", "from side_effect import x as y"])
def test_imports_from_elsewhere_are_refused_before_anything_runs(tmp_path, monkeypatch, statement):
    (tmp_path / "side_effect.py").write_text("raise RuntimeError('was run')\n")
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, f"make_fruit.count = 1\n{statement}\n", "inner.gin")
    path = write(tmp_path, "include 'inner.gin'\n")
    message = message_of(files=[path])
    assert "inner.gin:2" in message and "a gin file is code" in message
    assert "--allow_gin_imports" in message


def test_imports_from_elsewhere_when_allowed(tmp_path, monkeypatch):
    (tmp_path / "fine_module_of_mine.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = write(tmp_path, "import fine_module_of_mine\n")
    configuration.load([path], allow_imports=True)
    assert sys.modules["fine_module_of_mine"].value == 1
    assert "import fine_module_of_mine" in configuration.operative_config()


def test_dynamic_registration_is_refused_always():
    text = "from __gin__ import dynamic_registration"
    assert "is refused" in message_of(text)
    assert "is refused" in message_of(text, allow_imports=True)


def test_imports_of_this_package_have_no_effect(tmp_path):
    path = write(tmp_path, "import pipeline.where_it_was_in_an_earlier_release\n")
    configuration.load([path])
    assert "import" not in configuration.operative_config()


def test_an_unknown_module():
    message = message_of("import a_module_of_nobody", allow_imports=True)
    assert "there is no module 'a_module_of_nobody'." in message


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import a_module_that_is_not_there", "ModuleNotFoundError: No module named 'a_module_"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_with_the_reason(
    tmp_path, monkeypatch, text, error
):
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    path = write(tmp_path, "import broken\n")
    message = message_of(files=[path], allow_imports=True)
    assert message.startswith(f"{path}:1: import broken raised {error}")
    assert message.endswith(f"({tmp_path / 'broken.py'}:1)")


@pytest.mark.parametrize("value", ["007", "5 5"])
def test_a_number_that_python_does_not_read_needs_no_quotes(value):
    message = message_of(f"make_crate.slots = {value}")
    assert message.startswith("--gin_bindings: cannot read") and "'" not in message


@pytest.mark.parametrize("name", ["make_filler", "Pear", "make_pears"])
def test_what_returns_something_else_is_refused(name):
    message = message_of(f"make_crate.builds = @{name}")
    assert message.endswith(f"= @{name}: must return an object of the class Crate.")


def test_what_returns_what_is_needed_or_does_not_say_is_accepted():
    configuration.load([], ["make_crate.builds = @Crate"])
    configuration.load([], ["make_crate.builds = @make_crate_or_pear"])
    gin.external_configurable(lambda: [1], "says_nothing", module="mine")
    configuration.load([], ["make_crate.builds = @says_nothing"])


def test_explain_gives_every_value_its_place(shipped):
    bindings = [
        "make_fruit.count = 5",
        "evaluation/make_fruit.count = 6",
        "other/make_basket.size=1",
    ]
    configuration.load(["dqn_cartpole"], [*bindings, "SIZE = 4", "make_fruit.basket = %SIZE"])
    make_fruit()
    with gin.config_scope("evaluation"):
        make_fruit()
    used, unused = configuration.explain().split("\n\n# Bound, but not used in this run:\n")
    rows = dict(line.split("  # ") for line in used.splitlines() if line)
    places = {text.rstrip(): place for text, place in rows.items()}
    assert places["SIZE = 4"] == "--gin_bindings"
    assert places["make_fruit.name = 'apple'"] == "gin_configs/dqn_cartpole.gin:3"
    assert places["make_fruit.weight = 7"] == (
        "gin_configs/dqn_cartpole.gin:4 (overrides gin_configs/agents/dqn.gin:2)"
    )
    assert places["make_fruit.count = 5"] == "--gin_bindings"
    assert places["evaluation/make_fruit.count = 6"] == "--gin_bindings"
    assert places["evaluation/make_fruit.weight = 7"] == places["make_fruit.weight = 7"]
    assert unused == "other/make_basket.size  # --gin_bindings"
    assert len({line.index("  # ") for line in used.splitlines() if line}) == 1


def test_what_the_command_line_binds_and_nothing_reads_is_told(shipped, capsys):
    bindings = [
        "make_fruit.count = 5",  # read only outside the scope
        "evaluation/make_fruit.count = 6",
        "evalution/make_fruit.count = 7",
        "make_basket.size = %SIZE",
        "SIZE = 4",
        "make_crate.fill = @make_fruit",  # called, but not by make_crate
    ]
    configuration.load(["dqn_cartpole"], bindings)
    make_fruit()
    with gin.config_scope("evaluation"):
        make_fruit()
    typo = "evalution/make_fruit.count is not used here. Nearest: evaluation/make_fruit.count"
    message = configuration.ignored() or ""
    assert message.startswith("--gin_bindings: ") and typo in message
    assert " make_basket.size is not used here." in message
    assert " SIZE is not used here." in message
    assert " make_crate.fill is not used here." in message
    configuration.warn_of_ignored()
    assert capsys.readouterr().out == f"warning: {message}\n"


@pytest.mark.parametrize(
    ("binding", "target"),
    [
        ("make_fruit.count = 5", "make_fruit.count"),
        ("evaluation/make_fruit.count = 5", "evaluation/make_fruit.count"),
    ],
)
def test_what_is_bound_without_effect_is_told(shipped, binding, target):
    for bindings, is_told in (([binding], True), ([], False)):
        configuration.load(["dqn_cartpole"], bindings)
        configuration.without_effect[target] = "the basket has its own"
        with configuration.preserved():
            configuration.load([], [])
        message = f"{target} has no effect, because the basket has its own."
        assert configuration.warnings() == ([message] if is_told else [])


@pytest.mark.parametrize(
    "bindings",
    [
        ["plant.create_environment = @garden/make_fruit"],
        ["plant.create_environment = %A", "A = %B", "B = @garden/make_fruit"],
    ],
)
def test_an_environment_may_not_have_a_scope_that_would_replace_that_of_the_evaluation(bindings):
    assert "this scope would replace the scope evaluation" in message_of(*bindings)


def test_an_overridden_binding_may_not_stay_in_force_in_a_scope(tmp_path):
    repeated = "make_fruit.count = 7\nevaluation/make_fruit.count = 7\n"
    path = write(tmp_path, repeated)
    both = ["make_fruit.count = 5", "evaluation/make_fruit.count = 7"]
    with pytest.raises(UserError) as error:
        configuration.load([path], both[:1])
    assert str(error.value) == (
        "--gin_bindings: make_fruit.count = 5 would leave evaluation/make_fruit.count = 7 "
        f"({path}:2) in force. Bind evaluation/make_fruit.count, too."
    )
    configuration.load([path], both)
    configuration.load([path], ["make_fruit.count = 7"])
    configuration.load([write(tmp_path, repeated.replace("7", "6", 1))], both[:1])


def test_what_a_file_binds_may_go_unread_and_what_others_register_may_be_called_later(tmp_path):
    path = write(tmp_path, "other/make_basket.size = 7\nmake_basket.size = 1\n")
    gin.external_configurable(lambda weight=1: weight, "press", module="mine")
    configuration.load([path], ["make_fruit.count = 5", "press.weight = 2"])
    make_fruit("fig", core=1)
    assert configuration.ignored() is None and configuration.warnings() == []


@pytest.mark.parametrize(
    ("name", "label"),
    [("my.gin", "my.gin"), ("gin_configs/my.gin", "./gin_configs/my.gin")],
    ids=["a file", "in a folder named as the shipped one"],
)
def test_what_a_file_binds_and_no_run_could_read_is_told(tmp_path, monkeypatch, name, label):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gin_configs").mkdir()
    path = write(
        tmp_path,
        "evalution/make_fruit.count = 7\nevaluation/make_fruit.count = 6\nweight = 2.0\n"
        "SIZE = 1\nmake_basket.size = %SIZE\n",  # may be read by another run
        name,
    )
    configuration.load([path], ["make_fruit.name = 'fig'", "make_fruit.core = 1"])
    make_fruit()
    with gin.config_scope("evaluation"):
        make_fruit()
    assert configuration.warnings() == [
        f"{label}:1: evalution/make_fruit.count is not used here. Nearest: "
        "evaluation/make_fruit.count, evaluation/make_fruit.core, evaluation/make_fruit.name.",
        f"{label}:3: weight is not used here. Nearest: "
        "evaluation/make_fruit.weight, make_fruit.weight.",
    ]


def test_what_a_shipped_file_binds_and_others_override_is_not_told(shipped):
    (shipped / "dqn_cartpole.gin").write_text(
        "other/make_basket.size = 3\nmake_fruit.basket = @other/make_basket()\nSIZE = 1\n"
        "make_fruit.count = %SIZE\n"
    )
    overrides = ["make_fruit.basket = @make_basket()", "make_fruit.count = 2"]
    given = ["make_fruit.name = 'fig'", "make_fruit.core = 1"]
    configuration.load(["dqn_cartpole"], [*overrides, *given])
    make_fruit()
    assert configuration.warnings() == []


def test_the_operative_configuration_keeps_the_order_of_dictionaries(tmp_path):
    written = '{"up": {"z": 1, "a": 2}, "down": [({"d": 1, "c": 2},)], "noop": %SIZE}'
    given = [f"make_crate.extras = {written}", "SIZE = {'y': 1, 'x': 2}"]
    configuration.load([], given)
    make_crate()
    text = configuration.operative_config()
    configuration.load([write(tmp_path, text)])
    assert str(configuration.in_force("", "make_crate")["extras"]) == written.replace('"', "'")
    assert "SIZE = {'y': 1, 'x': 2}" in text


def test_what_is_bound_to_others_and_read_later_is_part_of_the_configuration():
    gin.external_configurable(lambda weight=1: weight, "later", module="mine")
    configuration.load([], ["later.weight = %SIZE", "SIZE = 3", "make_basket.size = 1"])
    text = configuration.operative_config()
    assert "later.weight = %SIZE" in text and "SIZE = 3" in text
    assert "make_basket" not in text


def test_explain_places_defaults_at_their_function():
    configuration.load()
    make_basket()
    line = make_basket.__wrapped__.__code__.co_firstlineno
    row = next(row for row in configuration.explain().splitlines() if "size" in row)
    assert row == f"make_basket.size = 2  # default (configuration_test.py:{line})"


def test_explain_tells_what_a_module_binds():
    configuration.load()
    gin.bind_parameter("make_basket.size", 3)
    make_basket()
    assert "make_basket.size = 3  # gin.bind_parameter" in configuration.explain()


def test_operative_config_loads_again_to_the_same(shipped, tmp_path):
    configuration.load(["dqn_cartpole"], ["make_fruit.basket = @big/make_basket()"])
    before = make_fruit()
    text = configuration.operative_config()
    configuration.load([write(tmp_path, text, "operative.gin")])
    assert make_fruit() == before
    assert configuration.operative_config() == text


def test_a_missing_required_parameter_is_told_with_its_flag(shipped):
    configuration.load()
    with pytest.raises(RuntimeError) as caught:
        make_fruit()
    assert configuration.explain_call_error(caught.value) == (
        "make_fruit.name and make_fruit.core have no values: add "
        '--gin_bindings="make_fruit.name=\'apple\'" --gin_bindings="make_fruit.core=1"'
    )


def test_a_missing_required_parameter_below_other_configurables(shipped):
    outer = gin.external_configurable(
        lambda: make_fruit(core=1), "outer", module="pipeline.orchard"
    )
    with pytest.raises(RuntimeError) as caught:
        outer()
    assert "In call to configurable" in str(caught.value)
    assert configuration.explain_call_error(caught.value) == (
        "make_fruit.name has no value: add --gin_bindings=\"make_fruit.name='apple'\""
    )


@gin.configurable(module="pipeline.orchard")
def peel(fruit, *, thickness=1):
    return fruit.name, thickness


def test_a_reference_that_is_called_too_early_is_told():
    configuration.load([], ["make_basket.size = @peel()"])
    with pytest.raises(TypeError) as caught:
        make_basket()
    assert configuration.explain_call_error(caught.value) == (
        "peel was called without 'fruit'. Bind this parameter, or write @peel instead of @peel() "
        "if it is to be called later."
    )


@pytest.mark.parametrize(
    "bindings",
    [
        ["make_basket.size = @a/make_basket()"],
        ["make_basket.size = @b/make_basket()", "b/make_basket.size = %M", "M = @make_basket()"],
    ],
)
def test_references_that_call_each_other_are_told(bindings):
    configuration.load([], bindings)
    with gin.config_scope("a"), pytest.raises(RecursionError) as caught:
        make_basket()
    message = configuration.explain_call_error(caught.value) or ""
    assert message.startswith("the call of make_basket needs its own result, because a parameter")


def test_an_error_inside_a_function_is_not_explained_away():
    configuration.load()
    careless = gin.external_configurable(
        lambda fruit=None: peel.__wrapped__(), "careless", module="mine"
    )
    with pytest.raises(TypeError) as caught:
        careless()
    assert configuration.explain_call_error(caught.value) is None


def test_a_user_error_loses_what_gin_added():
    configuration.load([], ["make_basket.size = -3"])
    with pytest.raises(UserError) as caught:
        make_basket()
    assert "In call to configurable" in str(caught.value)
    message = configuration.explain_call_error(caught.value)
    assert message == "make_basket.size is -3: it must be positive."


def test_other_errors_are_not_explained_away():
    assert configuration.explain_call_error(RuntimeError("out of memory")) is None
    assert configuration.explain_call_error(RecursionError("too deep")) is None


def test_a_binding_that_is_not_utf_8_is_named():
    with pytest.raises(UserError, match="--gin_bindings.* it is not UTF-8"):
        configuration.read([], ["train.num_env_steps = 1", "create_dqn_agent.x = '\udce4'"])
