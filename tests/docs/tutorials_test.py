"""Tests that the files and commands of docs/tutorials/ work, in the order of each page."""

import re
import shlex

import pytest
from conftest import ROOT, run_binary, user_environment

PAGES = {  # pages, and the files in runs/ that they promise
    "environment": ["seek_dqn/result.json", "seek_ppo/result.json", "seek.mp4"],
    "network": ["residual/result.json"],
    "agent": ["reinforce/result.json"],
    "suite": ["my_suite/report.html", "cartpole.png", "seek_suite/report.md"],
    "tuning": ["my_search/report.html", "best/result.json"],
}


@pytest.mark.parametrize("page", PAGES)
def test_the_files_and_commands_of_a_page_work(page, tmp_path):
    """Runs a page with the files of the pages to which it links."""
    links = re.findall(r"\]\((\w+)\.md", read(page))
    parts = [part for linked in links for part in blocks(linked) if part[0] != "bash"]
    for language, block in parts + blocks(page):
        if language == "bash":
            for command in block.replace("\\\n", "").strip().splitlines():
                run(command, tmp_path)
        elif name := re.match(r"# (\w+\.\w+)", block):  # other blocks are excerpts
            if "search." in block:  # a tenth of the steps; rungs stay multiples of the interval
                block = re.sub(r"\b(\d+)_000\b", r"\g<1>00", block)
            (tmp_path / name[1]).write_text(block)
    missing = [path for path in PAGES[page] if not (tmp_path / "runs" / path).is_file()]
    assert not missing


def run(command, folder):
    """Runs a command of a page, with less to do.

    Trainings are shortened, to the end of DQN's warm-up, and evaluations to two episodes; suites
    have one seed, searches one trial, whose length is in their file.
    """
    python, flag, module, *flags = shlex.split(command)
    assert (python, flag) == ("python", "-m")
    is_suite = any(flag.startswith("--suite=") for flag in flags)
    if module == "pipeline.train" or is_suite:
        flags.append("--gin_bindings=train.num_env_steps = 1_024")
        flags.append("--gin_bindings=train.num_final_episodes = 2")
    flags += ["--seeds=1", "--experiments=*-[CS]*"] * is_suite  # CartPole and Seek, not Acrobot
    flags += ["--trials=1"] * (module == "pipeline.tune")
    flags += ["--num_episodes=2"] * (module == "pipeline.evaluate")
    name = module.removeprefix("pipeline.")
    environment = user_environment(PYTHONPATH=str(ROOT))
    ended = run_binary(name, *flags, cwd=folder, env=environment)
    assert ended.returncode == 0, ended.stderr


def read(page):
    path = ROOT / f"docs/tutorials/{page}.md"
    return path.read_text() if path.is_file() else ""


def blocks(page):
    return re.findall(r"^```(bash|python|gin)\n(.*?)^```", read(page), re.MULTILINE | re.DOTALL)
