"""Trains agents: one graph for all of them, with checkpoints between its calls.

Importing this package registers everything that gin can bind in a training run.
"""

from pipeline.training import asynchronous, distributed, train_loop

__all__ = ["asynchronous", "distributed", "train_loop"]
