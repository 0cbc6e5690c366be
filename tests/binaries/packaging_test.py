"""Tests of the package as pip installs it, outside the repository."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, user_environment


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Returns a folder with the files that `pip install .` puts into site-packages."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("pipeline", "gin_configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("installed")
    # This interpreter's dependencies and setuptools are used: nothing is downloaded.
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", target]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, source], check=True)
    return target


@pytest.fixture
def run(installed, tmp_path):
    """Returns a function that runs Python in an empty folder with only the installed package."""

    def run_python(*arguments: str) -> str:
        environment = user_environment(PYTHONPATH=str(installed))
        command = [sys.executable, *arguments]
        result = subprocess.run(
            command, cwd=tmp_path, env=environment, text=True, capture_output=True
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run_python


def names_in(folder: Path, pattern: str) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob(pattern)}


def test_every_module_and_config_is_installed(installed):
    assert names_in(installed / "pipeline", "*.py") == names_in(ROOT / "pipeline", "*.py")
    configs = names_in(installed / "pipeline" / "gin_configs", "*.gin")
    assert configs == names_in(ROOT / "gin_configs", "*.gin")
    pretrained = names_in(installed / "pipeline" / "pretrained", "*")
    assert pretrained == names_in(ROOT / "pipeline" / "pretrained", "*")
    assert pretrained
    assert {"dqn_cartpole.gin", "agents/dqn.gin"} <= configs


def test_every_data_file_is_installed(installed):
    files = names_in(installed / "pipeline", "data/*")
    assert files == names_in(ROOT / "pipeline", "data/*")
    assert "benchmarks/data/atari_scores.csv" in files


def test_benchmarks_find_their_suites_and_scores_in_the_installed_package(run):
    code = """
from pipeline.benchmarks import suites
from pipeline.benchmarks.published_scores import human_score, random_score
print(suites.load("smoke").name, random_score("pong") < human_score("pong"))
"""
    assert run("-c", code) == "smoke True\n"


def test_shipped_configs_are_found_in_the_installed_package(installed, run):
    code = """
import json
from pipeline import configuration
names = [name for name, _ in configuration.list_configs()]
print(json.dumps({name: str(configuration.find_config(name)) for name in names}))
"""
    found = json.loads(run("-c", code))
    folder = installed / "pipeline" / "gin_configs"
    assert found and all(Path(path) == folder / f"{name}.gin" for name, path in found.items())


def test_the_installed_program_trains(run, tmp_path):
    bindings = [
        "initialize_replay_buffer.num_env_steps = 100",
        "train.num_env_steps = 200",
        "train.num_final_episodes = 1",
    ]
    flags = ["--gin_file=dqn_cartpole", *(f"--gin_bindings={x}" for x in bindings)]
    run("-m", "pipeline.train", f"--root_dir={tmp_path / 'run'}", *flags)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["updates"] > 0


def test_pip_finds_nothing_amiss_but_requirements_of_tf_agents_that_it_does_not_need():
    check = subprocess.run(
        [sys.executable, "-m", "pip", "check"], text=True, stdout=subprocess.PIPE, check=False
    )
    versions = {
        name: importlib.metadata.version(name)
        for name in ("tensorflow-probability", "typing-extensions")
    }
    assert check.stdout.splitlines() == [
        "tf-agents 0.19.0 requires gym, which is not installed.",
        "tf-agents 0.19.0 requires pygame, which is not installed.",
        *(
            f"tf-agents 0.19.0 has requirement {required}, but you have {name} {versions[name]}."
            for name, required in (
                ("tensorflow-probability", "tensorflow-probability~=0.23.0"),
                ("typing-extensions", "typing-extensions==4.5.0"),
            )
        ),
    ]


def test_every_requirement_is_pinned_and_the_developers_pins_are_the_users_and_more():
    pins, more = (
        set((ROOT / name).read_text().splitlines())
        for name in ("requirements.txt", "requirements-dev.txt")
    )
    assert pins < more
    assert all("==" in pin.partition(";")[0] and "/" not in pin for pin in more)


def test_every_command_describes_its_own_flags(installed, run):
    (distribution,) = importlib.metadata.distributions(path=[str(installed)])
    commands = {point.name: point.value for point in distribution.entry_points}
    assert {"pipeline-train", "pipeline-evaluate", "pipeline-benchmark"} <= commands.keys()
    for name, value in commands.items():
        module, function = value.split(":")
        code = f"import sys; sys.argv[:] = ['{name}', '--help']; from {module} import {function}"
        text = run("-c", f"{code}; {function}()")
        source = (installed / f"{module.replace('.', '/')}.py").read_text()
        title = source.strip('"').splitlines()[0].strip('"')
        assert title in text
        first_flag = re.search(r'(?:DEFINE_|define_)\w+\(\s*"(\w+)"', source)
        assert first_flag and f"{first_flag[1]}: " in text, f"{value}: {text}"
