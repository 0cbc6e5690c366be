"""Trains agents: one graph for all of them, with checkpoints between its calls.

Importing this package registers everything that gin can bind in a training run.
"""

from pipeline.training.asynchronous import asynchronous_runner
from pipeline.training.components import Components, build, configure_tensorflow
from pipeline.training.distributed import distributed_runner
from pipeline.training.host_loop import HostLoop
from pipeline.training.iteration import Iterations
from pipeline.training.train_loop import build_bound, train

__all__ = [
    "Components",
    "HostLoop",
    "Iterations",
    "asynchronous_runner",
    "build",
    "build_bound",
    "configure_tensorflow",
    "distributed_runner",
    "train",
]
