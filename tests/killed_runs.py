"""Kills trainings: `python killed_runs.py FOLDER KILLS STEPS TRAIN_FLAG...`.

Repeats the same training command in a process that is killed at a random moment, until the
training ends; then runs it without kills in another folder; then does the same with the next seed,
until there were enough kills. Moments are drawn in vector steps, at most STEPS after a start, so
that runs progress at any speed of the machine. Prints, as JSON, the kills by phase and the folders.

TensorFlow is imported once, and every training is forked from this process, which runs no operation
of TensorFlow itself and so has none of its threads. A start thus takes less than ten seconds.
"""

import functools
import json
import os
import pathlib
import signal
import sys
import time
from collections import Counter
from multiprocessing.sharedctypes import RawArray

import numpy as np

from pipeline import configuration
from pipeline.utils.tensorflow_import import import_tensorflow

STARTING = "starting"  # includes building graphs and writing logs
RESTORING = "restoring"
WARMING_UP = "warming up"
COLLECTING = "collecting"
UPDATING = "updating"
CHECKPOINTING = "checkpointing"
EVALUATING = "evaluating"
ANY = "any"
PHASES = (STARTING, RESTORING, WARMING_UP, COLLECTING, UPDATING, CHECKPOINTING, EVALUATING)

POLL_SECONDS = 0.0005
# Limit for the time from the beginning of a phase to the kill; short phases last about as long.
SECONDS_INTO_PHASE = 0.02
SECONDS_TO_START = 5.0


class Phase:
    """Current phase of a forked training, in memory that it shares with this process."""

    def __init__(self):
        self._memory = RawArray("q", 2)

    @property
    def now(self):
        return PHASES[self._memory[0]]

    @now.setter
    def now(self, phase):
        self._memory[0] = PHASES.index(phase)

    @property
    def steps(self):
        """Returns the number of vector steps that it has trained, without those of its warm-up."""
        return self._memory[1]

    def start(self):
        self._memory[:] = [PHASES.index(STARTING), 0]

    def follow(self, owner, name, phase):
        """Sets `phase` while a method of the class runs."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def followed(*args, **kwargs):
            before, self.now = self.now, phase
            try:
                return method(*args, **kwargs)
            finally:
                self.now = before

        setattr(owner, name, followed)

    def follow_calls(self, calls_class, episodes_class):
        """Distinguishes collecting from updating by the steps of the training environment."""
        create, run_chunk, step = calls_class.__init__, calls_class.run, episodes_class.step

        def followed_create(calls, runner, environment):
            self._runner = runner
            create(calls, runner, environment)

        def followed_chunk(calls, chunk, state, until):
            is_random = chunk != self._runner.train
            before, self.now = self.now, WARMING_UP if is_random else COLLECTING
            state = run_chunk(calls, chunk, state, until)
            self.now = before
            return state

        def followed_step(episodes, action):
            if self.now == UPDATING:
                self.now = COLLECTING
            rows = step(episodes, action)
            if self.now == COLLECTING:
                self._memory[1] += 1
                is_over = self.steps % self._runner.collect_steps == 0
                self.now = UPDATING if is_over else COLLECTING
            return rows

        calls_class.__init__ = followed_create
        calls_class.run = followed_chunk
        episodes_class.step = followed_step


def load():
    """Imports what trains, as the binary does, and returns a phase that follows it."""
    flags = [x.removeprefix("--gin_bindings=") for x in sys.argv if x.startswith("--gin_bindings=")]
    import_tensorflow(configuration.uses_onednn(configuration.read([], flags)))
    from pipeline.environments.episodes import Episodes
    from pipeline.training.graph_calls import GraphCalls
    from pipeline.training.host_loop import HostLoop

    phase = Phase()
    phase.follow(HostLoop, "restore", RESTORING)
    phase.follow(HostLoop, "cut_logs", RESTORING)
    phase.follow(HostLoop, "save", CHECKPOINTING)
    phase.follow(HostLoop, "_play", EVALUATING)
    phase.follow_calls(GraphCalls, Episodes)
    return phase


def start(folder, flags):
    """Forks a training and returns the number of its process."""
    child = os.fork()
    if child:
        return child
    output = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["train", f"--root_dir={folder}", *flags]
    code = 1
    try:
        from pipeline import train

        train.main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        os._exit(code)


def has_ended(child):
    """Returns whether it came to its end, which must have exit code 0."""
    ended, status = os.waitpid(child, os.WNOHANG)
    assert status == 0, f"exit code {os.waitstatus_to_exitcode(status)}"
    return bool(ended)


def is_alive_at(child, condition, seconds=0.0):
    """Waits until `seconds` after the condition has come true; returns False if it ends before."""
    met = None
    while met is None or time.monotonic() < met + seconds:
        if has_ended(child):
            return False
        if met is None and condition():
            met = time.monotonic()
        time.sleep(POLL_SECONDS)
    return True


def kill_once(child, phase, target, generator, max_steps):
    """Kills a training after at most `max_steps` vector steps, in `target` if that is a phase.

    Returns:
      The phase in which it was killed, or None if it ended before.
    """
    if target not in (STARTING, RESTORING, WARMING_UP):
        steps = generator.integers(max_steps)
        if not is_alive_at(child, lambda: phase.steps > steps):
            return None
    delay = generator.uniform(0, SECONDS_TO_START if target == STARTING else SECONDS_INTO_PHASE)
    if not is_alive_at(child, lambda: target in (ANY, phase.now), delay):
        return None
    os.kill(child, signal.SIGSTOP)
    killed_in = phase.now
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return killed_in


def targets(generator, warms_up):
    """Yields the phases in which to kill; the warm-up is only among the first."""
    yield from [WARMING_UP, WARMING_UP, STARTING] if warms_up else [STARTING]
    while True:
        phases = [RESTORING, COLLECTING, UPDATING, CHECKPOINTING, EVALUATING, ANY, ANY, ANY]
        yield from generator.permutation(phases).tolist()


def main():
    root, kills, max_steps, *flags = sys.argv[1:]
    phase, halves = load(), 0
    kills_by_phase: Counter[str] = Counter()
    runs: list[list[str]] = []
    while kills_by_phase.total() < int(kills):
        seed = len(runs) + 1
        generator = np.random.default_rng(seed)
        run, twin = (pathlib.Path(root) / f"{name}-{seed}" for name in ("run", "twin"))
        command = [*flags, f"--seed={seed}"]
        targets_of_run = targets(generator, any("initialize_replay" in x for x in flags))
        while kills_by_phase.total() < int(kills):
            phase.start()
            child = start(run, command)
            target = next(targets_of_run)
            killed_in = kill_once(child, phase, target, generator, int(max_steps))
            if killed_in is None:
                break
            kills_by_phase[killed_in] += 1
            halves += bool(list(run.glob("checkpoints/.tmp-step-*")))
        for folder in (run, twin):
            child = start(folder, command)
            while not has_ended(child):
                time.sleep(0.05)
        runs.append([str(run), str(twin)])
    print(json.dumps({"kills": kills_by_phase, "halves": halves, "runs": runs}))


if __name__ == "__main__":
    main()
