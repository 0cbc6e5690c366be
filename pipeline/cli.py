"""Starts every binary, and reports a user's mistake as one message on standard error.

Exit codes: 0 for success; 2 for a user's mistake (flags, configuration, files); 75 for a
RetryableError; 128 + n if signal n ended or stopped the program; 1 if parts of a benchmark failed,
or, with a traceback, for a bug.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import io
import os
import pathlib
import shlex
import signal
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TextIO, cast

from absl import app, flags

if sys.platform != "linux":  # Modules that are imported below are missing elsewhere.
    print(
        "error: this program runs on Linux only. On Windows, use WSL 2; on macOS, use a Linux "
        "container for x86-64.",
        file=sys.stderr,
    )
    sys.exit(2)

from pipeline import configuration
from pipeline.configuration.statements import Binding, Import
from pipeline.utils import errors, files
from pipeline.utils.tensorflow_import import import_tensorflow

# Modules of which an environment's package may have installed another version.
_REPLACED = ("ale_py", "gin", "gymnasium", "numpy", "tensorflow", "tf_agents", "tf_keras")

flags.disclaim_key_flags()  # `define_path` defines flags of the binary, not of this module.


def program(main: Callable[[Sequence[str]], int | None]) -> Callable[[], NoReturn]:
    """Makes a program of `main`, as a decorator; see `run`."""
    return functools.partial(run, main)


def run(main: Callable[[Sequence[str]], int | None]) -> NoReturn:
    """Calls `absl.app.run(main)` with the messages and exit codes of this module.

    Args:
      main: Function that takes a list with the program's name and returns the exit code, where
        None means 0. A UserError that it raises is shown as its message.
    """
    _open_streams()
    # absl describes __main__ and its flags, but an installed command is another module than main's.
    module = sys.modules[main.__module__]
    sys.modules["__main__"].__doc__ = module.__doc__
    flags.adopt_module_key_flags(module)
    stdout = sys.stdout
    try:
        with (
            contextlib.redirect_stdout(cast(TextIO, _Output(stdout))),
            contextlib.redirect_stderr(cast(TextIO, _Expendable(sys.stderr))),
        ):
            app.run(functools.partial(_call, main), flags_parser=_parse_flags)
    except _OutputError as error:
        _discard(stdout)
        if isinstance(error.error, BrokenPipeError):
            # The program that reads the output, such as head, has ended.
            sys.exit(128 + signal.SIGPIPE)
        _fail(f"cannot write to standard output: {error.error.strerror}", errors.RETRY_CODE)
    raise AssertionError("app.run does not return")


def _call(main: Callable[[Sequence[str]], int | None], argv: Sequence[str]) -> int | None:
    """Returns the exit code of `main`. Exits with the message of an error of the user."""
    try:
        code = main(argv)
        sys.stdout.flush()
        return code
    except ImportError as error:
        name = _before_gin(error).name or ""
        package = name.partition(".")[0]
        is_missing = isinstance(error, ModuleNotFoundError)
        if package in ("", "pipeline") or not (is_missing or package in _REPLACED):
            raise
        reason = errors.without_gin(error)
        what = "is not installed" if is_missing else f"cannot be used ({reason})"
        _fail(
            f"{name} {what} in {sys.executable}. Install this package again with "
            "everything in requirements.txt."
        )
    except errors.UserError as error:
        _fail(configuration.explain_call_error(error) or str(error), error.exit_code)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        message = configuration.explain_call_error(error)
        cause = _outer_cause(error) if message is None else errors.UserError(message)
        if cause is None:
            raise
        _fail(str(cause), cause.exit_code)
    finally:
        # Nothing is left to interrupt, so Ctrl-C while Python exits needs no traceback.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _before_gin(error: Any) -> Any:
    """Returns the exception that gin has replaced by one with a longer message, or `error`.

    Gin's exceptions have the class of the first one, but no `errno` or `name`.
    """
    while "augment_exception_message" in type(error).__init__.__qualname__:
        error = error.__context__
    return error


def _outer_cause(error: Exception) -> errors.UserError | None:
    """Returns an error about a folder or a disk, if that may explain `error`."""
    error = _before_gin(error)
    if isinstance(error, OSError) and error.errno in files.PASSING:
        return errors.RetryableError(f"{error.filename or 'this machine'}: {error.strerror}")
    try:
        os.getcwd()
    except FileNotFoundError:
        return errors.UserError("the working folder was deleted: change to another one.")
    if isinstance(error, OSError):
        try:
            tempfile.gettempdir()
        except FileNotFoundError:
            return errors.WriteError(
                "no temporary folder can be written to: free space on its disk, or set the "
                "environment variable TMPDIR to a folder that can."
            )
    return None


def _open_streams() -> None:
    """Replaces streams that the parent process has closed, and lets any text be printed.

    Otherwise the next file to be opened would be taken for the closed stream.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _parse_flags(argv: Sequence[str]) -> list[str]:
    try:
        remaining = flags.FLAGS(argv)
    except flags.UnrecognizedFlagError as error:
        _fail(_unrecognized(error.flagname))
    except (flags.Error, ValueError) as error:  # absl's own flags raise ValueError
        _fail(str(error))
    except SystemExit:
        # Only the --help flags exit while flags are parsed, and absl's exit code means failure.
        sys.stdout.flush()
        sys.exit(0)
    # app.run would raise a default verbosity to INFO, and TensorFlow would log every checkpoint.
    flags.FLAGS["verbosity"].using_default_value = False
    if len(remaining) > 1:
        _fail(f"unexpected argument {remaining[1]!r}: flags are written --name=value")
    return remaining


