"""The train loop: one graph for all agents, checkpointed between calls.

Importing this package registers everything that gin can bind in a training.
"""

from pipeline.training.asynchronous import asynchronous_runner
from pipeline.training.components import Components, build, configure_tensorflow
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
    "train",
]
