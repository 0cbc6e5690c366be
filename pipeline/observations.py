"""What an observation is, judged from its spec alone: the one place that decides."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

# The smallest image that the Nature CNN's three unpadded convolutions can take.
MIN_IMAGE_SIDE = 36


def is_image(spec: tf.TensorSpec) -> bool:
    """Whether `spec` (unbatched) is laid out in two dimensions and channels, of any dtype."""
    return spec.shape.rank == 3


def is_of_bytes(spec: tf.TensorSpec) -> bool:
    """Whether `spec` is of bytes up to 255, such as pixels or an emulator's memory; no codes."""
    return spec.dtype == tf.uint8 and bool(np.all(getattr(spec, "maximum", 255) == 255))


def is_frame_stack(spec: tf.TensorSpec) -> bool:
    """Whether `spec` (unbatched) is a stack of grey frames, uint8 [frame, height, width].

    The spec of a channels-first colour image looks the same. Networks treat both alike; the replay
    buffer, which keeps only the newest frame of a stack, checks the rows that it was given.
    """
    return spec.dtype == tf.uint8 and is_image(spec) and min(spec.shape[1:]) >= MIN_IMAGE_SIDE
