"""Classifies observations by their specs; no other module decides what an observation is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tf_agents.specs import tensor_spec

# The smallest image that the Nature CNN's three unpadded convolutions can take, in pixels a side.
MIN_IMAGE_SIDE = 36
# The smallest side of an image, in pixels, that is not taken for a number of channels.
_MIN_SIDE = 16


class CategoricalSpec(tensor_spec.BoundedTensorSpec):
    """Describes categories: integers between bounds, whose order and distance mean nothing."""


def num_categories(spec: CategoricalSpec) -> np.ndarray:
    """Returns how many categories each element of an observation has, int64 [*spec.shape]."""
    sizes = spec.maximum.astype(np.int64) - spec.minimum.astype(np.int64) + 1
    return np.broadcast_to(sizes, spec.shape)


def action_mask(observation: Any) -> Any:
    """Returns the part of an observation that says which actions are allowed, or None.

    By PettingZoo's convention, an observation with such a mask is a dict with the key
    "action_mask". The other key is usually "observation".

    Args:
      observation: Nest of tensors or of specs.
    """
    return observation.get("action_mask") if isinstance(observation, Mapping) else None


def without_mask(observation: Any) -> Any:
    """Returns the observation without its action mask."""
    if action_mask(observation) is None:
        return observation
    others = {key: part for key, part in observation.items() if key != "action_mask"}
    return others["observation"] if others.keys() == {"observation"} else others


def is_image(spec: tf.TensorSpec) -> bool:
    """Returns True if `spec` (unbatched) has two spatial dimensions and channels, of any dtype."""
    return spec.shape.rank == 3 and not isinstance(spec, CategoricalSpec)


def has_pixels(spec: tf.TensorSpec) -> bool:
    """Returns True if convolutions suit `spec` (unbatched): an image or a stack of images."""
    return is_image(spec) or is_colour_stack(spec)


def is_channels_first(spec: tf.TensorSpec) -> bool:
    """Returns True if `spec` (unbatched) is an image or a stack with the channels in front.

    Its shape is [channels, height, width]: the first dimension is the smallest, and the others are
    too large to be channels.
    """
    if not is_image(spec):
        return False
    channels, side = spec.shape[0], min(spec.shape[1:])
    return side >= (_MIN_SIDE if channels <= 4 else max(MIN_IMAGE_SIDE, channels + 1))


def is_colour_stack(spec: tf.TensorSpec) -> bool:
    """Returns True if `spec` (unbatched) is [frames, height, width, channels]."""
    if spec.shape.rank != 4 or isinstance(spec, CategoricalSpec):
        return False
    _, height, width, channels = spec.shape
    return channels <= 4 and min(height, width) >= _MIN_SIDE


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
