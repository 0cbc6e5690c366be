"""Tests that the schedule and the loss that the algorithms' pages define can be bound."""

import re

import pytest
from conftest import ROOT

from pipeline import configuration
from pipeline.training.train_loop import train
from pipeline.utils.shutdown import StopSignal


@pytest.mark.usefixtures("any_config")
@pytest.mark.parametrize(
    ("page", "module", "config"),
    [("index", "my_schedules", "ppo_cartpole"), ("dqn", "my_losses", "dqn_cartpole")],
)
def test_a_function_of_a_page_can_be_bound(page, module, config, tmp_path, monkeypatch):
    text = (ROOT / f"docs/algorithms/{page}.md").read_text()
    (code,) = re.findall(rf"```python\n(# {module}\.py\n.*?)```", text, re.DOTALL)
    (bindings,) = re.findall(rf"```gin\n(import {module}\n.*?)```", text, re.DOTALL)
    (tmp_path / f"{module}.py").write_text(code)
    (tmp_path / "own.gin").write_text(f"include '{config}.gin'\n{bindings}")
    monkeypatch.syspath_prepend(tmp_path)
    configuration.load([str(tmp_path / "own.gin")], [], allow_imports=True)
    train(None, 1, "fail", StopSignal(), dry_run=True)
    assert all(line in configuration.explain() for line in re.findall(r"@\w+", bindings))
