"""Imports TensorFlow and the package, for the process from which `preloaded` forks programs."""

import gc
import importlib

from pipeline.utils.tensorflow_import import import_tensorflow

import_tensorflow()
importlib.import_module("pipeline.training.train_loop")
gc.freeze()  # or every fork would copy the pages of millions of objects
