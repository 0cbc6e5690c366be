"""Converts the emulator's colour frames to the bytes that DeepMind's Lua program fed its network.

Deep Q-learning 3.0 (Mnih et al. 2015) ran Torch's `image.rgb2y` and `image.scale(..., 'bilinear')`
on floats, and stored the result as bytes. The operations here have the same order and precision,
because the truncation to bytes can turn any difference in rounding into a different byte.
"""

from __future__ import annotations

import functools

import numpy as np

# In double precision, like the constants in C: `(real) (0.299 * r + 0.587 * g + 0.114 * b)`.
_LUMA = np.array([0.299, 0.587, 0.114], np.float64)
_CHANNEL = np.arange(256, dtype=np.float32) / np.float32(255)
_LUMA_OF = np.outer(_LUMA, _CHANNEL.astype(np.float64))


def luma(rgb: np.ndarray) -> np.ndarray:
    """Computes Y = 0.299 R + 0.587 G + 0.114 B in [0, 1].

    Args:
      rgb: Colour image, uint8 [height, width, 3].

    Returns:
      Grey image, float32 [height, width].
    """
    red, green, blue = (_LUMA_OF[i].take(rgb[..., i]) for i in range(3))
    red += green
    red += blue
    return red.astype(np.float32)


def downscale(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Averages over boxes with fractional edges, along the rows first.

    This is Torch's `image.scale` with 'bilinear'.

    Args:
      image: float32 image, no smaller than the result.
      height: Height of the result in pixels.
      width: Width of the result in pixels.

    Returns:
      float32 [height, width].
    """
    narrow = _shrink_columns(np.ascontiguousarray(image.T), width)
    return _shrink_columns(np.ascontiguousarray(narrow.T), height)


def to_bytes(image: np.ndarray) -> np.ndarray:
    """Returns 255 times the float32 `image` in [0, 1], truncated to uint8."""
    return (image * np.float32(255)).astype(np.uint8)


def _shrink_columns(image: np.ndarray, length: int) -> np.ndarray:
    """Averages every column of float32 [source, N] down to `length` pixels: [length, N]."""
    if len(image) == length:
        return image
    total = np.zeros((length, image.shape[1]), np.float32)
    taps, norm = _boxes(len(image), length)
    for pixels, weights in taps:
        total += weights[:, np.newaxis] * image[pixels]
    total /= norm[:, np.newaxis]
    return total


@functools.cache
def _boxes(source: int, length: int) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
    """Computes which pixels each of `length` boxes over `source` pixels sums up, in order.

    Box i reaches from i * scale to (i + 1) * scale, where scale = source / length. A pixel's weight
    is its share inside the box. See `Main_scaleLinear_rowcol` of torch/image, generic/image.c.

    Returns:
      (pixels int64 [length], weights float32 [length]) for the first, second, ... pixel of every
      box, where weights are 0 if a box has no more pixels; and the sum of each box's weights,
      float32 [length].
    """
    scale = np.float32(source) / np.float32(length)
    ends = np.arange(1, length + 1, dtype=np.float32) * scale
    last = ends.astype(np.int64)
    last_share = ends - last.astype(np.float32)
    first = np.concatenate([[0], last[:-1]])
    first_share = np.float32(1) - np.concatenate([np.zeros(1, np.float32), last_share[:-1]])
    last_share[last >= source] = 0

    norm, taps = first_share.copy(), [(first, first_share)]
    for step in range(1, int((last - first).max()) + 1):
        pixels = first + step
        weights = np.where(pixels < last, np.float32(1), np.where(pixels == last, last_share, 0))
        norm += weights
        taps.append((np.minimum(pixels, source - 1), weights.astype(np.float32)))
    return taps, norm
