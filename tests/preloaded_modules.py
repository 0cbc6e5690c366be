"""Imports TensorFlow and the package, for the process from which `preloaded` forks programs."""

import gc
import importlib

from pipeline.utils.tensorflow_import import import_tensorflow

import_tensorflow()
for name in (
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    "pipeline.benchmarks.report",
    "pipeline.benchmarks.runner",
    "pipeline.training.train_loop",
):
    importlib.import_module(name)
gc.freeze()  # or every fork would copy the pages of millions of objects
