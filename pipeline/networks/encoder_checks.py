"""Checks the parameters that gin binds to the encoders."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from pipeline.utils.constraints import PositiveInt, check
from pipeline.utils.errors import UserError


def check_layers(
    encoder: str,
    activation: str,
    filters: Sequence[tuple[int, int, int]] | None = None,
) -> None:
    """Checks that Keras can create layers with these parameters.

    Args:
      encoder: Name of the encoder in gin, for error messages.
      activation: Keras name of an activation.
      filters: (channels, kernel, stride) of each convolution; None without convolutions.

    Raises:
      UserError: If a parameter is invalid.
    """
    if filters is not None and not filters:
        raise UserError(
            f"{encoder}.filters = {filters!r}: must have at least one convolution. For none, bind "
            "create_encoder.layers = @mlp_encoder."
        )
    for place, sizes in enumerate(filters or ()):
        name = f"{encoder}.filters[{place}]"
        check(name, sizes, Sequence[PositiveInt])
        if len(sizes) != 3:
            raise UserError(f"{name} = {sizes!r}: must be (channels, kernel, stride).")
    try:
        tf.keras.activations.get(activation)
    except ValueError:
        raise UserError(
            f"{encoder}.activation = {activation!r}: Keras has no activation of this name. Use "
            "'relu', 'tanh', 'elu', 'gelu', 'selu', 'swish' or another of its activations."
        ) from None


def check_sizes(
    encoder: str, filters: Sequence[tuple[int, int, int]], sides: Sequence[int]
) -> None:
    """Checks that each convolution without padding gets an input at least as large as its kernel.

    Args:
      encoder: Name of the encoder in gin, for error messages.
      filters: (channels, kernel, stride) of each convolution.
      sides: Height and width of the image, in pixels.

    Raises:
      UserError: If an input is too small.
    """
    for place, (_, kernel, stride) in enumerate(filters):
        if kernel > min(sides):
            height, width = sides
            raise UserError(
                f"{encoder}.filters[{place}] has a kernel of {kernel}, but its input has only "
                f"{height} x {width} pixels. Make the kernels or the strides smaller."
            )
        sides = [(side - kernel) // stride + 1 for side in sides]
