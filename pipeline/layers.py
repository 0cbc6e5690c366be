"""Whether layers can be made of what gin has bound."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from pipeline.errors import UserError, check_wholes


def check_layers(
    encoder: str,
    units: Sequence[int],
    activation: str,
    filters: Sequence[tuple[int, int, int]] = (),
) -> None:
    """Raises UserError unless Keras can make layers of these parameters of `encoder`."""
    check_wholes(f"{encoder}.units", units)
    for place, sizes in enumerate(filters):
        name = f"{encoder}.filters[{place}]"
        check_wholes(name, sizes)
        if len(sizes) != 3:
            raise UserError(f"{name} = {sizes!r}: must be (channels, kernel, stride).")
    try:
        tf.keras.activations.get(activation)
    except ValueError:
        raise UserError(
            f"{encoder}.activation = {activation!r}: Keras has none of this name; it has "
            "'relu', 'tanh', 'elu', 'gelu', 'selu', 'swish', ..."
        ) from None
