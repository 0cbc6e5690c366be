"""Tests that each kind of part restores what was saved, or refuses it by name."""

from __future__ import annotations

import errno
import hashlib
import pathlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from pipeline.checkpointing.saveables import HostState, Tensors, Variables, weights_sha256
from pipeline.ops.optimizers import Adam, RMSprop, build_slots
from pipeline.utils.errors import UserError


def adam(weights: list[tf.Variable]) -> tf.keras.optimizers.Optimizer:
    optimizer = tf.keras.optimizers.Adam(0.1)
    optimizer.build(weights)
    return optimizer


def test_variables_round_trip_with_optimizer_slots(tmp_path: pathlib.Path) -> None:
    def step(weights: tf.Variable, optimizer: tf.keras.optimizers.Optimizer) -> np.ndarray:
        optimizer.apply_gradients([(2.0 * weights, weights)])
        return weights.numpy()

    def create() -> tuple[tf.Variable, tf.keras.optimizers.Optimizer, Variables]:
        weights = tf.Variable([1.0, 2.0])
        optimizer = adam([weights])
        return weights, optimizer, Variables(weights=weights, optimizer=optimizer)

    weights, optimizer, part = create()
    step(weights, optimizer)
    part.save(tmp_path)
    expected = [step(weights, optimizer) for _ in range(3)]
    weights, optimizer, part = create()
    part.restore(tmp_path)
    assert np.array_equal([step(weights, optimizer) for _ in range(3)], expected)


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ({"a": [2], "b": [3], "c": []}, "missing from the checkpoint: c$"),
        ({"a": [2]}, "in the checkpoint but not in this run: b$"),
        ({"a": [2], "renamed": [3]}, "missing .*: renamed; in the checkpoint but not .*: b$"),
        ({"a": [2], "b": [4]}, r"different: b \(float32 \[3\] in the checkpoint, float32 \[4\]"),
    ],
)
def test_other_variables_are_refused_and_none_is_assigned(
    tmp_path: pathlib.Path, now: dict[str, list[int]], message: str
) -> None:
    Variables(a=tf.Variable([1.0, 1.0]), b=tf.Variable([1.0, 1.0, 1.0])).save(tmp_path)
    variables = {name: tf.Variable(tf.zeros(shape)) for name, shape in now.items()}
    with pytest.raises(ValueError, match=message):
        Variables(**variables).restore(tmp_path)
    assert not any(x.numpy().any() for x in variables.values())


def test_variables_that_cannot_be_read_now_are_not_of_another_run(tmp_path: pathlib.Path) -> None:
    part = Variables(a=tf.Variable([1.0, 1.0]))
    part.save(tmp_path)
    (data,) = tmp_path.glob("variables.data*")
    data.unlink()
    data.symlink_to("/proc/self/mem")  # Nothing is mapped at its start.
    with pytest.raises(OSError, match="Input/output error") as error:
        part.restore(tmp_path)
    assert error.value.errno == errno.EIO


def test_variables_that_are_created_later_are_refused(tmp_path: pathlib.Path) -> None:
    weights = tf.Variable([1.0])
    optimizer = tf.keras.optimizers.legacy.Adam(0.1)
    part = Variables(weights=weights, optimizer=optimizer)
    part.check_complete()
    optimizer.apply_gradients([(weights, weights)])
    for refuse in (part.check_complete, lambda: part.save(tmp_path)):
        with pytest.raises(UserError, match="variables were created after the agent.*build_slots"):
            refuse()
    assert not list(tmp_path.iterdir())


def test_hyperparameters_that_change_during_training_are_refused(tmp_path: pathlib.Path) -> None:
    weights = tf.Variable([1.0])
    optimizer = Adam(0.5)
    build_slots(optimizer, [weights])
    part = Variables(weights=weights, optimizer=optimizer)
    part.check_complete()
    optimizer.learning_rate.assign(0.25)
    with pytest.raises(UserError, match="the optimizer's learning_rate was 0.5 and is 0.25, but"):
        part.save(tmp_path)


def test_optimizer_slots_that_do_not_exist_yet_are_refused(tmp_path: pathlib.Path) -> None:
    Variables(optimizer=adam([tf.Variable([1.0])])).save(tmp_path)
    with pytest.raises(ValueError, match="not in this run: optimizer/_variables"):
        Variables(optimizer=tf.keras.optimizers.Adam(0.1)).restore(tmp_path)


@pytest.mark.parametrize(
    ("create", "change"),
    [
        (Adam, {"beta_1": 0.5, "beta_2": 0.9, "learning_rate": 0.01}),
        (partial(Adam, amsgrad=True), {"learning_rate": 0.01}),
        (RMSprop, {"rho": 0.5, "learning_rate": 0.01}),
    ],
)
def test_hyperparameters_keep_what_they_were_built_with(
    tmp_path: pathlib.Path, create: Callable[..., Any], change: dict[str, float]
) -> None:
    def build(**kwargs: float) -> tuple[tf.Module, Any]:
        agent = tf.Module()
        agent.weights = tf.Variable([1.0, 2.0])
        agent.optimizer = create(**kwargs)
        build_slots(agent.optimizer, [agent.weights])
        return agent, agent.optimizer

    first, optimizer = build()
    for _ in range(3):
        optimizer.apply_gradients([([1.0, -2.0], first.weights)])
    Variables(agent=first).save(tmp_path)
    other, changed = build(**change)
    other.weights.assign([0.0, 0.0])
    Variables(agent=other).restore(tmp_path)
    for name, value in change.items():
        assert getattr(changed, name) == np.float32(value)
    assert changed.iterations == 3
    np.testing.assert_array_equal(other.weights, first.weights)
    for slot in optimizer.get_slot_names():
        expected = optimizer.get_slot(first.weights, slot)
        assert np.any(expected != 0)
        np.testing.assert_array_equal(changed.get_slot(other.weights, slot), expected)


