"""Defines flags for programs that start many runs: how runs are started, and on which machines."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from pipeline.benchmarks.train_process import Machines
from pipeline.utils.errors import UserError

WORKERS = flags.DEFINE_integer(
    "workers",
    None,
    "Number of parallel runs; by default 1 on this machine, on a cluster as many as fit.",
    lower_bound=1,
)
ALLOW_GIN_IMPORTS = flags.DEFINE_bool(
    "allow_gin_imports", False, "Let gin files import other packages: a gin file is code."
)
ALLOW_INEXACT_RESUME = flags.DEFINE_bool(
    "allow_inexact_resume", False, "Let runs resume although the processor or versions differ."
)
_RAY_ADDRESS = flags.DEFINE_string(
    "ray_address",
    None,
    "Ray cluster that trains the runs, such as auto or HOST:6379; by default this machine does.",
)
_CPUS_PER_RUN = flags.DEFINE_integer(
    "cpus_per_run",
    None,
    "With --ray_address: number of CPUs reserved for each run; default 1.",
    lower_bound=1,
)
_GPUS_PER_RUN = flags.DEFINE_float(
    "gpus_per_run", None, "With --ray_address: number of GPUs reserved for each run; default 0."
)
_MEMORY_PER_RUN = flags.DEFINE_float(
    "memory_per_run",
    None,
    "With --ray_address: GiB of memory that each run needs; by default, memory is not divided.",
    lower_bound=0.1,
)
flags.register_validator(
    "memory_per_run", lambda x: x is None or math.isfinite(x), "must be a finite number"
)
#: Flags that have no effect unless runs are started.
OF_RUNS: Sequence[flags.FlagHolder[Any]] = (
    WORKERS,
    ALLOW_INEXACT_RESUME,
    _RAY_ADDRESS,
    _CPUS_PER_RUN,
    _GPUS_PER_RUN,
    _MEMORY_PER_RUN,
)
STOPPING = "stopping: the runs write their checkpoints (Ctrl-C again to exit at once)"


@contextlib.contextmanager
def machines(output_dir: pathlib.Path) -> Iterator[Machines]:
    """Yields the machines that the flags choose: this one, or those of a cluster.

    Args:
      output_dir: Folder of the runs, which the machines of a cluster share.

    Raises:
      UserError: If a flag has no effect, Ray is not installed, or the cluster cannot be used.
    """
    passed_on = [f"--{x.name}" for x in (ALLOW_GIN_IMPORTS, ALLOW_INEXACT_RESUME) if x.value]
    if _RAY_ADDRESS.value is None:
        for flag in (_CPUS_PER_RUN, _GPUS_PER_RUN, _MEMORY_PER_RUN):
            if flag.value is not None:
                raise UserError(f"--{flag.name} has no effect without --ray_address.")
        yield Machines(output_dir, WORKERS.value or 1, flags=passed_on)
        return
    if importlib.util.find_spec("ray") is None:
        raise UserError("Ray is not installed. Install it with: pip install ray==2.60.0")
    from pipeline.benchmarks.cluster import Cluster, thread_bindings

    cpus, gpus = _CPUS_PER_RUN.value or 1, _GPUS_PER_RUN.value or 0.0
    is_share = 0.0001 <= gpus < 1 and round(gpus, 4) == gpus
    if not is_share and not (0 <= gpus < 1_000 and gpus == int(gpus)):
        raise UserError(
            f"--gpus_per_run={gpus} must be a whole number, or below 1 with at most four decimals."
        )
    with Cluster(
        _RAY_ADDRESS.value,
        output_dir,
        cpus,
        gpus,
        _MEMORY_PER_RUN.value or 0.0,
        allow_inexact_resume=ALLOW_INEXACT_RESUME.value,
    ) as cluster:
        workers, bindings = WORKERS.value or sys.maxsize, thread_bindings(cpus)
        yield Machines(output_dir.absolute(), workers, cluster.start, bindings, passed_on)
