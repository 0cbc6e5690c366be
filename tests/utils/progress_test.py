import io
import os
import pty
import re
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from pipeline.utils import progress

RECORD = {
    "env_steps": 12_500,
    "env_steps_per_second": 1234.4,
    "return_mean_100": 123.45,
    "evaluation_return_mean": 200.0,
    "epsilon": 0.05,
    "environment_share": 0.41,
    "policy_share": 0.2,
    "update_share": 0.35,
}
PROGRAM = """
from pipeline.utils import progress
with progress.Progress(400) as shown:
    shown.update({"env_steps": 100, "return_mean_100": 12.0})
    shown.message("saved a checkpoint")
    shown.update({"env_steps": 200})
"""


class Clock:
    def __init__(self) -> None:
        self.seconds = 50.0

    def __call__(self) -> float:
        return self.seconds


def panel(width: int, record: dict[str, Any], *args: Any, num_env_steps: int = 50_000) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    clock = Clock()
    with progress.Progress(num_env_steps, console=console, clock=clock) as shown:
        shown.update({"env_steps": 0})
        clock.seconds += 10.0
        shown.update(record, *args)
        rendered = console.render_lines(shown, pad=False)
    return ["".join(segment.text for segment in line) for line in rendered]


def plain(clock: Clock, **kwargs: Any) -> tuple[progress.Progress, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, width=40, force_terminal=False)
    return progress.Progress(50_000, console=console, clock=clock, **kwargs), file


@pytest.mark.parametrize(
    ("phase", "steps", "is_shown"),
    [
        (progress.EVALUATING, 12_400, True),
        (progress.EVALUATING, 999, False),
        (progress.TRAINING, 12_400, False),
    ],
)
def test_a_long_episode_of_an_evaluation_is_shown(phase: str, steps: int, is_shown: bool) -> None:
    _, body = panel(80, RECORD | {"episode_steps": steps}, phase)
    assert body.startswith("an episode of 12,400 steps so far") == is_shown


def test_panel_at_80_columns() -> None:
    head, body = panel(80, RECORD)
    assert re.fullmatch(
        r"training  [━╸╺ ]{10,40}  12,500/50,000 steps  25%  1,234 steps/s  0:30 left", head
    )
    assert body == "return 123.5  evaluation 200.0  epsilon 0.050  env 41% policy 20% update 35%"


@pytest.mark.parametrize("width", [20, 30, 40, 60, 80, 120])
@pytest.mark.parametrize("phase", [progress.TRAINING, progress.WARMING_UP])
def test_panel_is_two_lines_at_any_width(width: int, phase: str) -> None:
    record = {**RECORD, "env_steps": 12_345_678, "evaluation_return_mean": -12345.6}
    lines = panel(width, record, phase, num_env_steps=50_000_000)
    assert len(lines) == 2
    assert max(map(len, lines)) <= width


def test_least_important_fields_go_first() -> None:
    head, body = panel(60, {**RECORD, "entropy": 1.5})
    assert head.endswith("12,500/50,000 steps  0:30 left")
    assert body == "return 123.5  evaluation 200.0  epsilon 0.050  entropy 1.500"
    assert panel(40, RECORD)[1] == "return 123.5  evaluation 200.0"
    assert panel(20, RECORD)[1] == "return 123.5"


def test_fields_without_a_value_are_absent() -> None:
    assert panel(80, {"env_steps": 0, "return_mean_100": None})[0].endswith("0/50,000 steps  0%")
    assert len(panel(80, {"env_steps": 0, "return_mean_100": None})) == 1


def test_phase_with_a_count_of_its_own() -> None:
    head, body = panel(80, RECORD, progress.EVALUATING, (3, 10))
    assert re.fullmatch(r"evaluating  [━╸╺ ]{40}  3/10  30%", head)
    assert body.startswith("return 123.5")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3661, "1:01:01"), (90_000, "1d 1h")],
)
def test_time_left(seconds: float, text: str) -> None:
    record = {"env_steps": 4, "env_steps_per_second": 100.0}
    head = panel(120, record, num_env_steps=10)[0]  # after 10 s
    assert head.endswith("4/10 steps  40%  100 steps/s  0:15 left")
    assert progress.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12_345.67, "12,346"), (2_000.0, "2,000"), (-229.34, "-229.3"), (10.04, "10.0"),
        (9.98, "9.98"), (5.0, "5.0"),
        (-1.25, "-1.25"), (0.955, "0.955"), (0.04, "0.040"), (0.0, "0.0"), (float("nan"), "nan"),
    ],
)  # fmt: skip
def test_small_scores_have_more_decimals(value: float, text: str) -> None:
    assert progress.score_text(value) == text


def test_the_warm_up_tells_neither_the_time_left_nor_the_shares() -> None:
    head, body = panel(120, RECORD, progress.WARMING_UP)
    assert head.endswith("12,500/50,000 steps  25%  1,234 steps/s")
    assert body == "return 123.5  evaluation 200.0  epsilon 0.050"


