"""Vectors of environments in this thread, in a thread of their own, and in processes."""

import asyncio
import ctypes
import faulthandler
import functools
import multiprocessing
import os
import pickle
import random
import re
import resource
import signal
import sqlite3
import sys
import threading
import time
from typing import Any

import gymnasium
import numpy as np
import pytest
import tensorflow as tf
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import RecordEpisodeStatistics
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_environments import PlainEnv
from tiny_benchmarks import is_alive
from waiting import wait_for

from pipeline.environments import process_vector, thread_vector
from pipeline.environments.process_vector import ProcessDied, ProcessVector
from pipeline.environments.single_env import describe
from pipeline.environments.sync_vector import SyncVector
from pipeline.environments.thread_vector import ThreadVector
from pipeline.environments.vectors import GymnasiumVector
from pipeline.utils.errors import UserError


def in_thread(makes):
    return ThreadVector(lambda: SyncVector(makes))


VECTORS = {"sync": SyncVector, "thread": in_thread, "processes": ProcessVector}
each_vector = pytest.mark.parametrize("vector_class", VECTORS.values(), ids=VECTORS)


def run(vector, num_steps=12, num_envs=2):
    """Returns the outcomes of steps that follow a reset; closes the vector."""
    try:
        first = vector.reset(list(range(num_envs)))
        return first, [vector.step(np.ones(num_envs, np.int64)) for _ in range(num_steps)]
    finally:
        vector.close()


@st.composite
def environments(draw):
    """Draws a class of environments that may have a fault."""
    dtype = np.dtype(draw(st.sampled_from(["float16", "float32", "float64", "uint8", "int64"])))
    space = Box(0, 100, draw(st.sampled_from([(), (1,), (2, 3)])), dtype.type)
    sent = np.dtype(draw(st.sampled_from(["float16", "float32", "uint8", "int64"])))
    fault = draw(st.sampled_from([None, "shape", "reward", "raise", "four", "info"]))
    fault_at = draw(st.integers(0, 7))

    class DrawnEnv(PlainEnv):
        observation_space = space

        def observe(self):
            shape = (7,) if self.has("shape") else space.shape
            return (100 * self.np_random.uniform(0, 1, shape)).astype(sent)

        def has(self, name):
            return fault == name and self.time == fault_at

        def step(self, action):
            observation, reward, terminated, truncated, info = super().step(action)
            if self.has("raise"):
                raise SimulatorError(7, "joint 3")
            if self.has("four"):
                return observation, reward, terminated, info
            reward = "much" if self.has("reward") else reward
            return observation, reward, terminated, truncated, None if self.has("info") else info

    return DrawnEnv


class SimulatorError(Exception):
    """Cannot be pickled, because its constructor takes other arguments than its message."""

    def __init__(self, code, where):
        super().__init__(f"{code} at {where}")
        self.lock = threading.Lock()


def outcomes(vector_class, env_class):
    """Returns the arrays of a run, or the message of its failure."""
    vector = vector_class([env_class] * 2)
    try:
        first, steps = run(vector)
    except Exception as error:
        return str(error) if isinstance(error, UserError) else describe(error)
    return [*first, *(array for step in steps for array in [*step.observation, *step[1:4]])]


@given(environments())
@settings(max_examples=20)
def test_all_vectors_give_the_same_rows_and_messages(env_class):
    expected = outcomes(SyncVector, env_class)
    for vector_class in (in_thread, ProcessVector):
        found = outcomes(vector_class, env_class)
        if isinstance(expected, str):
            assert found == expected
            continue
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype


@each_vector
def test_a_broken_pipe_of_the_environment_is_its_own(vector_class):
    class BrokenEnv(PlainEnv):
        def step(self, action):
            raise BrokenPipeError("the simulator")

    with pytest.raises(Exception, match="the simulator"):
        run(vector_class([BrokenEnv] * 2))


@each_vector
def test_an_exception_names_the_line_of_the_environment(vector_class):
    class FailingEnv(PlainEnv):
        def step(self, action):
            raise SimulatorError(7, "joint 3")

    with pytest.raises(TypeError):
        pickle.dumps(SimulatorError(7, "joint 3"))
    with pytest.raises(Exception, match="7 at joint 3") as error:
        run(vector_class([FailingEnv] * 2))
    assert re.fullmatch(
        rf"SimulatorError: 7 at joint 3 \({__file__}:\d+, in step\)", describe(error.value)
    )


