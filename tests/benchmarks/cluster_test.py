"""Runs the tests of `cluster_cases` in a process of their own."""

import subprocess
import sys

import preloaded
import pytest
from conftest import ROOT


@pytest.mark.parametrize("marks", ["not crash", pytest.param("crash", marks=pytest.mark.crash)])
def test_clusters(marks):
    """Ray changes the process that uses it: signal handlers, child processes, open files."""
    flags = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marks]
    process = preloaded.Popen(
        [sys.executable, "-m", "pytest", *flags, str(ROOT / "tests/benchmarks/cluster_cases.py")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output[-5_000:]
