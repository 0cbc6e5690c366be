"""Starts `python -m MODULE` as forks of a process that has already imported TensorFlow.

An import takes more than two seconds of processor time, and tests start about 150 programs. The
parent process runs no TensorFlow operation before it forks, so TensorFlow has not started any
threads. A fork differs from a fresh process in two respects. TensorFlow reads some environment
variables when it is imported; here, oneDNN is disabled, also if a gin binding enables it. And all
forks have the same random seed of Python's hashes, so that sets of strings have the same order in
all of them. Tests of the start-up and of resuming use `subprocess.Popen`.
"""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from multiprocessing import forkserver, reduction
from typing import Any
from unittest import mock

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["preloaded_modules"])
_WITHOUT_ONEDNN = {"TF_ENABLE_ONEDNN_OPTS": "0"}


class Popen(subprocess.Popen):
    """`subprocess.Popen` for commands that begin with [sys.executable, "-m", module]."""

    _process: Any
    _close_pipe_fds: Any  # of the base class

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
        creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest
    ):  # fmt: skip
        del executable, preexec_fn, close_fds, pass_fds, startupinfo, creationflags, shell, rest
        assert args[:2] == [sys.executable, "-m"]
        ends = [p2cread, c2pwrite, errwrite]
        files = [fd if fd == -1 else reduction.DupFd(fd) for fd in ends]
        arguments = args[2:], str(cwd or os.getcwd()), dict(os.environ if env is None else env)
        self._process = _CONTEXT.Process(target=_run, args=(*arguments, *files))
        # Before Python 3.14, the process that is forked does not get the paths of this one.
        paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
        with mock.patch.dict(os.environ, paths | _WITHOUT_ONEDNN):
            forkserver.ensure_running()
        self._process.start()
        self.pid = self._process.pid
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _internal_poll(self, *_, **__):
        if self.returncode is None:
            self.returncode = self._process.exitcode
        return self.returncode

    def _wait(self, timeout):
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def send_signal(self, sig):
        if self.poll() is None:
            os.kill(self.pid, sig)


def _run(arguments, folder, environment, stdin, stdout, stderr):
    for file, number in ((stdin, 0), (stdout, 1), (stderr, 2)):
        if file != -1:
            fd = file.detach()
            os.dup2(fd, number)
            if fd != number:
                os.close(fd)
    buffering = 1 if "PYTHONUNBUFFERED" in environment else -1
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, closefd=False)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(_WITHOUT_ONEDNN | environment)
    time.tzset()
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder, *filter(None, paths)]
    sys.argv = list(arguments)
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