@each_vector
@pytest.mark.parametrize(
    ("method", "result", "message"),
    [
        ("step", lambda self: (self.observe(), 1.0, False, {}), "step() returned 4 values"),
        ("step", lambda self: None, "step() returned None"),
        ("step", lambda self: (self.observe(), "x", False, False, {}), "the reward 'x' is not"),
        ("step", lambda self: (self.observe(), [1.0, 2.0], False, False, {}), "is not a number"),
        ("step", lambda self: (np.zeros(2), 1.0, False, False, {}), "has the shape (2,)"),
        ("step", lambda self: (np.zeros(3, "c8"), 1.0, False, False, {}), "dtype complex64"),
        ("step", lambda self: (self.observe(), "1.0", False, False, {}), "the reward '1.0' is not"),
        (
            "step",
            lambda self: (self.observe(), 1.0, None, False, {}),
            "terminated = None, ",
        ),
        ("step", lambda self: (self.observe(), 1.0, "False", False, {}), "terminated = 'False'"),
        ("step", lambda self: (self.observe(), 1.0, 0.3, False, {}), "neither True nor False"),
        (
            "step",
            lambda self: (self.observe(), 1.0, False, {"x": 1}, False),
            "truncated = {",
        ),
        ("step", lambda self: exit(3), "step() called sys.exit()"),
        (
            "step",
            lambda self: ((self.observe(), {}), 1.0, False, False, {}),
            "not an array; its space is",
        ),
        ("reset", lambda self: np.zeros(3, np.float32), "reset() returned no dictionary of info"),
        ("reset", lambda self: (self.observe(), 0.0), "reset() returned no dictionary of info"),
    ],
)
def test_another_interface_is_refused_by_name(vector_class, method, result, message):
    class OddEnv(PlainEnv):
        pass

    setattr(OddEnv, method, lambda self, *args, **kwargs: result(self))
    with pytest.raises(UserError, match=re.escape(message)) as error:
        run(vector_class([OddEnv] * 2))
    assert "OddEnv" in str(error.value) and __file__ in str(error.value)


@pytest.mark.parametrize("shape", [(2,), (3,), ()])
def test_a_reset_without_info_is_named_also_if_gymnasium_takes_it_apart(shape):
    class OldEnv(PlainEnv):
        observation_space = gymnasium.spaces.Box(-1.0, 1.0, shape, np.float32)

        def reset(self, *, seed=None, options=None):
            return np.zeros(shape, np.float32)[()]

    with pytest.raises(UserError, match=r"reset\(\) returned no dictionary") as error:
        run(
            SyncVector(
                [
                    lambda: gymnasium.wrappers.RescaleObservation(
                        OldEnv(), np.float32(0), np.float32(1)
                    )
                ]
            )
        )
    assert "OldEnv" in str(error.value)


def test_an_error_that_is_its_own_cause_is_described():
    with pytest.raises(ValueError, match="lost") as error:
        try:
            raise ValueError("lost")
        except ValueError as lost:
            raise lost from lost
    assert describe(error.value).startswith("ValueError: lost (")


@pytest.mark.parametrize("flag", [np.True_, 1, np.int8(1), 1.0, np.ones(1), np.array(True)])
def test_numbers_and_arrays_may_be_flags(flag):
    class NumpyEnv(PlainEnv):
        def step(self, action):
            return self.observe(), 1.0, 0 * flag, flag, {}

    _, steps = run(SyncVector([NumpyEnv] * 2))
    assert [step.is_last.tolist() for step in steps] == [[True] * 2, [False] * 2] * 6
    assert all(step.discount.all() for step in steps)


@pytest.mark.parametrize("reward", [np.array([-2.0]), np.array(-2), np.float64(-2.0), -2])
def test_arrays_with_one_entry_may_be_rewards(reward):
    class NumpyEnv(PlainEnv):
        def step(self, action):
            return self.observe(), reward, False, True, {}

    _, (first, *_) = run(SyncVector([lambda: RecordEpisodeStatistics(NumpyEnv())] * 2))
    assert first.reward.tolist() == [-2.0, -2.0]
    assert dict(first.own_returns) == {0: -2.0, 1: -2.0}


