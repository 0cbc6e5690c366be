"""Runs the tests of `cluster_cases` in a process of their own."""

import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.parametrize("marks", ["not crash", pytest.param("crash", marks=pytest.mark.crash)])
def test_clusters(marks):
    """Ray changes the process that uses it: signal handlers, child processes, open files."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-m",
    ]
    ended = subprocess.run(
        [*command, marks, str(ROOT / "tests/benchmarks/cluster_cases.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ended.returncode == 0, ended.stdout[-5_000:]
