import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pipeline.benchmarks.status import (
    FAILED,
    FINISHED,
    LEFT,
    RUNNING,
    STATES,
    RunStatus,
    Status,
    line,
    seconds_left,
)

RUNS = [
    RunStatus(FINISHED, "a", 100, 104, 10.4),
    RunStatus(RUNNING, "a", 100, 50, 5.0),
    RunStatus(FAILED, "a", 100),
    RunStatus(LEFT, "b", 1000),
]
STATUSES = st.builds(
    RunStatus,
    st.sampled_from(STATES),
    st.sampled_from("abc"),
    st.integers(1, 1000),
    st.integers(0, 1100),
    st.floats(0, 1e6),
)


def test_time_left():
    # a takes 0.1 s a step and has 50 left; b has not been measured, and is taken for as fast.
    assert seconds_left(RUNS, 1) == pytest.approx(5 + 100)
    # A run cannot be split: b's 100 s remain.
    assert seconds_left(RUNS, 2) == pytest.approx(100)
    slow = RunStatus(RUNNING, "b", 1000, 10, 20.0)
    assert seconds_left([*RUNS, slow], 1) == pytest.approx(5 + 2000 + 1980)


def test_nothing_is_known_before_the_first_steps():
    assert seconds_left([RunStatus(RUNNING, "a", 100), RunStatus(LEFT, "a", 100)], 1) is None
    assert seconds_left([RunStatus(FAILED, "a", 100)], 1) is None


@given(st.lists(STATUSES, max_size=8), st.integers(1, 4))
def test_time_left_is_sound(runs, workers):
    left = seconds_left(runs, workers)
    if left is None:
        assert not any(run.env_steps and run.seconds for run in runs)
        return
    alone = seconds_left(runs, 1)
    assert alone is not None and 0 <= left <= alone * (1 + 1e-9)
    assert left >= alone / workers * (1 - 1e-9)
    if all(run.state in (FINISHED, FAILED) for run in runs):
        assert left == 0


def test_line():
    expected = "1 finished  1 running  1 failed  1 left  11% of 1,300 steps"
    assert line(RUNS, 1) == f"{expected}  1:45 to go"
    assert line(RUNS, 2) == f"{expected}  1:40 to go"
    over = [RunStatus(FINISHED, "a", 100, 104, 10.0)]
    assert line(over, 1) == "1 finished  0 running  0 failed  0 left  100% of 100 steps"


def show(console: Console, clock, times, **kwargs) -> None:
    with Status("smoke", 1, console=console, clock=clock, plain_interval=60.0) as status:
        for seconds, text in times:
            clock.seconds = seconds
            if text:
                status.message(text)
            status.show(RUNS, **kwargs)


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_plain_lines_come_once_a_minute_and_when_a_run_ends():
    file = io.StringIO()
    console = Console(file=file, width=40, force_terminal=False)
    show(console, Clock(), [(1, "a begins"), (59, None), (61, None), (62, None)])
    text = f"smoke: {line(RUNS, 1)}"
    assert file.getvalue().splitlines() == ["a begins", text]
    show(console, Clock(), [(1, None)], at_once=True)
    assert file.getvalue().splitlines() == ["a begins", text, text]


@pytest.mark.parametrize("width", [30, 200])
def test_a_terminal_has_one_line(width):
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    show(console, Clock(), [(1, None), (2, "dqn ended"), (3, None)])
    shown = [text.rpartition("\x1b[2K")[2].rstrip() for text in file.getvalue().split("\n")]
    expected = f"smoke: {line(RUNS, 1)}"
    fitting = expected if width > 100 else expected[: width - 1] + "…"
    assert {text for text in shown if "smoke" in text} == {fitting}
    assert "dqn ended" in shown
