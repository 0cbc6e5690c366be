"""Classifies observations by their specs; no other module decides what an observation is."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

# The smallest image that the Nature CNN's three unpadded convolutions can take, in pixels a side.
MIN_IMAGE_SIDE = 36


def is_image(spec: tf.TensorSpec) -> bool:
    """Returns True if `spec` (unbatched) has two spatial dimensions and channels, of any dtype."""
    return spec.shape.rank == 3


def is_of_bytes(spec: tf.TensorSpec) -> bool:
    """Returns True if `spec` is uint8 with values up to 255, such as pixels or emulator memory.

    A uint8 spec with a smaller maximum holds codes instead.
    """
    return spec.dtype == tf.uint8 and bool(np.all(getattr(spec, "maximum", 255) == 255))


def is_frame_stack(spec: tf.TensorSpec) -> bool:
    """Returns True if `spec` (unbatched) is a stack of grey frames, uint8 [frame, height, width].

    The spec of a channels-first colour image looks the same. Networks treat both alike. The replay
    buffer, which keeps only the newest frame of a stack, checks the rows that it receives.
    """
    return spec.dtype == tf.uint8 and is_image(spec) and min(spec.shape[1:]) >= MIN_IMAGE_SIDE
