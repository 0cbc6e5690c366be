"""Tests that the files and commands of docs/tutorials/ work, in the order of each page."""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, user_environment

PAGES = {  # pages, and the files in runs/ that they promise
    "environment": ["seek_dqn/result.json", "seek_ppo/result.json", "seek.mp4"],
    "network": ["residual/result.json"],
    "agent": ["reinforce/result.json"],
    "suite": ["my_suite/report.html", "cartpole.png", "seek_suite/report.md"],
    "tuning": ["my_search/report.html", "best/result.json"],
}
# Trainings are shortened, to the end of DQN's warm-up, suites have one seed, searches two trials.
PYTHON = """
python() {
    if [[ "$*" == *--search=* ]]; then
        set -- "$@" --trials=2
    fi
    if [[ $2 == pipeline.train || "$*" == *--suite=* ]]; then
        set -- "$@" --gin_bindings="train.num_env_steps = 1_024"
        set -- "$@" --gin_bindings="train.num_final_episodes = 2"
    fi
    if [[ "$*" == *--suite=* ]]; then
        set -- "$@" --seeds=1
    fi
    command python "$@"
}
"""
PATH = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"


@pytest.mark.parametrize("page", PAGES)
def test_the_files_and_commands_of_a_page_work(page, tmp_path):
    """Runs a page with the files of the pages to which it links."""
    environment = user_environment(PATH=PATH, PYTHONPATH=str(ROOT))
    links = re.findall(r"\]\((\w+)\.md", read(page))
    parts = [part for linked in links for part in blocks(linked) if part[0] != "bash"]
    for language, block in parts + blocks(page):
        if language == "bash":
            command = ["bash", "-e", "-c", PYTHON + block]
            subprocess.run(command, cwd=tmp_path, env=environment, check=True)
        elif name := re.match(r"# (\w+\.\w+)", block):  # other blocks are excerpts
            (tmp_path / name[1]).write_text(block)
    missing = [path for path in PAGES[page] if not (tmp_path / "runs" / path).is_file()]
    assert not missing


def read(page):
    path = ROOT / f"docs/tutorials/{page}.md"
    return path.read_text() if path.is_file() else ""


def blocks(page):
    return re.findall(r"^```(bash|python|gin)\n(.*?)^```", read(page), re.MULTILINE | re.DOTALL)
