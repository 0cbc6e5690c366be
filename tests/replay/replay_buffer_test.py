"""Tests of the replay buffer against a naive list of rows."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import gymnasium
import numpy as np
import pytest
import tensorflow as tf
from damages import unreadable
from graph_operations import stateful_draws, stateless_draws
from hypothesis import given, settings
from hypothesis import strategies as st
from tf_agents.trajectories import trajectory

from pipeline.replay import columns, size_checks
from pipeline.replay.replay_buffer import ReplayBuffer
from pipeline.utils.errors import UserError

FIRST, MID, LAST = 0, 1, 2
SIDE = 36  # the smallest side of an image that counts as a frame


def data_spec(stack: int = 0) -> trajectory.Trajectory:
    """Returns a spec with stacks of `stack` frames, or vectors for 0, and a nested policy_info."""
    vector = tf.TensorSpec([3], tf.float32)
    stacked = tf.TensorSpec([stack, SIDE, SIDE], tf.uint8)
    return trajectory.Trajectory(
        step_type=tf.TensorSpec([], tf.int32),
        observation=stacked if stack else vector,
        action=tf.TensorSpec([], tf.int64),
        policy_info={
            "logits": tf.TensorSpec([2], tf.float32),
            "greedy": tf.TensorSpec([], tf.bool),
        },
        next_step_type=tf.TensorSpec([], tf.int32),
        reward=tf.TensorSpec([], tf.float32),
        discount=tf.TensorSpec([], tf.float32),
    )


class Stream:
    """Made-up rows of one environment, all of which are kept, with observations as seen.

    The first stack of an episode is padded with zero frames, or repeats its first frame.
    """

    def __init__(self, number: int, stack: int, seed: int, repeats: bool = False) -> None:
        self.rows: list[trajectory.Trajectory] = []
        self._rng = np.random.default_rng([seed, number])
        self._number, self._stack, self._repeats = number, stack, repeats
        self._start_episode()

    def _start_episode(self) -> None:
        self.steps_left = int(self._rng.integers(1, 9))
        self._step_type = FIRST
        self._frames = [np.zeros([SIDE, SIDE], np.uint8)] * self._stack

    def _observation(self) -> np.ndarray:
        row = len(self.rows)
        if not self._stack:
            return np.array([self._number, row, self._step_type], np.float32)
        frame = np.full([SIDE, SIDE], 1 + (97 * self._number + row) % 255, np.uint8)
        repeat = self._repeats and self._step_type == FIRST
        self._frames = [frame] * self._stack if repeat else [*self._frames[1:], frame]
        return np.stack(self._frames)

    def step(self) -> trajectory.Trajectory:
        boundary, ends = self._step_type == LAST, self.steps_left == 1
        terminated = ends and not boundary and self._rng.random() < 0.5
        row = trajectory.Trajectory(
            step_type=np.int32(self._step_type),
            observation=self._observation(),
            action=np.int64(10**12 * self._number + len(self.rows)),
            policy_info={
                "logits": self._rng.normal(size=2).astype(np.float32),
                "greedy": np.bool_(self._rng.random() < 0.5),
            },
            next_step_type=np.int32(FIRST if boundary else LAST if ends else MID),
            reward=np.float32(0 if boundary else self._rng.normal()),
            discount=np.float32(0 if terminated else 1),
        )
        self.rows.append(row)
        if boundary:
            self._start_episode()
        else:
            self._step_type = int(row.next_step_type)
            self.steps_left -= 1
        return row

    def interrupt(self) -> None:
        """Restarts the environment, which makes the current time step the last of its episode."""
        if self.rows[-1].step_type != LAST:
            self.rows[-1] = self.rows[-1]._replace(next_step_type=np.int32(LAST))
        self._step_type = LAST


class FlickeringEnv(gymnasium.Env):
    """Environment in which every frame has another shade."""

    observation_space = gymnasium.spaces.Box(0, 255, (SIDE, SIDE), np.uint8)
    action_space = gymnasium.spaces.Discrete(1)
    _shade = 0

    def _frame(self) -> np.ndarray:
        self._shade += 1
        return np.full([SIDE, SIDE], self._shade, np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._frame(), {}

    def step(self, action: Any) -> Any:
        return self._frame(), 0.0, False, False, {}


def stack_rows(rows: list[Any], axis: int = 0) -> Any:
    return tf.nest.map_structure(lambda *leaves: np.stack(leaves, axis), *rows)


def collect(buffer: ReplayBuffer, streams: list[Stream], ids: list[int], num_rows: int) -> None:
    columns = [stack_rows([streams[i].step() for _ in range(num_rows)]) for i in ids]
    rows = tf.nest.map_structure(tf.constant, stack_rows(columns, axis=1))
    buffer.add(tf.constant(ids), rows)


def create(stack: int = 0, num_envs: int = 1, **kwargs: Any) -> ReplayBuffer:
    settings = {"sequence_length": 2, "seed": 0, "batch_size": 512} | kwargs
    return ReplayBuffer(data_spec(stack), num_envs, **settings)


def valid_starts(stream: Stream, capacity: int, length: int, stack: int) -> set[int]:
    """Returns positions p whose rows p ... p + length - 1 exist and whose stack is intact."""
    written = len(stream.rows)
    intact = range(max(0, written - capacity + max(stack, 1) - 1), written)
    return {p for p in intact if p + length <= written}


def check_batch(
    batch: tuple[trajectory.Trajectory, tf.Tensor, tf.Tensor],
    streams: list[Stream],
    capacity: int,
    length: int,
) -> set[tuple[int, int]]:
    """Compares a batch with the naive lists and returns the (stream, position) pairs drawn."""
    rows, weights, keys = tf.nest.map_structure(lambda x: x.numpy(), batch)
    numbers, positions = np.divmod(rows.action[:, 0], 10**12)
    np.testing.assert_array_equal(keys, numbers * capacity + positions % capacity)
    np.testing.assert_array_equal(weights, np.float32(rows.step_type[:, 0] != LAST))
    for number in set(numbers.tolist()):
        of_stream = numbers == number
        places = positions[of_stream][:, np.newaxis] + np.arange(length)
        written = stack_rows(streams[number].rows)
        for column, expected in zip(tf.nest.flatten(rows), tf.nest.flatten(written), strict=True):
            np.testing.assert_array_equal(column[of_stream], expected[places])
    return set(zip(numbers.tolist(), positions.tolist(), strict=True))


@settings(max_examples=25)
@given(data=st.data())
def test_samples_what_a_naive_list_holds(data: st.DataObject) -> None:
    stack = data.draw(st.sampled_from([0, 1, 2, 4]), "stack")
    length = data.draw(st.integers(1, 5), "sequence_length")
    num_envs = data.draw(st.integers(1, 3), "num_envs")
    capacity = length + max(stack, 1) - 1 + data.draw(st.integers(0, 12), "spare rows")
    seed = data.draw(st.integers(0, 99), "seed")
    total = capacity * num_envs + data.draw(st.integers(0, num_envs - 1), "surplus")
    buffer = create(stack, num_envs, capacity=total, sequence_length=length, seed=seed)
    streams = [Stream(i, stack, seed) for i in range(num_envs)]
    most = capacity - max(stack, 1) + 1
    for _ in range(data.draw(st.integers(1, 6), "adds")):
        ids = data.draw(st.lists(st.integers(0, num_envs - 1), min_size=1, unique=True), "ids")
        collect(buffer, streams, ids, data.draw(st.integers(1, most), "rows"))
    valid = {
        (n, p) for n in range(num_envs) for p in valid_starts(streams[n], capacity, length, stack)
    }
    assert buffer.size == sum(min(len(stream.rows), capacity) for stream in streams)
    if not valid:
        with pytest.raises(UserError, match="initialize_replay_buffer.num_env_steps"):
            buffer.check_ready()
        return
    buffer.check_ready()
    batches = [buffer.next_batch() for _ in range(2)]
    drawn = [check_batch(batch, streams, capacity, length) for batch in batches]
    assert set.union(*drawn) == valid


def test_no_stack_crosses_the_seam() -> None:
    buffer, stream = create(4, capacity=8), Stream(0, 4, 0)
    stream.steps_left = 100
    for written in range(1, 30):
        collect(buffer, [stream], [0], 1)
        if written < 2:
            continue
        drawn = check_batch(buffer.next_batch(), [stream], 8, 2)
        lowest = max(0, written - 5)
        assert drawn == {(0, p) for p in range(lowest, written - 1)}


def test_start_rows_are_equally_likely_when_fills_differ() -> None:
    buffer, streams = create(num_envs=3, capacity=90), [Stream(i, 0, 0) for i in range(3)]
    collect(buffer, streams, [0], 5)
    collect(buffer, streams, [2], 30)
    collect(buffer, streams, [2], 7)
    counts = np.zeros(90)
    for _ in range(100):
        np.add.at(counts, buffer.next_batch()[2].numpy(), 1)
    starts = counts[counts > 0]
    assert starts.size == 4 + 29
    mean = starts.mean()
    chi_square = np.sum((starts - mean) ** 2) / mean
    assert chi_square < 32 + 3 * np.sqrt(2 * 32)


@pytest.mark.parametrize("stack", [0, 4])
def test_save_and_restore_are_exact(tmp_path: pathlib.Path, stack: int) -> None:
    buffer, restored = (create(stack, num_envs=2, capacity=40) for _ in range(2))
    streams = [Stream(i, stack, 0) for i in range(2)]
    collect(buffer, streams, [0, 1], 13)
    collect(buffer, streams, [1], 14)
    buffer.next_batch()
    buffer.save(tmp_path)
    restored.restore(tmp_path)
    assert restored.size == buffer.size
    restored.check_ready()
    for _ in range(3):
        tf.nest.map_structure(
            np.testing.assert_array_equal, restored.next_batch(), buffer.next_batch()
        )
        columns = [stack_rows([s.step() for _ in range(4)]) for s in streams]
        rows = tf.nest.map_structure(tf.constant, stack_rows(columns, axis=1))
        buffer.add(tf.range(2), rows)
        restored.add(tf.range(2), rows)
    check_batch(restored.next_batch(), streams, 20, 2)


def test_only_filled_rows_are_saved(tmp_path: pathlib.Path) -> None:
    buffer, streams = create(num_envs=2, capacity=1000), [Stream(i, 0, 0) for i in range(2)]
    collect(buffer, streams, [0, 1], 3)
    buffer.save(tmp_path)
    for stream, first in ((0, 0), (1, 10**12)):
        path = tmp_path / f"action_0-{stream:04d}-000000000.rows"
        actions = np.fromfile(path, np.int64)
        np.testing.assert_array_equal(actions, [first, first + 1, first + 2])
    assert json.loads((tmp_path / "replay_buffer.json").read_text())["positions"] == [3, 3]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_envs": 1, "capacity": 20}, "saved with num_envs = 2, but now has num_envs = 1"),
        ({"capacity": 42}, "with stream_capacity = 20, but now has stream_capacity = 21"),
        ({"stack": 4}, "saved with stack = 1, but now has stack = 4"),
        ({"stack": 1}, "columns = .*'float32', \\[3\\].*now has .*'uint8', \\[1, 36, 36\\]"),
    ],
)
def test_restore_names_what_differs(
    tmp_path: pathlib.Path, change: dict[str, int], message: str
) -> None:
    buffer, streams = create(num_envs=2, capacity=40), [Stream(i, 0, 0) for i in range(2)]
    collect(buffer, streams, [0, 1], 13)
    buffer.save(tmp_path)
    with pytest.raises(ValueError, match=message):
        create(**({"num_envs": 2, "capacity": 40} | change)).restore(tmp_path)


def test_another_seed_draws_other_rows() -> None:
    keys = []
    for seed in (1, 2):
        buffer = create(capacity=90, seed=seed)
        collect(buffer, [Stream(0, 0, 0)], [0], 60)
        keys.append(buffer.next_batch()[2].numpy())
    assert np.mean(keys[0] != keys[1]) > 0.9


def test_restore_refuses_a_cut_file_and_a_filled_buffer(tmp_path: pathlib.Path) -> None:
    buffer, streams = create(capacity=40), [Stream(0, 0, 0)]
    collect(buffer, streams, [0], 13)
    buffer.save(tmp_path)
    with pytest.raises(ValueError, match="holds 13 rows"):
        buffer.restore(tmp_path)
    file = tmp_path / "reward_0-0000-000000000.rows"
    with unreadable(file, "read_bytes"), pytest.raises(OSError, match="Input/output error"):
        create(capacity=40).restore(tmp_path)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match=f"{file.name} cannot be read"):
        create(capacity=40).restore(tmp_path)


@pytest.mark.parametrize("stack", [0, 4])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 29])
def test_truncated_episodes_end_with_the_time_step_that_follows(num_rows: int, stack: int) -> None:
    buffer = create(stack, num_envs=2, capacity=40)
    streams = [Stream(0, stack, 0), Stream(1, stack, 0)]
    stream = streams[1]
    stream.steps_left = 100
    for _ in range(num_rows):
        collect(buffer, streams, [1], 1)
    buffer.truncate()
    stream.interrupt()
    assert stream.rows[-1].next_step_type == LAST
    for _ in range(6):
        collect(buffer, streams, [1], 1)
    assert stream.rows[num_rows].step_type == LAST
    assert stream.rows[num_rows + 1].step_type == FIRST
    drawn = check_batch(buffer.next_batch(), streams, 20, 2)
    assert {p for _, p in drawn} == valid_starts(stream, 20, 2, stack)


@pytest.mark.parametrize("newest", [FIRST, MID, LAST])
def test_truncating_keeps_the_episodes_apart(newest: int) -> None:
    """Checks any newest row; after a boundary row, an episode without transitions is cut off."""
    buffer, stream = create(2, capacity=40), Stream(0, 2, 0)
    for step_type in (LAST, newest):
        while not stream.rows or stream.rows[-1].step_type != step_type:
            collect(buffer, [stream], [0], 1)
    last = len(stream.rows)
    buffer.truncate()
    stream.interrupt()
    assert stream.rows[-1].next_step_type == (FIRST if newest == LAST else LAST)
    collect(buffer, [stream], [0], 3)
    drawn = check_batch(buffer.next_batch(), [stream], 40, 2)
    assert {(0, last - 1), (0, last), (0, last + 1)} <= drawn
    older = [stream.rows[p].observation[0] for p in (last, last + 1)]
    assert older[0].any() == (newest != LAST)
    assert not older[1].any()


def test_truncating_an_empty_buffer_does_nothing() -> None:
    buffer = create(2, capacity=40)
    buffer.truncate()
    assert buffer.size == 0


@pytest.mark.parametrize(
    "num_envs, env_steps_per_update, expected",
    [(1, 4, (4, 1)), (8, 4, (1, 2)), (3, 4, (4, 3)), (1, 0.5, (1, 2)), (2, 0.1, (1, 20))],
)
def test_iteration_sizes(
    num_envs: int, env_steps_per_update: float, expected: tuple[int, int]
) -> None:
    buffer = create(num_envs=num_envs, capacity=90, env_steps_per_update=env_steps_per_update)
    assert (buffer.collect_steps, buffer.num_batches) == expected


def test_user_errors() -> None:
    with pytest.raises(UserError, match="gives each of the 2 .* 4 rows, .* need 5. Set it to 10 "):
        create(4, num_envs=2, capacity=8)
    message = "4 rows of one iteration .*env_steps_per_update.* and 3 .* need 7. Set it to 14 "
    with pytest.raises(UserError, match=message):
        create(4, num_envs=2, capacity=13, env_steps_per_update=8)
    create(4, num_envs=2, capacity=14, env_steps_per_update=8)
    with pytest.raises(
        UserError, match="GiB, .*, but this process may use .*Lower ReplayBuffer.capacity"
    ):
        create(4, capacity=10**12)
    with pytest.raises(UserError, match="env_steps_per_update = 0: must be a number above 0"):
        create(capacity=8, env_steps_per_update=0)
    with pytest.raises(UserError, match="333 vector steps and 4_000 updates(.|\n)*such as 0.25"):
        create(4, num_envs=4, capacity=90, env_steps_per_update=0.333)
    with pytest.raises(UserError, match="ReplayBuffer.batch_size = 0: must be a whole number"):
        create(capacity=8, batch_size=0)
    with pytest.raises(UserError, match="ReplayBuffer.capacity = 80.0: must be a whole number"):
        create(capacity=80.0)  # a macro can bind this
    with pytest.raises(RuntimeError, match="capacity"):
        create()


def test_a_buffer_takes_less_than_the_memory_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_checks, "available_memory", lambda: 10_000)
    with pytest.raises(UserError, match="Lower ReplayBuffer.capacity below"):
        create(4, capacity=100)  # rows of more than 1,296 bytes each


@pytest.mark.parametrize(
    ("dtype", "bad"), [(tf.float32, np.nan), (tf.float32, np.inf), (tf.float64, -1e39)]
)
def test_bad_rows_of_every_stream_are_found(dtype, bad) -> None:
    """Networks compute in float32, where -1e39 is minus infinity."""
    spec = [tf.TensorSpec([], dtype)]
    column = columns.create_column(spec[0], 10)
    values = tf.constant([0.0] * 6 + [bad] + [3e38] * 3, dtype)
    columns.scatter(column, tf.range(10, dtype=tf.int64), values)
    found = columns.bad_columns(spec, [column], np.array([0, 1, 5, 6]))
    assert found == ["0 of the rows collected"]
    assert columns.bad_columns(spec, [column], np.array([0, 1, 5, 9])) == []


def test_a_bad_row_is_found_until_it_is_overwritten() -> None:
    buffer, stream = create(0, 1, capacity=10), Stream(0, 0, 0)

    def add(reward: float) -> None:
        row = stream.step()._replace(reward=np.float32(reward))
        rows = tf.nest.map_structure(lambda x: tf.constant(np.asarray(x)[None, None]), row)
        buffer.add(tf.range(1), rows)

    for reward in [0.0] * 12 + [np.nan]:
        assert buffer.bad_columns() == []
        add(reward)
    for _ in range(10):
        assert buffer.bad_columns() == ["reward of the rows collected"]
        add(0.0)
    assert buffer.bad_columns() == []


def test_colour_images_are_not_taken_for_stacks() -> None:
    images = np.random.default_rng(0).integers(0, 256, [6, 1, 3, SIDE, SIDE], np.uint8)
    rows = stack_rows([Stream(0, 3, 0).step()] * 6)
    rows = tf.nest.map_structure(lambda x: tf.constant(x[:, np.newaxis]), rows)
    rows = rows._replace(observation=tf.constant(images), step_type=tf.constant([[0]] + [[1]] * 5))
    buffer = create(3, capacity=20)
    buffer.add(tf.range(1), rows)
    with pytest.raises(UserError, match="ReplayBuffer.store_single_frames = False"):
        buffer.check_rows()
    buffer = create(3, capacity=20, store_single_frames=False)
    buffer.add(tf.range(1), rows)
    buffer.check_rows()
    batch, _, keys = buffer.next_batch()
    np.testing.assert_array_equal(batch.observation[:, 0], images[keys.numpy(), 0])


def test_stacks_that_repeat_their_first_frame_are_refused(tmp_path: pathlib.Path) -> None:
    """Checks that they are refused, because sampling pads with zero frames instead."""
    buffer, stream = create(3, capacity=90), Stream(0, 3, 0, repeats=True)
    for _ in range(3):
        collect(buffer, [stream], [0], 20)
    assert stream.rows[-1].step_type != FIRST, "the newest stack alone would not tell"
    buffer.save(tmp_path)
    restored = create(3, capacity=90)
    restored.restore(tmp_path)
    for refusing in (buffer, restored):
        with pytest.raises(UserError, match='single_frames = False. .*padding_type="zero"'):
            refusing.check_rows()
    buffer, stream = create(3, capacity=90, store_single_frames=False), Stream(0, 3, 0, True)
    collect(buffer, [stream], [0], 20)
    buffer.check_rows()
    check_batch(buffer.next_batch(), [stream], 90, 2)


def with_gymnasium_stacks(padding_type: Any) -> ReplayBuffer:
    """Returns a buffer filled from gymnasium's own wrapper."""
    environment: gymnasium.Env = gymnasium.wrappers.FrameStackObservation(
        FlickeringEnv(), 3, padding_type=padding_type
    )
    buffer, made_up = create(3, capacity=90), Stream(0, 3, 0)
    for _ in range(20):
        row = made_up.step()
        seen = environment.reset()[0] if row.step_type == FIRST else environment.step(0)[0]
        row = row._replace(observation=np.asarray(seen))
        rows = tf.nest.map_structure(lambda x: tf.constant(x[None, None]), row)
        buffer.add(tf.range(1), rows)
    return buffer