@pytest.mark.parametrize("limit", [None, 3])
def test_four_values_are_named_also_below_gymnasiums_wrappers(limit):
    class OldEnv(PlainEnv):
        def step(self, action):
            return self.observe(), 1.0, False, {}

    def make():
        env = gymnasium.wrappers.OrderEnforcing(OldEnv())
        return env if limit is None else gymnasium.wrappers.TimeLimit(env, limit)

    with pytest.raises(UserError, match="gymnasium's step returns .observation, reward,"):
        run(SyncVector([make]), num_envs=1)


@each_vector
def test_a_reset_without_a_seed_or_options_is_refused_by_name(vector_class):
    class OldEnv(PlainEnv):
        def reset(self):  # type: ignore[override]
            return self.observe(), {}

    class NewerEnv(PlainEnv):
        def reset(self, seed=None):  # type: ignore[override]
            return self.observe(), {}

    with pytest.raises(UserError, match=r"reset\(\) does not accept seed=...; gymnasium's"):
        run(vector_class([OldEnv] * 2))
    with pytest.raises(UserError, match=r"reset\(\) does not accept options=...; gymnasium's"):
        run(vector_class([lambda: gymnasium.wrappers.OrderEnforcing(NewerEnv())]))


@each_vector
def test_integers_that_fit_the_space_are_stored_and_others_refused(vector_class):
    class BytesEnv(PlainEnv):
        observation_space = Box(0, 255, (3,), np.uint8)
        values: tuple = (0, 7, 255)

        def observe(self):
            return np.array(self.values)

    (first,), _ = run(vector_class([BytesEnv] * 2))
    assert first.dtype == np.uint8 and first.tolist() == [[0, 7, 255]] * 2

    class TooLarge(BytesEnv):
        values = (0, 7, 256)

    class Wider(BytesEnv):
        def observe(self):
            return np.array([0, 7, 300], np.uint16)

    class Floats(BytesEnv):
        def observe(self):
            return np.array(self.values, np.float64)

    (first,), _ = run(vector_class([Floats] * 2))
    assert first.dtype == np.uint8 and first.tolist() == [[0, 7, 255]] * 2

    class Halves(BytesEnv):
        values = (0.0, 0.5, 1.0)

    class Nothing(BytesEnv):
        values = (0.0, 1.0, np.nan)

    for env_class in (TooLarge, Wider, Halves, Nothing):
        with pytest.raises(UserError, match="cannot be stored in its space"):
            run(vector_class([env_class] * 2))


@each_vector
def test_integers_are_rounded_to_a_space_of_floats_as_floats_are(vector_class):
    class Counter(PlainEnv):
        observation_space = Box(-np.inf, np.inf, (2,), np.float32)

        def observe(self):
            return [2**24 + 1, self.time]

    (first,), (outcome,) = run(vector_class([Counter]), num_steps=1, num_envs=1)
    assert first.tolist() == [[2**24, 0]]
    assert outcome.observation[0].tolist() == [[2**24, 1]]


class Halved(gymnasium.ObservationWrapper):
    """Returns a part of the observation, and keeps its space."""

    def observation(self, observation):
        return observation[:2]


class Unset(gymnasium.Wrapper):
    def __getattribute__(self, name):
        return super().__getattribute__("no_space" if name == "action_space" else name)


@each_vector
def test_the_fault_of_a_wrapper_names_its_class_and_its_file(vector_class):
    def places(wrapper):
        of_env = f"{PlainEnv.__module__}.PlainEnv in {sys.modules[PlainEnv.__module__].__file__}"
        return f"class {of_env} or its wrapper {__name__}.{wrapper.__name__} in {__file__}, or wrap"

    with pytest.raises(UserError, match=re.escape(places(Halved))):
        run(vector_class([lambda: gymnasium.wrappers.TimeLimit(Halved(PlainEnv()), 9)]))
    reason = "the environment's action_space raised AttributeError: .*no_space"
    with pytest.raises(UserError, match=reason) as error:
        vector_class([lambda: Unset(PlainEnv())])
    assert places(Unset) in str(error.value)


