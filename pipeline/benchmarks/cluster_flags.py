"""Flags of the programs that start many runs, which say on which machines the runs are trained."""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from absl import flags

from pipeline.benchmarks.train_process import Start, TrainProcess
from pipeline.utils.errors import UserError

_RAY_ADDRESS = flags.DEFINE_string(
    "ray_address",
    None,
    "Ray cluster that trains the runs, such as auto or HOST:6379; by default this machine does.",
)
_CPUS_PER_RUN = flags.DEFINE_integer(
    "cpus_per_run", None, "With --ray_address: processors of a run; default 1.", lower_bound=1
)
_GPUS_PER_RUN = flags.DEFINE_float(
    "gpus_per_run", None, "With --ray_address: GPUs of a run; default 0.", lower_bound=0
)


class Machines(NamedTuple):
    """Machines on which runs are trained.

    Attributes:
      start: Starts the process that trains a run.
      workers: Default number of parallel runs.
      bindings: Gin statements that every run needs there.
    """

    start: Start
    workers: int
    bindings: Sequence[str]


@contextlib.contextmanager
def machines(output_dir: pathlib.Path, allow_inexact_resume: bool) -> Iterator[Machines]:
    """Yields the machines that the flags choose: this one, or those of a cluster.

    Args:
      output_dir: Folder of the runs, which the machines of a cluster share.
      allow_inexact_resume: Whether runs may go on where they cannot do so bit for bit.

    Raises:
      UserError: If a flag has no effect, Ray is not installed, or the cluster cannot be used.
    """
    if _RAY_ADDRESS.value is None:
        for flag in (_CPUS_PER_RUN, _GPUS_PER_RUN):
            if flag.value is not None:
                raise UserError(f"--{flag.name} has no effect without --ray_address.")
        yield Machines(TrainProcess, 1, ())
        return
    if importlib.util.find_spec("ray") is None:
        raise UserError("--ray_address needs Ray, which is not installed: pip install ray==2.60.0")
    from pipeline.benchmarks.cluster import Cluster, thread_bindings

    cpus = _CPUS_PER_RUN.value or 1
    with Cluster(
        _RAY_ADDRESS.value,
        output_dir,
        cpus,
        _GPUS_PER_RUN.value or 0.0,
        is_any_node_right=allow_inexact_resume,
    ) as cluster:
        yield Machines(cluster.start, sys.maxsize, thread_bindings(cpus))