def test_gymnasium_stacks_need_the_padding_that_the_message_recommends() -> None:
    with pytest.raises(UserError, match=r'"zero" \(in gymnasium.*FrameStackObservation\)\. '):
        with_gymnasium_stacks("reset").check_rows()
    with_gymnasium_stacks("zero").check_rows()


def iterations(buffer: ReplayBuffer, stream: Stream) -> Any:
    rows = tf.nest.map_structure(lambda x: tf.constant(x[None, None]), stream.step())

    @tf.function
    def run(count: tf.Tensor) -> tf.Tensor:
        drawn = tf.constant(0, tf.int64)
        for _ in tf.range(count):
            buffer.add(tf.range(1), rows)
            drawn += tf.reduce_sum(buffer.next_batch()[2])
        return drawn

    return run


def test_is_traced_once_while_it_fills() -> None:
    buffer, stream = create(2, capacity=9), Stream(0, 2, 0)
    collect(buffer, [stream], [0], 2)
    run = iterations(buffer, stream)
    for count in range(1, 9):
        run(tf.constant(count))
    assert run.experimental_get_tracing_count() == 1


def test_randomness_is_stateless() -> None:
    buffer, stream = create(2, capacity=9), Stream(0, 2, 0)
    graph = iterations(buffer, stream).get_concrete_function(tf.constant(1)).graph
    assert stateless_draws(graph) and not stateful_draws(graph)


def resident_bytes() -> int:
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


@pytest.mark.skipif(not pathlib.Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_memory_is_taken_as_rows_come_and_never_copied() -> None:
    before = resident_bytes()
    buffer, stream = create(2, capacity=500_000, batch_size=32), Stream(0, 2, 0)
    collect(buffer, [stream], [0], 2)
    iterations(buffer, stream)(tf.constant(100))
    assert resident_bytes() - before < 100 * 2**20  # the frames are 618 MiB