@each_vector
def test_an_observation_may_change_after_it_was_returned(vector_class):
    class ReusingEnv(PlainEnv):
        array = np.zeros(3, np.float32)

        def observe(self):
            self.array += 1
            return self.array

    _, steps = run(vector_class([ReusingEnv]), num_steps=3, num_envs=1)
    observed = [step.observation[0][0, 0] for step in steps]
    assert len(set(observed)) == 3


@each_vector
def test_the_first_error_of_several_is_raised_and_all_are_closed(vector_class, tmp_path):
    class FailingEnv(PlainEnv):
        def __init__(self, number):
            super().__init__()
            self.number = number

        def step(self, action):
            raise KeyError(f"no room {self.number}")

        def close(self):
            (tmp_path / str(self.number)).touch()
            raise OSError("no door")

    vector = vector_class([functools.partial(FailingEnv, number) for number in range(3)])
    vector.reset([1, 2, 3])
    with pytest.raises(Exception, match="no room 0"):
        vector.step(np.ones(3, np.int64))
    with pytest.raises(Exception, match="no door"):
        vector.close()
    assert len(list(tmp_path.iterdir())) == 3


class HomeEnv(PlainEnv):
    """Belongs to the thread that has built it."""

    def __init__(self):
        self.database = sqlite3.connect(":memory:")

    def observe(self):
        self.database.execute("select 1")
        return super().observe()

    def render(self):
        self.database.execute("select 1")
        return np.zeros((2, 2, 3), np.uint8)

    def close(self):
        self.database.close()


@pytest.mark.filterwarnings("error")
def test_an_environment_in_a_thread_has_an_event_loop():
    class SocketEnv(PlainEnv):
        def observe(self):
            asyncio.get_event_loop().run_until_complete(asyncio.sleep(0))
            return super().observe()

    run(in_thread([SocketEnv]), num_envs=1)


@pytest.mark.parametrize("vector_class", [in_thread, ProcessVector])
def test_an_environment_stays_in_its_thread(vector_class):
    vector = vector_class([HomeEnv] * 2)
    errors = []

    def use():
        try:
            vector.render()
            run(vector)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert not errors


@pytest.mark.parametrize(
    ("vector_class", "error", "message"),
    [(in_thread, RuntimeError, "are closed"), (ProcessVector, UserError, "has died")],
)
def test_a_closed_vector_says_so_and_does_not_hang(vector_class, error, message):
    vector = vector_class([PlainEnv])
    vector.close()
    with pytest.raises(error, match=message):
        vector.reset([1])


def test_the_thread_ends_when_the_vector_is_closed_or_cannot_be_built():
    vector = in_thread([PlainEnv])
    assert vector.thread in {thread.ident for thread in threading.enumerate()}
    vector.close()
    vector.close()
    assert vector.thread not in {thread.ident for thread in threading.enumerate()}

    def fail():
        raise LookupError("no such floor")

    before = {*threading.enumerate()}
    with pytest.raises(LookupError):
        in_thread([fail])
    wait_for(lambda: {*threading.enumerate()} <= before, 5)


class ParentEnv(PlainEnv):
    """Has a child process at every reset."""

    def reset(self, **kwargs):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0.01,))
        child.start()
        child.join()
        assert child.exitcode == 0
        return super().reset(**kwargs)


def test_environments_in_processes_may_have_children():
    run(ProcessVector([ParentEnv] * 2))


@pytest.mark.parametrize(
    ("die", "message"),
    [
        (lambda: os._exit(9), r"\(exit code 9\)$"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"\(SIGKILL\), perhaps .* out of memory$"),
        (lambda: os.kill(os.getpid(), signal.SIGABRT), r"\(SIGABRT\), perhaps .* TensorFlow"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), r"\(SIGSEGV\)$"),
    ],
)
def test_a_process_that_dies_is_named_and_the_others_end(die, message):
    class DyingEnv(PlainEnv):
        def step(self, action):
            faulthandler.disable()  # pytest's would print the stack of this process
            die()

    vector = ProcessVector([DyingEnv, PlainEnv])
    vector.reset([1, 2])
    with pytest.raises(ProcessDied, match=f"environment 0 has died {message}"):
        vector.step(np.ones(2, np.int64))
    vector.close()
    assert not any(process.is_alive() for process in vector.processes)


