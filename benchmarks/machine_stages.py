"""Measures the machine's peak, the start of a run, a full replay buffer and its checkpoints."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import gin
import tensorflow as tf

from benchmarks.workers.protocol import Answer, Stage
from pipeline import configuration
from pipeline.acting.collect_driver import CollectDriver, initial_carry
from pipeline.benchmarks.throughput import Training, build_components, finishing, repeated, timed
from pipeline.checkpointing.checkpoints import Checkpoints, Part
from pipeline.checkpointing.saveables import Variables
from pipeline.training.components import Components, configure_tensorflow
from pipeline.utils import die_with_parent
from pipeline.utils.errors import UserError

_CONFIG = "dqn_pong"
_MATRIX_SIDE = 1024
_ROWS_A_CALL = 100  # rows of each stream added per call when a replay buffer is filled
_WARM_UP = 5_000  # environment steps


def prepare(name: str, output_dir: pathlib.Path) -> tuple[dict[str, Any], dict[str, Stage]]:
    """Returns the facts and stages of a workload that `workers/workloads.py` does not define.

    Args:
      name: Name of the workload.
      output_dir: Folder for whatever is written.

    Raises:
      UserError: If there is no such workload.
    """
    workloads: dict[str, Callable[[pathlib.Path], dict[str, Stage]]] = {
        "machine": lambda _: {
            "matmul_float32": _matmul(tf.float32),
            "matmul_bfloat16": _matmul(tf.bfloat16),
            "graph_call": _graph_call(),
            "python_call": _python_call(),
        },
        "start_pong": lambda folder: {"first_update": lambda _: _first_update(folder)},
        "replay_pong": lambda folder: FullReplay(folder).stages(),
    }
    if name not in workloads:
        raise UserError(f"there is no workload {name!r}: choose one of {', '.join(workloads)}.")
    return {"takes_rounds": name == "machine", **configure_tensorflow()}, workloads[name](
        output_dir
    )


def _matmul(dtype: tf.DType) -> Stage:
    """Returns the stage of products of square matrices; a multiply-add counts as two operations."""
    matrix = tf.cast(tf.random.stateless_normal([_MATRIX_SIDE] * 2, [1, 2]), dtype)
    scale = tf.cast(_MATRIX_SIDE**-0.5, dtype)

    def body(product: tf.Tensor) -> tf.Tensor:
        return scale * tf.matmul(matrix, product)

    repeat = tf.function(lambda times: repeated(body, matrix, times)[0, 0], autograph=False)
    return timed(finishing(repeat, 2 * _MATRIX_SIDE**3 / 1e9), "GFLOP")


def _graph_call() -> Stage:
    """Returns the stage of calls from Python into a graph that does almost nothing, and back."""
    graph = tf.function(lambda x: x + 1.0, autograph=False)

    def repeat(times: tf.Tensor) -> int:
        total = tf.zeros([])
        for _ in range(int(times)):
            total = graph(total)
        return round(float(total))

    return timed(repeat, "calls")


def _python_call() -> Stage:
    """Returns the stage of calls from a graph into Python and back, as for environment steps."""

    def body(total: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(lambda x: x + 1, [total], tf.int64), [])

    graph = tf.function(
        lambda times: repeated(body, tf.zeros([], tf.int64), times), autograph=False
    )
    return timed(lambda times: int(graph(times)), "calls")


def _first_update(output_dir: pathlib.Path) -> Answer:
    """Measures the time from the command to the first update, for which a user has to wait."""
    root_dir = output_dir / "run"
    shutil.rmtree(root_dir, ignore_errors=True)
    command = [sys.executable, "-m", "pipeline.train", f"--root_dir={root_dir}"]
    command.append(f"--gin_file={_CONFIG}")
    started = time.perf_counter()
    with subprocess.Popen(
        die_with_parent.command(command), stdout=subprocess.PIPE, text=True
    ) as process:
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
    """Measures DQN on Pong with a replay buffer that is filled to a million transitions."""

    def __init__(self, output_dir: pathlib.Path):
        """Builds and warms up the training.

        Args:
          output_dir: Folder for logs and checkpoints.
        """
        configuration.load([_CONFIG])
        self._checkpoint_interval = gin.query_parameter("train.checkpoint_interval")
        self._parts = build_components()
        self._training = Training(self._parts, _WARM_UP, output_dir)
        self._folder = output_dir / "checkpoints"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._checkpoints = _checkpoints(self._folder, self._parts)
        streams = tf.range(self._parts.environment.batch_size)
        rows = self._rows()
        self._add = tf.function(lambda: self._parts.experience.add(streams, rows), autograph=False)

    def stages(self) -> dict[str, Stage]:
        """Returns the stages in the order in which they must be measured, each once."""
        return {
            "training_on_a_nearly_empty_replay": self._training,
            "filling_the_replay": lambda _: self._fill(),
            "training_on_a_full_replay": self._training,
            "checkpoint": lambda _: self._save(1),
            "next_checkpoint": lambda _: self._save_again(),
            "restore": lambda _: self._restore(),
        }

    def _fill(self) -> Answer:
        before, size = resident_gib(), int(self._parts.experience.size)
        started, grown = time.perf_counter(), size
        while True:
            self._add()
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
            "peak_resident_gib": resident_gib("VmHWM"),
        }

    def _rows(self) -> Any:
        """Returns rows [100, N, ...] of the beginnings of games.

        Real frames are used because they compress differently from noise.
        """
        environment, policy = self._parts.evaluator.environment, self._parts.agent.collect_policy
        carry = initial_carry(environment, policy)
        return CollectDriver(environment, seed=1).run(policy, carry, _ROWS_A_CALL)[1]

    def _save(self, number: int) -> Answer:
        started = time.perf_counter()
        path = self._checkpoints.save(number)
        seconds = time.perf_counter() - started
        files = [x.stat() for x in path.rglob("*") if x.is_file()]
        return {
            "seconds": seconds,
            "count": 1,
            "unit": "checkpoints",
            "gib": sum(file.st_size for file in files) / 2**30,
            "gib_of_its_own": sum(x.st_size for x in files if x.st_nlink == 1) / 2**30,
        }

    def _save_again(self) -> Answer:
        """Saves a checkpoint after as many new rows as `_CONFIG` collects between checkpoints."""
        rows_a_call = _ROWS_A_CALL * self._parts.environment.batch_size
        for _ in range(self._checkpoint_interval // rows_a_call):
            self._add()
        return {**self._save(2), "transitions": self._checkpoint_interval}

    def _restore(self) -> Answer:
        fresh = build_components()
        started = time.perf_counter()
        restored = _checkpoints(self._folder, fresh).restore()
        assert restored is not None
        return {"seconds": time.perf_counter() - started, "count": 1, "unit": "restorations"}


def _checkpoints(folder: pathlib.Path, parts: Components) -> Checkpoints:
    named: dict[str, Part] = {"agent": Variables(agent=parts.agent), "experience": parts.experience}
    return Checkpoints(folder, named)


def resident_gib(field: str = "VmRSS") -> float:
    """Returns the resident memory of this process in GiB; with "VmHWM", its peak."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) / 2**20
