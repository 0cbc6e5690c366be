"""Tests that the commands of committed runs still have the configuration that the runs had."""

import json
import pathlib
import shlex

import pytest
from conftest import ROOT

from pipeline import configuration
from pipeline.configuration.statements import Binding, Source, scan, value_of
from pipeline.utils.errors import UserError

# Configs that no longer exist, or were never shipped.
GONE = {"a3c_pong", "impala_pong", "sac_pong/seed1"}
# Runs from before their configs bound something else. The pages give their commands with these
# bindings.
IN_FLOAT32 = "encoder_precision.policy = 'float32'"
OLDER = {
    **{f"dqn_pong_fast/seed{n}": IN_FLOAT32 for n in (1, 2, 3)},
    "dqn_pong_fast_bfloat16/float32_seed1": IN_FLOAT32,
    "sac_pong/without_normalisation": "create_encoder.layers = None",
}


def committed():
    folders = (ROOT / "docs" / "results").rglob("run.json")
    return sorted(path.parent.relative_to(ROOT / "docs" / "results").as_posix() for path in folders)


def values(statements):
    """Returns the bound values by name, with macros replaced."""
    found = {x.short_name: x.value for x in statements if isinstance(x, Binding)}
    return {name: repr(value_of(value, found)) for name, value in found.items()}


def of_command(folder: pathlib.Path, added=()):
    """Returns the values that the command of a run binds today."""
    command = shlex.split(json.loads((folder / "run.json").read_text())["command"])
    flags = [flag.partition("=")[::2] for flag in command if flag.startswith("--gin_")]
    files, bindings = (
        [value for name, value in flags if name == x] for x in ("--gin_file", "--gin_bindings")
    )
    return values(configuration.read(files, [*bindings, *added]))


@pytest.mark.parametrize("name", committed())
def test_the_command_of_a_committed_run_gives_its_configuration(name):
    folder = ROOT / "docs" / "results" / name
    if name in GONE:
        with pytest.raises(UserError, match="no gin file or shipped config is named"):
            of_command(folder)
        return
    if not (config := folder / "operative_config.gin").exists():
        pytest.skip("it was trained by a version whose configuration is not kept")
    had = values(scan(Source.read(config), allow_imports=True))
    now = of_command(folder, [OLDER[name]] if name in OLDER else [])
    both = had.keys() & now.keys()
    assert len(both) > 20
    assert {x: now[x] for x in both} == {x: had[x] for x in both}