@pytest.mark.parametrize("where", ["reset", "step"])
def test_a_process_that_dies_before_its_child_is_noticed(tmp_path, where):
    class DyingEnv(PlainEnv):
        def __init__(self):
            # It keeps the connection of its parent open.
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))
            child.start()
            (tmp_path / "child").write_text(str(child.pid))
            setattr(self, where, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))

    vector = ProcessVector([DyingEnv])
    child = int((tmp_path / "child").read_text())
    try:
        with pytest.raises(ProcessDied, match=r"environment 0 has died \(SIGKILL\)"):
            vector.reset([1])
            vector.step(np.ones(1, np.int64))
        assert is_alive(child)
    finally:
        os.kill(child, signal.SIGKILL)
    vector.close()


class TensorEnv(PlainEnv):
    """Computes the reward of a step with TensorFlow, in many short calls."""

    def step(self, action):
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            tf.raw_ops.Add(x=1.0, y=2.0)
        return super().step(action)


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="TensorFlow aborts")
def test_a_process_that_uses_tensorflow_without_waiting_is_left_alone(monkeypatch):
    monkeypatch.setattr(process_vector, "_TENSORFLOW_SECONDS", 1)
    vector = ProcessVector([TensorEnv])
    vector.reset([1])
    vector.step(np.ones(1, np.int64))
    vector.close()


def test_too_few_open_files_for_all_processes_are_named_with_the_fix():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    limit = max(taken[0] + 20, 256)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        with pytest.raises(OSError):
            while True:
                taken.append(os.dup(taken[0]))
        for _ in range(9):
            os.close(taken.pop())
        # As many environments as open files: the garbage collector may close files of earlier
        # tests meanwhile, but never enough.
        with pytest.raises(
            UserError, match=rf"environment \d+ of {limit} cannot.*raise the limits.*num_envs"
        ):
            ProcessVector([PlainEnv] * limit)
    finally:
        for file in taken:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert not multiprocessing.active_children()


class HoldingEnv(PlainEnv):
    """Environment whose steps take a minute of C code that keeps Python's lock."""

    def step(self, action):
        ctypes.PyDLL(None).sleep(60)
        return super().step(action)


@pytest.mark.parametrize("env", [PlainEnv, HoldingEnv])
def test_processes_die_with_their_parent(env):
    reader, writer = multiprocessing.get_context("fork").Pipe()

    def parent():
        vector = ProcessVector([env] * 2)
        vector.reset([1, 2])
        writer.send([process.pid for process in vector.processes])
        vector.step(np.ones(2, np.int64))
        time.sleep(60)

    process = multiprocessing.get_context("fork").Process(target=parent)
    process.start()
    ids = reader.recv()
    time.sleep(0.5)  # the steps have begun
    process.kill()
    process.join()
    wait_for(lambda: not any(map(is_alive, ids)), 5)


@each_vector
def test_an_environment_that_cannot_be_built_leaves_the_others_closed(vector_class):
    closed = multiprocessing.Value("i", 0)
    before = {*multiprocessing.active_children()}

    class ClosableEnv(PlainEnv):
        def close(self):
            closed.value += 1

    def fail():
        raise LookupError("no such floor")

    with pytest.raises(Exception, match="no such floor"):
        vector_class([ClosableEnv, fail])
    assert vector_class is ProcessVector or closed.value == 1
    assert {*multiprocessing.active_children()} <= before


@each_vector
def test_environments_with_different_spaces_are_refused(vector_class):
    class WideEnv(PlainEnv):
        observation_space = Box(-1, 1, (4,), np.float32)

    with pytest.raises(UserError, match="different spaces .observation_space."):
        vector_class([PlainEnv, WideEnv])


@each_vector
def test_a_constructor_that_exits_is_named(vector_class):
    with pytest.raises(UserError, match=r"the constructor .* called sys.exit"):
        vector_class([lambda: sys.exit(0)])


@pytest.mark.parametrize("vector_class", [in_thread, ProcessVector])
def test_after_an_interrupted_call_answers_belong_to_their_questions(vector_class, monkeypatch):
    vector = vector_class([PlainEnv])
    vector.reset([1])
    expected = vector.reset([2])
    vector.reset([1])
    with monkeypatch.context() as patch:
        if vector_class is ProcessVector:
            patch.setattr(vector, "_answer", interrupt)
        else:
            patch.setattr(vector, "_results", Interrupting())
        with pytest.raises(KeyboardInterrupt):
            vector.step(np.ones(1, np.int64))
    np.testing.assert_array_equal(vector.reset([2]), expected)
    vector.close()


