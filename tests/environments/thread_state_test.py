"""Tests that a thread made by TensorFlow keeps its Python state from call to call."""

import os
import threading

import numpy as np
import tensorflow as tf

from pipeline.environments.vector_environment import keep_thread_state


def test_the_state_of_tensorflows_threads_is_made_once_for_each():
    state, new_states = threading.local(), []

    def call():
        keep_thread_state()
        if not hasattr(state, "is_known"):
            state.is_known = True
            new_states.append(threading.get_ident())
        return np.int32(0)

    def one_call():
        return tf.numpy_function(call, [], tf.int32)

    @tf.function(autograph=False)
    def calls(count):
        return tf.while_loop(
            lambda index, _: index < count,
            lambda index, total: (index + 1, total + tf.ensure_shape(one_call(), [])),
            (tf.constant(0), tf.constant(0)),
            parallel_iterations=1,
        )

    calls(tf.constant(300))
    assert 1 <= len(new_states) <= 2 * (os.cpu_count() or 1)
    assert len(set(new_states)) == len(new_states)
