import os
import pty
import re
import signal
import subprocess
import sys

import pytest

from pipeline import cli

PROGRAM = """
'''Says hello.'''
import atexit, errno, os, signal, sys, tempfile
import gin
from absl import flags
from pipeline import cli
from pipeline.utils import errors, progress
NAME = cli.define_path("root_dir", None, "Folder of the run.")
NUMBER = flags.DEFINE_integer("num_episodes", 3, "Episodes.", lower_bound=1)
@gin.configurable
def print_all():
    print("x" * 100_000)
@gin.configurable
def raises(error):
    raise error
def main(argv):
    if NAME.value == "missing":
        raise errors.UserError("no folder 'missing'; make it")
    if NAME.value == "defect":
        raise RuntimeError("a defect")
    if NAME.value == "interrupt":
        # A shell starts background jobs with SIGINT ignored, and so, perhaps, these tests.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGINT)
    if NAME.value == "late":
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit.register(os.kill, os.getpid(), signal.SIGINT)
    if NAME.value == "expendable":
        with cli.expendable_output(), progress.Progress(2) as shown:
            print("begins", flush=True)
            shown.message("goes on")
            shown.update({"env_steps": 1})
            print("x" * 100_000)
    elif NAME.value == "temporary":
        def find():
            raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")
        tempfile.gettempdir = find
        tempfile.mkdtemp()
    elif NAME.value == "relative":
        os.path.abspath("x")
    elif NAME.value == "missing module":
        import not_installed
    elif NAME.value == "other version":
        from gin import not_in_this_version
    elif NAME.value == "noted":
        print("note: " + "x" * 100_000, file=sys.stderr, flush=True)
        print("ran on")
    elif NAME.value == "configurable":
        print_all()
    elif NAME.value == "module in gin":
        raises(ModuleNotFoundError("No module named 'not_installed'", name="not_installed"))
    elif NAME.value == "disk in gin":
        raises(OSError(errno.EIO, "Input/output error", "weights"))
    elif NAME.value == "shown":
        progress.Progress(2).message("x" * 100_000)
    else:
        print("ran", NAME.value, NUMBER.value, flush=True)
    return 143 if NAME.value == "stopped" else None
cli.run(main)
"""


def run(*arguments: str, program: str = PROGRAM, **kwargs) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **kwargs)


def assert_fails(arguments: list[str], message: str) -> None:
    ended = run(*arguments)
    assert ended.stderr == f"error: {message}\n"
    assert ended.stdout == ""
    assert ended.returncode == 2


def test_success_and_the_exit_code_of_main() -> None:
    ended = run("--root_dir=x", "--num_episodes=5")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ran x 5\n", "")
    assert run("--root_dir=stopped").returncode == 143


def test_ctrl_c_while_python_winds_up_shows_no_traceback() -> None:
    ended = run("--root_dir=late")
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "ran late 3\n", "")


def closed_pipe() -> int:
    read, write = os.pipe()
    os.close(read)
    return write


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize("output", [closed_pipe, full_disk])
@pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}])
def test_what_cannot_be_shown_ends_no_program_whose_results_are_files(output, environment):
    command = [sys.executable, "-c", PROGRAM, "--root_dir"]
    ways = {"stdout": output(), "stderr": subprocess.PIPE, "env": os.environ | environment}
    ended = subprocess.run([*command, "expendable"], **ways, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, b"")
    os.close(ways["stdout"])


@pytest.mark.parametrize(
    ("output", "code", "message"),
    [
        (closed_pipe, 128 + signal.SIGPIPE, b""),
        (full_disk, 75, b"error: cannot write to standard output: No space left on device\n"),
    ],
)
@pytest.mark.parametrize(
    "flag",
    ["--root_dir=x", "--root_dir=shown", "--root_dir=configurable", "--help", "--helpfull"],
)
def test_output_that_is_the_result_must_be_written(output, code, message, flag):
    stdout = output()
    command = [sys.executable, "-c", PROGRAM, flag]
    ended = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, timeout=60)
    assert (ended.returncode, ended.stderr) == (code, message)
    os.close(stdout)


def test_what_is_shown_is_shown_where_it_may_be_lost():
    ended = run("--root_dir=expendable")
    assert ended.stdout.startswith("begins\ngoes on\ntraining: 1/2 steps  50%\nxxx")
    assert len(ended.stdout) > 100_000


def test_a_user_error_that_cannot_be_shown_keeps_its_exit_code():
    command = [sys.executable, "-c", PROGRAM, "--root_dir=missing"]
    assert subprocess.run(command, stderr=full_disk(), timeout=60).returncode == 2


def test_a_note_that_cannot_be_shown_ends_no_program():
    command = [sys.executable, "-c", PROGRAM, "--root_dir=noted"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=full_disk(), timeout=60)
    assert (ended.returncode, ended.stdout) == (0, b"ran on\n")


def test_closed_streams_change_no_exit_code():
    for name, code in (("expendable", 0), ("missing", 2)):
        command = ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, "-c", PROGRAM]
        assert subprocess.run([*command, f"--root_dir={name}"], timeout=60).returncode == code


def test_text_that_the_output_cannot_encode_is_escaped():
    shown = run("--root_dir=±", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (shown.returncode, shown.stdout) == (0, "ran \\xb1 3\n")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("gs://bucket/x", "it is an address"),
        (b"b\xff", "it is not UTF-8"),
        ("", "it is empty"),  # of a shell's variable that is not set
    ],
)
def test_a_path_that_is_none_of_this_machine_is_refused(path, reason):
    command = [sys.executable, "-c", PROGRAM, "--root_dir", path]
    ended = subprocess.run(command, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, b"")
    assert reason.encode() in ended.stderr