def interrupt(*arguments, **keywords):
    raise KeyboardInterrupt


class Interrupting:
    """Queue of which nothing can be read, and in which what is put is kept apart."""

    get = staticmethod(interrupt)

    def put(self, item):
        pass


def test_children_of_a_process_end_before_it(tmp_path):
    class ParentEnv(PlainEnv):
        def __init__(self):
            context = multiprocessing.get_context("fork")
            self.child = context.Process(target=time.sleep, args=(60,), daemon=True)
            self.child.start()
            (tmp_path / "child").write_text(str(self.child.pid))

    vector = ProcessVector([ParentEnv])
    vector.close()
    assert not is_alive(int((tmp_path / "child").read_text()))


def test_an_environment_that_hangs_in_close_does_not_hold_the_program(monkeypatch):
    released = threading.Event()

    class ClingingEnv(PlainEnv):
        def close(self):
            released.wait(30)

    monkeypatch.setattr(thread_vector, "_CLOSE_SECONDS", 0.2)
    vector = in_thread([ClingingEnv])
    with pytest.raises(TimeoutError, match="has not returned after 0.2 s"):
        vector.close()
    released.set()


@each_vector
def test_environments_draw_different_numbers_from_the_generators_of_a_process(vector_class):
    class GlobalEnv(PlainEnv):
        def observe(self):
            return np.array([random.random(), *np.random.random(2)], np.float32)

    (first,), _ = run(vector_class([GlobalEnv] * 3), num_envs=3)
    (second,), _ = run(vector_class([GlobalEnv] * 3), num_envs=3)
    assert len(np.unique([first, second])) == 18


@each_vector
def test_an_unexpected_keyword_elsewhere_is_not_taken_for_a_reset_without_a_seed(vector_class):
    class TypoEnv(PlainEnv):
        def observe(self):
            return self.np_random.uniform(0, 1, shape=3)  # type: ignore[call-overload]

    with pytest.raises(Exception, match="unexpected keyword argument 'shape'") as error:
        run(vector_class([TypoEnv]), num_envs=1)
    assert "does not accept" not in str(error.value)


@each_vector
def test_the_end_of_an_iterator_is_named(vector_class):
    class DataEnv(PlainEnv):
        def step(self, action):
            return next(iter(()))

    with pytest.raises(Exception) as error:
        run(vector_class([DataEnv]), num_envs=1)
    assert re.match(rf"StopIteration: +\({__file__}:\d+, in step\)", describe(error.value))


@each_vector
@pytest.mark.parametrize("name", ["observation_space", "action_space"])
@pytest.mark.parametrize("value", [None, (3,)])
def test_a_missing_space_is_named(vector_class, name, value):
    class NoSpaceEnv(PlainEnv):
        pass

    setattr(NoSpaceEnv, name, value)
    named = re.escape(f"{name} is {value}, not a gymnasium.Space")
    with pytest.raises(UserError, match=named):
        vector_class([NoSpaceEnv])


