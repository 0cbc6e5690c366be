from __future__ import annotations

import gin
import numpy as np
import pytest
import tensorflow as tf

from pipeline.ops.schedules import Schedule, as_schedule, linear_schedule, whole_run
from pipeline.utils.errors import UserError


@gin.configurable(module="schedules_test")
def takes_a_schedule(rate: Schedule = gin.REQUIRED) -> Schedule:
    return as_schedule(rate)


@pytest.mark.parametrize(
    ("counter", "expected"),
    [(0, 1.0), (99, 1.0), (100, 1.0), (350, 0.55), (600, 0.1), (601, 0.1), (10**12, 0.1)],
)
def test_linear_schedule(counter: int, expected: float) -> None:
    value = linear_schedule(1.0, 0.1, num_steps=500, start=100)(tf.constant(counter, tf.int64))
    assert value.dtype == tf.float32
    assert value.shape == []
    assert value.numpy() == np.float32(expected)


def test_neighbouring_counts_differ_beyond_the_integers_of_float32() -> None:
    schedule = linear_schedule(1.0, 0.0, num_steps=2**30)
    values = [schedule(tf.constant(2**30 - left, tf.int64)).numpy() for left in range(64)]
    assert values == [left / 2**30 for left in range(64)]


def test_schedules_run_in_the_graph_on_a_counter_variable() -> None:
    counter = tf.Variable(0, dtype=tf.int64)
    schedules = (linear_schedule(1.0, 0.0, num_steps=4), as_schedule(0.5))

    @tf.function
    def count() -> list[tf.Tensor]:
        counter.assign_add(1)
        return [schedule(counter) for schedule in schedules]

    values = [[x.numpy().item() for x in count()] for _ in range(5)]
    assert values == [[0.75, 0.5], [0.5, 0.5], [0.25, 0.5], [0.0, 0.5], [0.0, 0.5]]


def test_a_number_is_a_constant_schedule() -> None:
    value = as_schedule(0.25)(tf.constant(10**9, tf.int64))
    assert (value.dtype, value.numpy()) == (tf.float32, 0.25)


@pytest.mark.parametrize(
    ("reference", "bindings"),
    [
        ("@epsilon/linear_schedule", ""),
        ("@epsilon/linear_schedule", "linear_schedule.final = 0\nlinear_schedule.num_steps = 9"),
    ],
)
def test_a_schedule_without_parentheses_is_refused(reference: str, bindings: str) -> None:
    name = reference.strip("@").rpartition("/")[2]
    try:
        with gin.unlock_config():
            gin.clear_config()
            gin.parse_config(f"takes_a_schedule.rate = {reference}\n{bindings}")
            with pytest.raises(UserError, match=rf"with parentheses: @{name}\(\)"):
                takes_a_schedule()
    finally:
        gin.clear_config()


def test_a_schedule_of_ones_own_needs_none() -> None:
    def halving(counter: tf.Tensor) -> tf.Tensor:
        return 0.5 ** tf.cast(counter, tf.float32)

    assert as_schedule(halving) is halving


def test_a_function_without_a_number_is_no_schedule() -> None:
    def failing(counter: tf.Tensor) -> tf.Tensor:
        raise KeyError(counter)

    for other in (tf.keras.optimizers.Adam, lambda counter: tf.zeros([2]), str, failing):
        with pytest.raises(UserError, match="is not a schedule"):
            as_schedule(other)


def test_a_schedule_of_ones_own_becomes_float32() -> None:
    for schedule in (lambda counter: 0.5 ** (counter / 2), lambda counter: counter // 8):
        value = tf.function(as_schedule(schedule))(tf.constant(4, tf.int64))
        assert value.dtype == tf.float32 and value == schedule(4)


def test_a_schedule_without_a_graph_is_refused() -> None:
    for other in (
        lambda counter: 0.5 if counter < 100 else 0.1,
        lambda counter: float(int(counter)),
        lambda counter: counter.numpy() * 0.1,
    ):
        with pytest.raises(UserError, match="is not a schedule .*needs TensorFlow's operations"):
            as_schedule(other)


def test_a_schedule_of_ones_own_that_lacks_a_value_is_left_to_gin() -> None:
    def rate(counter: tf.Tensor) -> tf.Tensor:
        raise RuntimeError("Required bindings for `rate` not provided in config: ['final']")

    with pytest.raises(RuntimeError, match="Required bindings for `rate`"):
        as_schedule(rate)


def test_a_schedule_without_length_is_refused() -> None:
    with pytest.raises(UserError, match="linear_schedule.num_steps = 0: must be a number above 0"):
        linear_schedule(1.0, 0.0, num_steps=0)


def test_gin_binds_several_schedules_by_scope() -> None:
    with gin.unlock_config():
        gin.bind_parameter("epsilon_of_schedules_test/linear_schedule.initial", 1.0)
        gin.bind_parameter("epsilon_of_schedules_test/linear_schedule.final", 0.0)
        gin.bind_parameter("epsilon_of_schedules_test/linear_schedule.num_steps", 10)
    with gin.config_scope("epsilon_of_schedules_test"):
        schedule = linear_schedule()
    assert schedule(tf.constant(5, tf.int64)).numpy() == 0.5


@pytest.mark.parametrize("text", ["train.num_env_steps = 70", "N = 70\ntrain.num_env_steps = %N"])
def test_the_whole_run_is_what_train_is_bound_to(text: str) -> None:
    import pipeline.training.train_loop  # noqa: F401  (registers train)

    with gin.unlock_config():
        gin.clear_config()
        gin.parse_config(text)
        assert whole_run() == 70
        gin.clear_config()