def test_a_folder_whose_files_cannot_be_accessed_is_refused(tmp_path):
    path = tmp_path / "private"
    path.mkdir()
    program = PROGRAM.replace("cli.run", "os.access = lambda path, mode: False; cli.run")
    ended = run(f"--root_dir={path}", program=program)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "--root_dir" in ended.stderr and "Permission denied" in ended.stderr


def test_a_current_folder_that_was_deleted_is_no_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert cli.python_command() == sys.executable


@pytest.mark.parametrize("place", ["missing module", "module in gin"])
def test_a_module_that_is_not_installed_is_named(place: str) -> None:
    message = f"not_installed is not installed in {sys.executable}. Install this package again "
    assert_fails([f"--root_dir={place}"], message + "with everything in requirements.txt.")


def test_an_error_of_the_disk_keeps_its_exit_code_in_gin() -> None:
    ended = run("--root_dir=disk in gin")
    assert (ended.returncode, ended.stdout) == (75, "")
    assert ended.stderr == "error: weights: Input/output error\n"


def test_a_module_of_another_version_is_named() -> None:
    """Another package may have replaced, for example, gymnasium by an older version."""
    ended = run("--root_dir=other version")
    assert (ended.returncode, ended.stdout) == (2, "")
    message = r"error: gin cannot be used \(.*'not_in_this_version'.*\) in .*\. Install this "
    assert re.match(message, ended.stderr)


def test_other_systems_than_linux_are_refused() -> None:
    program = "import sys; sys.platform = 'darwin'; sys.modules['fcntl'] = None\n" + PROGRAM
    ended = run(program=program)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: this program runs on Linux only. ")


def test_a_working_folder_that_was_deleted_is_told(tmp_path) -> None:
    deleted = f"os.chdir({str(tmp_path)!r}); os.rmdir({str(tmp_path)!r}); cli.run(main)"
    ended = run("--root_dir=relative", program=PROGRAM.replace("cli.run(main)", deleted))
    assert ended.returncode == 2
    assert ended.stderr == "error: the working folder was deleted: change to another one.\n"


def test_temporary_folders_that_cannot_be_written_to_are_told() -> None:
    ended = run("--root_dir=temporary")
    assert ended.returncode == 75
    assert re.fullmatch("error: no temporary folder can be .* TMPDIR .*\\n", ended.stderr)


def test_user_error_is_its_message() -> None:
    assert_fails(["--root_dir=missing"], "no folder 'missing'; make it")


def test_defect_keeps_its_traceback() -> None:
    ended = run("--root_dir=defect")
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr
    assert "RuntimeError: a defect" in ended.stderr


def test_interrupt_outside_a_stop_signal() -> None:
    ended = run("--root_dir=interrupt")
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + signal.SIGINT, "", "")


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("root_dri", "did you mean --root_dir?"),
        ("num", "did you mean --num_episodes?"),
        ("xyzzy", "--help lists the flags"),
    ],
)
def test_unknown_flag_names_the_nearest(flag: str, hint: str) -> None:
    assert_fails([f"--{flag}=x"], f"unknown flag --{flag}; {hint}")


def test_bad_flag_value_is_named() -> None:
    ended = run("--num_episodes=0")
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: flag --num_episodes=0: ")
    assert ended.stderr.count("\n") == 1


def test_bad_value_of_absls_own_flag_is_named() -> None:
    ended = run("--stderrthreshold=loud")
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ") and "loud" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_path_may_begin_in_the_user_s_home() -> None:
    ended = run("--root_dir=~/runs")
    assert ended.stdout == f"ran {os.path.expanduser('~')}/runs 3\n"


def test_a_path_that_cannot_be_looked_at_is_named() -> None:
    name = "x" * 300
    assert_fails([f"--root_dir={name}"], f"flag --root_dir={name}: File name too long")


def test_positional_argument_is_refused() -> None:
    assert_fails(["runs/x"], "unexpected argument 'runs/x': flags are written --name=value")


def test_help_succeeds() -> None:
    ended = run("--help")
    assert ended.returncode == 0
    assert "--root_dir: Folder of the run." in ended.stdout


@pytest.mark.parametrize(
    ("no_color", "label"), [("", "\x1b[1;31merror:\x1b[0m "), ("1", "error: ")]
)
def test_label_is_red_on_a_terminal(no_color: str, label: str) -> None:
    controller, terminal = pty.openpty()
    command = [sys.executable, "-c", PROGRAM, "--root_dir=missing"]
    process = subprocess.Popen(command, stderr=terminal, env={**os.environ, "NO_COLOR": no_color})
    assert process.wait(timeout=60) == 2
    os.close(terminal)
    assert os.read(controller, 1000).decode() == f"{label}no folder 'missing'; make it\r\n"
    os.close(controller)


def test_python_is_named_as_the_user_would_type_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    assert cli.python_command() == ".venv/bin/python"
    monkeypatch.chdir("/")
    assert cli.python_command() == str(tmp_path / ".venv" / "bin" / "python").lstrip("/")
    monkeypatch.setattr(sys, "executable", "/my programs/python")
    monkeypatch.chdir(tmp_path)
    assert cli.python_command() == "'/my programs/python'"