def _unrecognized(name: str) -> str:
    names = [flag for flag in flags.FLAGS if flag.startswith(name) and len(name) > 1]
    names += difflib.get_close_matches(name, flags.FLAGS, n=3, cutoff=0.7)
    nearest = " or ".join(f"--{flag}" for flag in dict.fromkeys(names))
    hint = f"did you mean {nearest}?" if nearest else "--help lists the flags"
    return f"unknown flag --{name}; {hint}"


def _fail(message: str, code: int = errors.USER_ERROR_CODE) -> NoReturn:
    in_colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    label = "\x1b[1;31merror:\x1b[0m" if in_colour else "error:"
    with contextlib.suppress(OSError):  # On a full disk, the exit code still reports the failure.
        print(f"{label} {message}", file=sys.stderr, flush=True)
    sys.exit(code)


@contextlib.contextmanager
def expendable_output() -> Iterator[None]:
    """Ignores write errors of standard output, such as a full disk or a closed pipe.

    This is for programs whose results are files. Output that cannot be written is lost.
    """
    stdout = sys.stdout
    try:
        with contextlib.redirect_stdout(cast(TextIO, _Expendable(stdout))):
            yield
    finally:
        try:
            stdout.flush()
        except (OSError, _OutputError):
            _discard(stdout)


def _discard(file: TextIO) -> None:
    """Discards what is left in the file's buffer, which Python would fail to write at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


class _OutputError(Exception):
    """Raised if standard output cannot be written.

    It is no OSError itself, so that nobody takes it for the error of another file. The OSError is
    an attribute, because gin drops the causes of exceptions.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror)
        self.error = error


class _Output:
    """Wraps a text file, and converts its write errors to `_OutputError`."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        with self._handling_errors():
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with self._handling_errors():
            self._file.flush()

    @contextlib.contextmanager
    def _handling_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _OutputError(error) from error


class _Expendable(_Output):
    """Wraps a text file, and ignores its write errors."""

    @contextlib.contextmanager
    def _handling_errors(self) -> Iterator[None]:
        with contextlib.suppress(OSError, _OutputError):
            yield


class _PathParser(flags.ArgumentParser):
    """Parses a path and refuses one that is empty or cannot be accessed.

    Whether the path must exist is checked by the code that reads it.
    """

    syntactic_help = "a path"

    def parse(self, argument: str) -> str:
        if not argument:  # of a shell's variable that is not set
            raise ValueError("it is empty")
        path = os.path.expanduser(argument)  # Shells do not expand --root_dir=~/runs.
        if "://" in path:
            raise ValueError("it is an address; give a folder of this machine, or mount the other")
        try:
            path.encode()
        except UnicodeEncodeError as error:
            raise ValueError("it is not UTF-8") from error
        try:
            is_folder = stat.S_ISDIR(os.stat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return path
        except OSError as error:
            if error.errno in files.PASSING:
                return path
            raise ValueError(error.strerror) from error
        if is_folder and not os.access(path, os.X_OK):  # Its files cannot be accessed.
            raise ValueError(os.strerror(errno.EACCES))
        return path


def define_path(name: str, default: str | None, description: str) -> flags.FlagHolder:
    """Defines a flag for the path of a file or a folder, where `~` is the user's home."""
    return flags.DEFINE(_PathParser(), name, default, description)


def define_paths(name: str, description: str) -> flags.FlagHolder:
    """Defines a flag like `define_path`, which may be given several times."""
    serializer: flags.ArgumentSerializer[str] = flags.ArgumentSerializer()
    return flags.DEFINE_multi(_PathParser(), serializer, name, [], description)


def load_tensorflow(statements: Sequence[Import | Binding]) -> None:
    """Imports TensorFlow, which takes seconds, with the kernels that gin statements choose.

    Raises:
      UserError: If TensorFlow cannot be used; see `import_tensorflow`.
    """
    print("loading TensorFlow ...", flush=True)
    import_tensorflow(configuration.uses_onednn(statements), freeze=True)


def python_command() -> str:
    """Returns the command that starts the running Python from the current folder, for a shell."""
    executable = pathlib.Path(sys.executable)
    with contextlib.suppress(FileNotFoundError, ValueError):  # deleted, or not above the executable
        executable = executable.relative_to(pathlib.Path.cwd())
    return shlex.quote(str(executable))
