"""What surrounds a training: the machine's peak, the start, memory and checkpoints."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from pipeline import configuration
from pipeline.benchmarks import leash
from pipeline.benchmarks.training_stages import (
    Training,
    build_components,
    finishing,
    repeated,
    timed,
)
from pipeline.benchmarks.workers.protocol import Answer, Stage
from pipeline.checkpoints import Checkpoints, Part
from pipeline.components import Components, configure_tensorflow
from pipeline.errors import UserError
from pipeline.parts import Variables

_CONFIG = "dqn_pong"
_MATRIX_SIDE = 1024
_ROWS_A_CALL = 100  # of each stream, when a replay buffer is filled
_WARM_UP = 5_000  # environment steps
ONCE = ("first_update", "filling_the_replay", "checkpoint", "restore")  # stages that take no rounds


def prepare(name: str, output_dir: pathlib.Path) -> tuple[dict[str, Any], dict[str, Stage]]:
    """Facts and stages of a work that is no training.

    Raises:
      UserError: there is no such work.
    """
    works: dict[str, Callable[[pathlib.Path], dict[str, Stage]]] = {
        "machine": lambda _: {
            "matmul_float32": _matmul(tf.float32),
            "matmul_bfloat16": _matmul(tf.bfloat16),
        },
        "start_pong": lambda folder: {"first_update": lambda _: _first_update(folder)},
        "replay_pong": lambda folder: FullReplay(folder).stages(),
    }
    if name not in works:
        raise UserError(f"there is no work {name!r}: choose one of {', '.join(works)}.")
    return {"once": ONCE, **configure_tensorflow()}, works[name](output_dir)


def _matmul(dtype: tf.DType) -> Stage:
    """Products of square matrices; a multiply-add counts as two operations."""
    matrix = tf.cast(tf.random.stateless_normal([_MATRIX_SIDE] * 2, [1, 2]), dtype)
    scale = tf.cast(_MATRIX_SIDE**-0.5, dtype)

    def body(product: tf.Tensor) -> tf.Tensor:
        return scale * tf.matmul(matrix, product)

    repeat = tf.function(lambda times: repeated(body, matrix, times)[0, 0], autograph=False)
    return timed(finishing(repeat, 2 * _MATRIX_SIDE**3 / 1e9), "GFLOP")


def _first_update(output_dir: pathlib.Path) -> Answer:
    """From the command to the first update: what a user waits for before anything is learnt."""
    root_dir = output_dir / "run"
    shutil.rmtree(root_dir, ignore_errors=True)
    command = [sys.executable, "-m", "pipeline.train", f"--root_dir={root_dir}"]
    command.append(f"--gin_file={_CONFIG}")
    started = time.perf_counter()
    with subprocess.Popen(leash.command(command), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("training:"):
                    seconds = time.perf_counter() - started
                    return {"seconds": seconds, "count": 1, "unit": "starts"}
        finally:
            process.kill()
    raise RuntimeError(f"{' '.join(command)} ended before its first update")


class FullReplay:
    """DQN on Pong with a replay buffer of a million transitions, all of them there."""

    def __init__(self, output_dir: pathlib.Path):
        configuration.load([_CONFIG])
        self._parts = build_components()
        self._training = Training(self._parts, _WARM_UP, output_dir)
        self._checkpoints = output_dir / "checkpoints"

    def stages(self) -> dict[str, Stage]:
        """In the order in which they have to be measured, each once (`ONCE`)."""
        return {
            "training_on_a_nearly_empty_replay": self._training,
            "filling_the_replay": lambda _: self._fill(),
            "training_on_a_full_replay": self._training,
            "checkpoint": lambda _: self._save(),
            "restore": lambda _: self._restore(),
        }

    def _fill(self) -> Answer:
        """Rows of ones: what they say is immaterial to what they cost."""
        before, size = resident_gib(), int(self._parts.experience.size)
        rows = self._rows()
        streams = tf.range(self._parts.environment.batch_size)
        add = tf.function(lambda: self._parts.experience.add(streams, rows), autograph=False)
        started, grown = time.perf_counter(), size
        while True:
            add()
            now = int(self._parts.experience.size)
            if now == grown:
                break
            grown = now
        return {
            "seconds": time.perf_counter() - started,
            "count": grown - size,
            "unit": "transitions",
            "transitions_held": grown,
            "resident_gib": resident_gib(),
            "resident_gib_before": before,
            "peak_resident_gib": peak_resident_gib(),
        }

    def _rows(self) -> Any:
        spec = self._parts.agent.collect_data_spec
        shape = [_ROWS_A_CALL, self._parts.environment.batch_size]
        return tf.nest.map_structure(lambda s: tf.ones([*shape, *s.shape], s.dtype), spec)

    def _save(self) -> Answer:
        shutil.rmtree(self._checkpoints, ignore_errors=True)
        started = time.perf_counter()
        _checkpoints(self._checkpoints, self._parts).save(1)
        seconds = time.perf_counter() - started
        size = sum(path.stat().st_size for path in self._checkpoints.rglob("*") if path.is_file())
        return {"seconds": seconds, "count": 1, "unit": "checkpoints", "gib": size / 2**30}

    def _restore(self) -> Answer:
        fresh = build_components()
        started = time.perf_counter()
        restored = _checkpoints(self._checkpoints, fresh).restore()
        assert restored is not None
        return {"seconds": time.perf_counter() - started, "count": 1, "unit": "restorations"}


def _checkpoints(folder: pathlib.Path, parts: Components) -> Checkpoints:
    named: dict[str, Part] = {"agent": Variables(agent=parts.agent), "experience": parts.experience}
    return Checkpoints(folder, named)


def resident_gib() -> float:
    """Memory of this process that is resident now."""
    return _status("VmRSS")


def peak_resident_gib() -> float:
    """The most that was ever resident."""
    return _status("VmHWM")


def _status(name: str) -> float:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) / 2**20
