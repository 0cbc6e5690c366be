"""Timing what changes an agent, without changing it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def restored(agent: tf.Module, measure: Callable[[], Any]) -> Any:
    """What `measure()` returns; `agent`, optimizers included, is afterwards as it was before.

    Many updates on one batch would leave weights that play, and so cost, otherwise.
    """
    checkpoint = tf.train.Checkpoint(agent=agent)
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint.write(f"{folder}/agent")
        answer = measure()
        checkpoint.read(path).assert_existing_objects_matched().assert_consumed()
    return answer