def test_the_time_left_counts_evaluations_and_begins_after_the_warm_up() -> None:
    clock = Clock()
    shown, file = plain(clock, plain_interval=0)
    with shown:
        for phase, steps, seconds in (
            (progress.WARMING_UP, 10_000, 1),
            (progress.TRAINING, 10_000, 0),
            (progress.TRAINING, 20_000, 10),
            (progress.EVALUATING, 20_000, 10),
            (progress.TRAINING, 30_000, 10),
            (progress.TRAINING, 50_000, 10),
        ):
            clock.seconds += seconds
            shown.update({"env_steps": steps, "env_steps_per_second": 1e6}, phase)
    left = re.findall("([0-9:]+) left", file.getvalue())
    assert left == ["0:30", "0:30"]  # 30,000 more at 10,000 in 10 s; 20,000 at 20,000 in 30 s


def test_many_runs_have_counts_and_a_time_left_but_no_speed() -> None:
    head, body = panel(80, {"env_steps": 4, "counts": "1 running, 2 left"}, num_env_steps=10)
    assert head.endswith("4/10 steps  40%  0:15 left")  # after 10 s
    assert body == "1 running, 2 left"


def test_values_stay_until_they_change() -> None:
    clock = Clock()
    shown, file = plain(clock, plain_interval=0)
    shown.update({"env_steps": 100, "evaluation_return_mean": 5.0})
    shown.update({"evaluation_return_mean": None, "epsilon": 0.5})
    assert file.getvalue().splitlines() == [
        "training: 100/50,000 steps  0%  evaluation 5.0",
        "training: 100/50,000 steps  0%  evaluation 5.0  epsilon 0.500",
    ]


def test_plain_lines_come_at_once_then_at_intervals_then_at_the_end() -> None:
    clock = Clock()
    shown, file = plain(clock, plain_interval=10)
    lines = []
    with shown:
        for second in range(0, 26, 5):
            clock.seconds = 50.0 + second
            shown.update({"env_steps": second})
            lines.append(len(file.getvalue().splitlines()))
    assert lines == [1, 1, 2, 2, 3, 3]
    assert file.getvalue().splitlines()[-1] == "training: 25/50,000 steps  0%  13:52:55 left"
    shown.close()
    assert len(file.getvalue().splitlines()) == 4


def test_the_first_plain_line_of_a_phase_does_not_wait() -> None:
    shown, file = plain(Clock())
    shown.update({}, progress.WARMING_UP, (0, 10))
    shown.update({}, progress.WARMING_UP, (5, 10))
    shown.update({"env_steps": 1})
    shown.message("saved\na checkpoint")
    assert file.getvalue().splitlines() == [
        "warming up the replay buffer: 0/10  0%",
        "training: 1/50,000 steps  0%",
        "saved",
        "a checkpoint",
    ]


def test_plain_lines_are_not_wrapped() -> None:
    clock = Clock()
    shown, file = plain(clock)  # 40 columns
    shown.update({"env_steps": 0})
    clock.seconds += 10.0
    shown.update(RECORD)
    assert file.getvalue().splitlines(keepends=True)[1] == (
        "training: 12,500/50,000 steps  25%  1,234 steps/s  0:30 left  return 123.5"
        "  evaluation 200.0  epsilon 0.050  env 41% policy 20% update 35%\n"
    )


def test_a_pipe_gets_neither_colours_nor_carriage_returns() -> None:
    environment = {**os.environ, "FORCE_COLOR": "1"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, check=True, env=environment
    )
    assert run.stdout.decode().split("\n") == [
        "training: 100/400 steps  25%  return 12.0",
        "saved a checkpoint",
        "training: 200/400 steps  50%  0:00 left  return 12.0",
        "",
    ]


def run_in_terminal(**environment: str) -> str:
    controller, terminal = pty.openpty()
    base = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "TERM")}
    base |= {"TERM": "xterm-256color", "COLUMNS": "80", **environment}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=terminal, env=base)
    os.close(terminal)
    output = b""
    try:
        while data := os.read(controller, 4096):
            output += data
    except OSError:  # raised on Linux when the other end is closed
        pass
    finally:
        os.close(controller)
    assert process.wait(timeout=10) == 0
    return output.decode()


def test_terminal_gets_a_panel_in_colour_and_its_cursor_back() -> None:
    output = run_in_terminal()
    assert "\x1b[36m━" in output
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")
    assert output.index("saved a checkpoint") < output.rindex("200/400 steps")


def test_no_color_is_respected() -> None:
    output = run_in_terminal(NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", output)
    assert "200/400 steps" in output


def test_dumb_terminal_gets_plain_lines() -> None:
    output = run_in_terminal(TERM="dumb")
    assert "\x1b" not in output
    assert output.startswith("training: 100/400 steps")
