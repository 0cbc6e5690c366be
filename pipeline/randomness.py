"""All randomness is a pure function of (run seed, stream name, counter).

TensorFlow's stateful random ops keep their state inside the process, where no checkpoint can reach
it. Here the only state is a counter, and counters are ordinary variables: a resumed run draws what
the uninterrupted one would have drawn.
"""

from __future__ import annotations

import hashlib

import tensorflow as tf


def stream_key(seed: int, *names: str | int) -> int:
    """A non-negative 63-bit key for one stream of random numbers.

    Different seeds or names give unrelated keys (SHA-256), so that runs with neighbouring seeds
    share no stream.
    """
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def stateless_seed(key: int, counter: tf.Tensor) -> tf.Tensor:
    """The `seed` argument ([2] int32) of TensorFlow's and TFP's stateless random ops.

    Keys are 63 random bits and counters start at 0, so that the sums of two streams do not meet.
    """
    return tf.bitcast(tf.constant(key, tf.int64) + tf.cast(counter, tf.int64), tf.int32)


def permutations(count: int, size: int, seed: tf.Tensor) -> tf.Tensor:
    """`count` random orders of 0 .. size-1, int64 [count, size]; `seed` as `stateless_seed`."""
    # 63 random bits a place, so that ties, which would bias the order, do not happen.
    bits = tf.random.stateless_uniform([count, size], seed, 0, tf.int64.max, tf.int64, alg="philox")
    return tf.cast(tf.argsort(bits), tf.int64)