class ListedEnvs(gymnasium.vector.VectorEnv):
    """Returns results of other types than those of its spaces."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    num_envs = 2
    single_observation_space: Any = Box(-1, 1, (3,), np.float32)
    single_action_space = gymnasium.spaces.Discrete(2)
    observation: Any = np.zeros((2, 3))

    def reset(self, *, seed=None, options=None):
        return self.observation, {}

    def step(self, actions):
        return self.observation, [1, 2.5], np.array([0, 1]), [False, False], {}


def test_results_of_a_vector_environment_are_converted_to_its_spaces():
    first, (outcome,) = run(GymnasiumVector(ListedEnvs()), num_steps=1)
    for (observation,) in (first, outcome.observation):
        assert observation.dtype == np.float32 and observation.shape == (2, 3)
    assert outcome.reward.tolist() == [1, 2.5] and outcome.reward.dtype == np.float32
    assert outcome.is_last.tolist() == [False, True] and outcome.is_last.dtype == np.bool_
    assert outcome.discount.tolist() == [1, 0]
    env = ListedEnvs()
    env.observation = np.zeros((3, 3))
    with pytest.raises(UserError, match=r"has the shape \(3, 3\) instead of \(2, 3\)"):
        run(GymnasiumVector(env), num_steps=1)


class ReusingEnvs(ListedEnvs):
    """Writes each step to the arrays of the one before."""

    def __init__(self):
        self.observation = np.zeros((2, 3), np.float32)
        self.reward = np.zeros(2, np.float32)

    def step(self, actions):
        self.observation += 1
        self.reward += 1
        return self.observation, self.reward, np.zeros(2, np.bool_), np.zeros(2, np.bool_), {}


def test_a_vector_environment_may_write_to_arrays_that_it_has_returned():
    (first,), outcomes = run(GymnasiumVector(ReusingEnvs()), num_steps=3)
    assert first.tolist() == [[0] * 3] * 2
    for number, outcome in enumerate(outcomes, 1):
        assert outcome.observation[0].tolist() == [[number] * 3] * 2
        assert outcome.reward.tolist() == [number] * 2


@pytest.mark.parametrize(
    ("place", "name", "value", "found"),
    [
        (1, "reward", np.ones((2, 1)), "shape (2, 1) and the dtype float64 instead of (2,) and"),
        (1, "reward", 1.0, "shape () and the dtype float64 instead of (2,) and float32"),
        (1, "reward", [None, 1.0], "shape (2,) and the dtype object instead of (2,) and float32"),
        (2, "terminated", np.zeros((2, 1), bool), "shape (2, 1) and the dtype bool instead of"),
        (3, "truncated", np.array([np.nan, 0]), "dtype float64 instead of (2,) and bool"),
        (3, "truncated", [None, None], "dtype object instead of (2,) and bool"),
    ],
)
def test_a_row_of_another_kind_from_a_vector_environment_is_named(place, name, value, found):
    class WrongEnvs(ListedEnvs):
        def step(self, actions):
            results = [*super().step(actions)]
            results[place] = value
            return tuple(results)

    with pytest.raises(UserError, match=re.escape(f"step() returned {name} with the ")) as error:
        run(GymnasiumVector(WrongEnvs()), num_steps=1)
    assert found in str(error.value)


class WholeEnvs(gymnasium.vector.SyncVectorEnv):
    """Resets all environments, whatever the mask says."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)


@pytest.mark.parametrize("vector_class", [gymnasium.vector.SyncVectorEnv, WholeEnvs])
def test_a_vector_environment_that_resets_too_many_is_refused(vector_class):
    make = functools.partial(gymnasium.make, "CartPole-v1")
    vector = GymnasiumVector(vector_class([make] * 2, autoreset_mode=AutoresetMode.NEXT_STEP))
    vector.reset([1, 2])
    vector.step(np.ones(2, np.int64))
    if vector_class is WholeEnvs:
        with pytest.raises(UserError, match=r"has changed .*reset_mask.* environment WholeEnvs"):
            vector.reset([3, 4], np.array([True, False]))
    else:
        vector.reset([3, 4], np.array([True, False]))
    vector.close()


@pytest.mark.parametrize("name", ["NormalizeObservation", "NormalizeReward"])
def test_vector_wrappers_with_statistics_are_refused(name):
    make = functools.partial(gymnasium.make, "CartPole-v1")
    vectors = gymnasium.vector.SyncVectorEnv([make])
    with pytest.raises(UserError, match=f"wrapper {name} has statistics that no checkpoint"):
        GymnasiumVector(getattr(gymnasium.wrappers.vector, name)(vectors))
    vectors.close()


class CategoryEnvs(ListedEnvs):
    """Observes a category that is not in the space, and a text."""

    single_observation_space = gymnasium.spaces.Dict(
        place=gymnasium.spaces.Discrete(3, start=1), words=gymnasium.spaces.Text(5)
    )
    observation: Any = {"place": np.array([1, 0]), "words": ("a", "b")}


def test_a_category_of_a_vector_environment_that_is_not_in_its_space_is_named():
    vector = GymnasiumVector(CategoryEnvs())
    assert [note.partition(":")[0] for note in vector.description.notes] == [
        "agents do not see observation['words']"
    ]
    with pytest.raises(UserError, match=r"'place'.* not in its space Discrete\(3, start=1\)"):
        vector.reset([1, 2])