def test_host_state_round_trip(tmp_path: pathlib.Path) -> None:
    state = HostState(episodes=3, best=float("-inf"), returns=[1.5], name=None)
    state.save(tmp_path)
    other = HostState(episodes=0, best=0.0, returns=[], name="x")
    other.restore(tmp_path)
    assert other == state
    with pytest.raises(ValueError, match="missing .*: more; .* not in this run: best, name"):
        HostState(episodes=0, returns=[], more=0).restore(tmp_path)


def tensors(nest: object) -> tuple[Tensors, list]:
    held = [nest]
    return Tensors(lambda: held[0], lambda new: held.__setitem__(0, new)), held


def test_tensors_round_trip(tmp_path: pathlib.Path) -> None:
    nest = {
        "file": tf.constant([True, False]),
        "step": (tf.constant(2**60, tf.int64), np.array([[255, 0]], np.uint8), ()),
        "empty": np.zeros([0, 3], np.float32),
    }
    part, held = tensors(nest)
    part.save(tmp_path)
    other, held = tensors(tf.nest.map_structure(lambda x: x * 0 if x.dtype != bool else x, nest))
    other.restore(tmp_path)
    tf.nest.assert_same_structure(held[0], nest)
    for actual, expected in zip(*map(tf.nest.flatten, (held[0], nest)), strict=True):
        assert tf.is_tensor(actual) == tf.is_tensor(expected)
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected)


def test_a_single_tensor_and_an_empty_nest_are_nests(tmp_path: pathlib.Path) -> None:
    for i, nest in enumerate((tf.constant(1.5), ())):
        (tmp_path / str(i)).mkdir()
        part, held = tensors(nest)
        part.save(tmp_path / str(i))
        part.restore(tmp_path / str(i))
        assert held == [nest]


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ({"a": np.zeros(2), "b": np.zeros(1)}, "missing from the checkpoint: tensors/b"),
        ({}, "not in this run: tensors/a"),
        ({"a": np.zeros(2, np.float32)}, r"tensors/a \(float64 \[2\] .*, float32 \[2\] here"),
        ({"a": np.zeros((2, 1))}, r"tensors/a \(float64 \[2\] .*, float64 \[2, 1\] here"),
    ],
)
def test_other_tensors_are_refused(tmp_path: pathlib.Path, now: dict, message: str) -> None:
    tensors({"a": np.ones(2)})[0].save(tmp_path)
    part, held = tensors(now)
    with pytest.raises(ValueError, match=message):
        part.restore(tmp_path)
    assert held[0] is now


def test_tensors_that_npy_cannot_describe_are_refused_when_saved(tmp_path: pathlib.Path) -> None:
    for value in (np.array("text"), tf.constant([1.0], tf.bfloat16)):
        with pytest.raises(ValueError, match="tensors/a has dtype .* cannot be saved"):
            tensors({"a": value})[0].save(tmp_path)


def network(seed: int = 0, units: int = 3) -> tf.keras.Model:
    inputs = tf.keras.Input([4])
    initializer = tf.keras.initializers.RandomUniform(seed=seed)
    outputs = tf.keras.layers.Dense(units, kernel_initializer=initializer)(inputs)
    return tf.keras.Model(inputs, outputs)


def test_the_digest_of_weights_knows_their_values_and_nothing_of_the_process() -> None:
    first = network()
    digest = weights_sha256({"q": first})
    later = network()
    assert first.weights[0].name != later.weights[0].name
    assert weights_sha256({"q": later}) == digest
    later.weights[1].assign_add([0.0, 0.0, 1e-7])
    others = [{"q": later}, {"target": first}, {"q": network(seed=1)}, {"q": first, "p": first}]
    assert len({digest, *map(weights_sha256, others)}) == 5


def test_the_digest_of_weights_knows_dtype_and_shape() -> None:
    zeros = [tf.zeros([4]), tf.zeros([2, 2]), tf.zeros([4], tf.int32)]
    assert len({weights_sha256({"x": tf.Variable(x)}) for x in zeros}) == 3


def test_the_digest_of_weights_is_of_path_dtype_shape_and_bytes() -> None:
    b, a = np.arange(3, dtype=np.float32), np.array(7, np.int64)
    variables = {"b": tf.Variable(b), "a": tf.Variable(a)}
    path = "{}/.ATTRIBUTES/VARIABLE_VALUE\0".format
    expected = hashlib.sha256(
        path("a").encode()
        + b"int64\0()\0"
        + a.tobytes()
        + path("b").encode()
        + b"float32\0(3,)\0"
        + b.tobytes()
    )
    assert weights_sha256(variables) == expected.hexdigest()
