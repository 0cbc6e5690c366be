import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from conftest import ROOT
from waiting import wait_for

from pipeline.utils import shutdown

# The main thread stays inside C code, as in a long graph call.
IN_C = """
import ctypes, sys
from pipeline.utils import shutdown
libpthread = ctypes.CDLL(None)
with shutdown.StopSignal() as stop:
    lock = ctypes.create_string_buffer(128)
    libpthread.sem_init(lock, 0, 0)
    print("ready", flush=True)
    libpthread.sem_wait(lock)  # for ever: SA_RESTART begins it again after a signal
"""

POLLING = """
import sys, time
from pipeline.utils import shutdown
with shutdown.StopSignal() as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("saved", flush=True)
sys.exit(128 + stop.signal)
"""

FORKING = """
import multiprocessing, os, signal, sys, time
from pipeline.utils import shutdown
context = multiprocessing.get_context("fork")
started = context.Event()
def work():
    started.set()
    time.sleep(60)
with shutdown.StopSignal() as stop:
    child = context.Process(target=work)
    child.start()
    assert started.wait(10)
    os.kill(child.pid, signal.SIGINT)
    child.join(0.5)
    assert child.exitcode is None
    child.terminate()
    child.join(10)
    assert child.exitcode == -signal.SIGTERM, child.exitcode
    time.sleep(0.2)
    assert not stop.requested
"""


def start(program: str, *command: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [*command, sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Tests may run without a terminal, where SIGHUP is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def wait_for_message(process: subprocess.Popen) -> None:
    assert process.stderr is not None
    assert process.stderr.readline() == shutdown.MESSAGE + "\n"


@pytest.mark.parametrize("number", shutdown.SIGNALS)
def test_first_signal_lets_the_program_finish(number: signal.Signals) -> None:
    process = start(POLLING)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=10)
    assert process.returncode == 128 + number
    assert stdout == "saved\n"
    assert stderr == shutdown.MESSAGE + "\n"


def test_nohup_lets_a_program_go_on() -> None:
    process = start(POLLING, "nohup")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=10)[0] == "saved\n"
    assert process.returncode == 143


def test_the_end_of_a_terminal_is_no_second_signal_however_often_it_is_told() -> None:
    process = start(IN_C)
    for _ in range(2):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.6)
    assert process.poll() is None
    process.kill()
    process.wait()


def test_second_signal_is_not_kept_waiting_by_a_frozen_terminal() -> None:
    fill = "import os\nother = os.open(os.ttyname(1), os.O_WRONLY | os.O_NONBLOCK)\n"
    fill += "try:\n    while True: os.write(other, b'x' * 4096)\nexcept BlockingIOError: pass\n"
    program = IN_C.replace(
        'print("ready", flush=True)', f"exec({fill!r})\n    os.write(2, b'ready')"
    )
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert process.stderr.read(5) == b"ready"
    process.send_signal(signal.SIGINT)
    time.sleep(0.6)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 130
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_ends_a_program_inside_c_code(number: signal.Signals) -> None:
    process = start(IN_C)
    process.send_signal(signal.SIGINT)
    wait_for_message(process)
    time.sleep(0.6)
    assert process.poll() is None
    before = time.monotonic()
    process.send_signal(number)
    assert process.wait(timeout=10) == 128 + number
    assert time.monotonic() - before < 2


def test_echo_of_the_first_signal_is_not_a_second() -> None:
    process = start("from pipeline.utils import shutdown\nshutdown.ECHO_SECONDS = 60\n" + IN_C)
    process.send_signal(signal.SIGTERM)
    wait_for_message(process)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.6)
    assert process.poll() is None
    process.kill()
    process.wait()


def test_second_signal_is_not_kept_waiting_by_blocked_output() -> None:
    fill = "import os, sys\nos.set_blocking(2, False)\n"
    fill += "try:\n    while os.write(2, b'x' * 4096): pass\nexcept BlockingIOError: pass\n"
    fill += "os.set_blocking(2, True)\n"
    process = start(fill + IN_C)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 130


def test_forked_child_neither_stops_its_parent_nor_sees_ctrl_c() -> None:
    subprocess.run([sys.executable, "-c", FORKING], cwd=ROOT, check=True, timeout=60)


def test_restores_handlers_and_descriptor(capfd: pytest.CaptureFixture[str]) -> None:
    received: list[int] = []

    def handler(number: int, frame: object) -> None:
        received.append(number)

    before = signal.signal(signal.SIGTERM, handler), signal.getsignal(signal.SIGINT)
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    fd_before = signal.set_wakeup_fd(writer)
    try:
        with shutdown.StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(lambda: stop.requested, 5)
            assert stop.signal == signal.SIGTERM
            assert received == []
        assert signal.getsignal(signal.SIGTERM) is handler
        assert signal.getsignal(signal.SIGINT) is before[1]
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]
        assert os.read(reader, 10) == bytes([signal.SIGTERM])
    finally:
        assert signal.set_wakeup_fd(fd_before) == writer
        signal.signal(signal.SIGTERM, before[0])
        os.close(reader)
        os.close(writer)
    assert shutdown.MESSAGE in capfd.readouterr().err


def test_other_signals_are_not_requests() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        with shutdown.StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_for(lambda: received == [signal.SIGUSR1], 5)
        assert not stop.requested
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_handlers_that_foreign_code_replaces_are_put_back() -> None:
    with shutdown.StopSignal():
        before = [signal.getsignal(number) for number in shutdown.SIGNALS]
        with pytest.raises(KeyError), shutdown.kept_handlers():
            for number in shutdown.SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            raise KeyError
        assert [signal.getsignal(number) for number in shutdown.SIGNALS] == before


FOREIGN = """
import asyncio, ctypes, os, signal, sys, time
from pipeline.utils import shutdown
def by_python():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
def by_c():
    ctypes.CDLL(None).signal(15, None)
def by_a_loop():
    loop = asyncio.new_event_loop()
    loop.add_signal_handler(signal.SIGTERM, print)
    loop.close()
with shutdown.StopSignal() as stop:
    with shutdown.kept_handlers():
        {name}()
    os.kill(os.getpid(), signal.SIGTERM)
    end = time.monotonic() + 20
    while not stop.requested and time.monotonic() < end:
        time.sleep(0.01)
    print(stop.requested)
"""


@pytest.mark.parametrize("name", ["by_python", "by_c", "by_a_loop"])
def test_a_signal_is_a_request_although_foreign_code_has_taken_it(name: str) -> None:
    program = [sys.executable, "-c", FOREIGN.format(name=name)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done.stderr


def test_handlers_that_the_main_thread_sets_meanwhile_are_left_alone() -> None:
    errors: list[ValueError] = []
    entered, replaced = threading.Event(), threading.Event()

    def build() -> None:
        try:
            with shutdown.kept_handlers():
                entered.set()
                replaced.wait(30)
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    entered.wait(30)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    replaced.set()
    thread.join()
    assert signal.signal(signal.SIGTERM, before) == signal.SIG_IGN
    assert not errors


def test_outside_the_main_thread_nothing_is_installed() -> None:
    handlers = [signal.getsignal(number) for number in shutdown.SIGNALS]
    inside: list[object] = []

    def use() -> None:
        with shutdown.StopSignal() as stop:
            inside.append((stop.requested, [signal.getsignal(n) for n in shutdown.SIGNALS]))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert inside == [(False, handlers)]
