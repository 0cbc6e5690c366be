"""Draws random numbers as a pure function of (run seed, stream name, counter).

TensorFlow's stateful random ops keep their state inside the process, where no checkpoint can reach
it. Here the only state is a counter, and counters are ordinary variables. A resumed run therefore
draws what the uninterrupted run would have drawn.
"""

from __future__ import annotations

import hashlib

import tensorflow as tf

from pipeline.utils.execution import int64


def stream_key(seed: int, *names: str | int) -> int:
    """Returns a non-negative 63-bit key for one stream of random numbers.

    Different seeds or names have unrelated keys (by SHA-256), so runs with neighbouring seeds share
    no stream.
    """
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def stateless_seed(key: int, counter: tf.Tensor) -> tf.Tensor:
    """Returns the `seed` argument, [2] int32, of TensorFlow's and TFP's stateless random ops.

    The seed is the sum of key and counter. Keys are 63 random bits and counters start at 0, so the
    seeds of two streams practically never coincide.
    """
    return tf.bitcast(int64(key) + tf.cast(counter, tf.int64), tf.int32)


def permutations(count: int, size: int, seed: tf.Tensor) -> tf.Tensor:
    """Returns `count` random permutations of 0 .. size-1, int64 [count, size].

    Args:
      count: Number of permutations.
      size: Number of elements of each permutation.
      seed: [2] int32, as `stateless_seed` returns it.
    """
    # Ties would bias the order. With 63 random bits per element they practically never occur.
    bits = tf.random.stateless_uniform([count, size], seed, 0, tf.int64.max, tf.int64, alg="philox")
    return tf.cast(tf.argsort(bits), tf.int64)
