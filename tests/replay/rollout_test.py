"""Tests of the rollout store against NumPy."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from graph_operations import stateful_draws, stateless_draws
from tf_agents.trajectories import trajectory

from pipeline.replay import size_checks
from pipeline.replay.rollout import Rollout
from pipeline.utils.errors import UserError

LAST = 2
NUM_ENVS, NUM_STEPS, MINIBATCH, EPOCHS = 3, 8, 6, 4
ROWS = NUM_ENVS * NUM_STEPS


def spec(*info: str) -> trajectory.Trajectory:
    scalar = tf.TensorSpec([], tf.float32)
    return trajectory.Trajectory(
        step_type=tf.TensorSpec([], tf.int32),
        observation=tf.TensorSpec([5], tf.float32),
        action=tf.TensorSpec([], tf.int64),
        policy_info={name: scalar for name in info},
        next_step_type=tf.TensorSpec([], tf.int32),
        reward=scalar,
        discount=scalar,
    )


def create(**kwargs: Any) -> Rollout:
    sizes = {"num_steps": NUM_STEPS, "minibatch_size": MINIBATCH, "num_epochs": EPOCHS}
    specs = {"training_spec": spec("logits", "advantage"), "sequence_length": 1}
    return Rollout(spec("logits"), NUM_ENVS, **({"seed": 3} | specs | sizes | kwargs))


def make_rows(seed: int = 0) -> trajectory.Trajectory:
    """Returns rows [NUM_STEPS, NUM_ENVS, ...] as NumPy arrays; a third are boundary rows."""
    rng = np.random.default_rng(seed)

    def draw(leaf: tf.TensorSpec) -> np.ndarray:
        shape = [NUM_STEPS, NUM_ENVS, *leaf.shape]
        return rng.integers(0, 3 if leaf.dtype == tf.int32 else 99, shape).astype(leaf.dtype.name)

    return tf.nest.map_structure(draw, spec("logits"))


def prepare(rows: trajectory.Trajectory) -> trajectory.Trajectory:
    """Adds sums over the time axis, so that a wrong layout shows."""
    info = {**rows.policy_info, "advantage": tf.cumsum(rows.reward, axis=0)}
    return rows._replace(policy_info=info)


def collect(rollout: Rollout, rows: trajectory.Trajectory, chunk: int = 2) -> None:
    for first in range(0, NUM_STEPS, chunk):
        part = tf.nest.map_structure(lambda x: tf.constant(x[first : first + chunk]), rows)  # noqa: B023
        rollout.add(tf.range(NUM_ENVS), part)


def draw_all(rollout: Rollout) -> list[Any]:
    return [rollout.next_batch() for _ in range(rollout.num_batches)]


def all_keys(batches: list[Any]) -> np.ndarray:
    return np.concatenate([keys for _, _, keys in batches]).reshape(EPOCHS, ROWS)


def test_every_epoch_is_another_permutation() -> None:
    rollout = create()
    orders: list[np.ndarray] = []
    for _ in range(2):
        collect(rollout, make_rows())
        rollout.begin(prepare)
        orders.extend(all_keys(draw_all(rollout)))
        rollout.end(lambda rows: None)
    np.testing.assert_array_equal(np.sort(orders, axis=1), np.tile(np.arange(ROWS), [8, 1]))
    assert len({tuple(order) for order in orders}) == 2 * EPOCHS


def test_another_seed_has_other_orders() -> None:
    orders = []
    for seed in (1, 2):
        rollout = create(seed=seed)
        collect(rollout, make_rows())
        rollout.begin(prepare)
        orders.append(all_keys(draw_all(rollout)))
    assert (orders[0] != orders[1]).any()


def test_every_order_is_equally_likely() -> None:
    rollout = create(num_steps=1, minibatch_size=3, num_epochs=6000)
    rollout.add(tf.range(3), tf.nest.map_structure(lambda x: tf.constant(x[:1]), make_rows()))
    rollout.begin(prepare)
    draw_orders = tf.function(
        lambda: tf.map_fn(lambda _: rollout.next_batch()[2], tf.range(6000, dtype=tf.int64))
    )
    orders = draw_orders().numpy() @ [9, 3, 1]
    _, counts = np.unique(orders, return_counts=True)
    assert counts.size == 6
    assert np.sum((counts - 1000) ** 2) / 1000 < 5 + 3 * np.sqrt(2 * 5)


@pytest.mark.parametrize("chunk", [1, 2, NUM_STEPS])
def test_minibatches_equal_numpy(chunk: int) -> None:
    rollout, rows = create(), make_rows()
    collect(rollout, rows, chunk)
    assert rollout.size == ROWS
    rollout.begin(prepare)
    advantage = np.cumsum(rows.reward, axis=0)
    expected = rows._replace(policy_info={**rows.policy_info, "advantage": advantage})
    flat = tf.nest.map_structure(lambda x: x.reshape(ROWS, 1, *x.shape[2:]), expected)
    for batch, weights, keys in draw_all(rollout):
        tf.nest.map_structure(
            lambda x, y: np.testing.assert_array_equal(x, y[keys.numpy()]),  # noqa: B023
            batch,
            flat,
        )
        assert weights.shape == [MINIBATCH] and weights.dtype == tf.float32
        np.testing.assert_array_equal(weights, flat.step_type[keys.numpy(), 0] != LAST)


def test_streams_may_come_one_by_one() -> None:
    rollout, rows = create(), make_rows()
    seen: list[trajectory.Trajectory] = []
    for stream in (2, 0, 1):
        part = tf.nest.map_structure(lambda x: tf.constant(x[:, [stream]]), rows)  # noqa: B023
        rollout.add(tf.constant([stream]), part)
    rollout.end(seen.append)
    tf.nest.map_structure(np.testing.assert_array_equal, seen[0], rows)


def test_end_hands_over_the_collected_rows_and_empties() -> None:
    rollout = create()
    seen: list[trajectory.Trajectory] = []
    for iteration in range(2):
        rows = make_rows(iteration)
        collect(rollout, rows)
        rollout.begin(prepare)
        rollout.end(seen.append)
        tf.nest.map_structure(np.testing.assert_array_equal, seen[-1], rows)
        assert rollout.size == 0


def test_begin_needs_a_whole_rollout() -> None:
    rollout = create()
    with pytest.raises(tf.errors.InvalidArgumentError, match="Rollout.num_steps = 8 rows"):
        rollout.begin(prepare)


def test_too_many_rows_are_refused() -> None:
    rollout = create()
    collect(rollout, make_rows())
    with pytest.raises(tf.errors.InvalidArgumentError):
        collect(rollout, make_rows(), 1)


def test_restored_rollout_goes_on_with_the_same_orders(tmp_path: pathlib.Path) -> None:
    rollout, restored = create(), create()
    collect(rollout, make_rows())
    rollout.begin(prepare)
    with pytest.raises(ValueError, match="holds 24 rows"):
        rollout.save(tmp_path)
    rollout.end(lambda rows: None)
    rollout.save(tmp_path)
    restored.restore(tmp_path)
    keys = []
    for each in (rollout, restored):
        collect(each, make_rows(1))
        each.begin(prepare)
        keys.append(all_keys(draw_all(each)))
    np.testing.assert_array_equal(keys[0], keys[1])
    with pytest.raises(ValueError, match="holds 24 rows"):
        restored.restore(tmp_path)


def test_nothing_is_found_in_rows_that_were_never_collected() -> None:
    """Frees memory full of NaN before, because the allocator returns it again."""
    for size in range(1, 4_000):
        tf.fill([size], np.float32(np.nan))
    assert all(create().bad_columns() == [] for _ in range(20))


def test_nan_is_found_in_collected_and_in_prepared_rows() -> None:
    def spoil(rows: trajectory.Trajectory) -> trajectory.Trajectory:
        prepared = prepare(rows)
        info = {**prepared.policy_info, "advantage": np.nan * rows.reward}
        return prepared._replace(policy_info=info)

    rollout = create()
    rows = make_rows()
    collect(rollout, rows)
    rollout.begin(prepare)
    assert rollout.bad_columns() == []
    rollout.begin(spoil)
    assert rollout.bad_columns() == ["policy_info.advantage of the rows collected"]
    rollout.end(lambda rows: None)
    rows.observation[5, 1, 2] = np.inf
    collect(rollout, rows)
    rollout.begin(prepare)
    assert rollout.bad_columns() == ["observation of the rows collected"]


def test_sizes() -> None:
    rollout = create()
    assert rollout.collect_steps == NUM_STEPS
    assert rollout.num_batches == EPOCHS * ROWS // MINIBATCH


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"minibatch_size": 7}, "minibatch_size = 7 .*Rollout.num_steps = 8 .* to 6 or 8,"),
        ({"minibatch_size": 25}, "minibatch_size = 25 .* to 24,"),
        ({"num_epochs": 0}, "Rollout.num_epochs = 0: must be a whole number, at least 1"),
    ],
)
def test_user_errors(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        create(**sizes)


def test_a_rollout_takes_less_than_the_memory_that_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(size_checks, "available_memory", lambda: 1_000)
    with pytest.raises(UserError, match="Rollout.num_steps = 8 needs .* Lower Rollout.num_steps"):
        create()


def test_an_iteration_is_traced_once_with_stateless_randomness() -> None:
    rollout = create()
    rows = tf.nest.map_structure(tf.constant, make_rows())
    total = tf.Variable(0.0)

    @tf.function
    def run(iterations: tf.Tensor) -> tf.Tensor:
        drawn = tf.constant(0, tf.int64)
        for _ in tf.range(iterations):
            rollout.add(tf.range(NUM_ENVS), rows)
            rollout.begin(prepare)
            for _ in tf.range(rollout.num_batches):
                drawn += tf.reduce_sum(rollout.next_batch()[2])
            rollout.end(lambda rows: total.assign_add(tf.reduce_sum(rows.reward)))
        return drawn

    for iterations in (1, 3):
        assert run(tf.constant(iterations)) == iterations * EPOCHS * sum(range(ROWS))
    assert total == 4 * np.sum(rows.reward)
    assert run.experimental_get_tracing_count() == 1
    graph = run.get_concrete_function(tf.constant(1)).graph
    assert stateless_draws(graph) and not stateful_draws(graph)
