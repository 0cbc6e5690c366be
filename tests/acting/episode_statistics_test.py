import errno
import json
import math
import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from host_loops import events
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing import plugin_event_accumulator

from pipeline.acting import episode_statistics
from pipeline.runs import tensorboard_log
from pipeline.utils import errors, jsonl

FIRST, MID, LAST = 0, 1, 2


class NaiveStatistics:
    """Reference implementation that processes one row of one environment at a time."""

    def __init__(self, num_envs: int) -> None:
        self.returns = [0.0] * num_envs
        self.lengths = [0] * num_envs
        self.finished: list[tuple[float, int]] = []
        self.env_steps = 0

    def update(self, step_type: np.ndarray, next_step_type: np.ndarray, reward: np.ndarray) -> None:
        for t, n in np.ndindex(*reward.shape):
            if step_type[t, n] == LAST:
                continue
            self.env_steps += 1
            self.returns[n] += float(reward[t, n])
            self.lengths[n] += 1
            if next_step_type[t, n] == LAST:
                self.finished.append((self.returns[n], self.lengths[n]))
                self.returns[n], self.lengths[n] = 0.0, 0

    def assert_equals(self, statistics: episode_statistics.EpisodeStatistics) -> None:
        np.testing.assert_array_equal(statistics.episode_return, self.returns)
        np.testing.assert_array_equal(statistics.episode_length, self.lengths)
        returns, lengths = zip(*self.finished[-100:], strict=True) if self.finished else ((), ())
        missing = 100 - len(returns)
        np.testing.assert_array_equal(statistics.last_returns, [math.nan] * missing + [*returns])
        np.testing.assert_array_equal(statistics.last_lengths, [0] * missing + [*lengths])
        assert int(statistics.episodes) == len(self.finished)
        assert float(statistics.return_sum) == sum(value for value, _ in self.finished)
        assert int(statistics.env_steps) == self.env_steps


@tf.function(
    input_signature=[
        tf.TensorSpec([None, None], tf.int32),
        tf.TensorSpec([None, None], tf.int32),
        tf.TensorSpec([None, None], tf.float32),
        episode_statistics.EpisodeStatistics(
            tf.TensorSpec([None], tf.float64),
            tf.TensorSpec([None], tf.int64),
            tf.TensorSpec([100], tf.float32),
            tf.TensorSpec([100], tf.int64),
            tf.TensorSpec([], tf.int64),
            tf.TensorSpec([], tf.float64),
            tf.TensorSpec([], tf.int64),
        ),
    ]
)
def update(
    step_type: tf.Tensor,
    next_step_type: tf.Tensor,
    reward: tf.Tensor,
    statistics: episode_statistics.EpisodeStatistics,
) -> episode_statistics.EpisodeStatistics:
    return episode_statistics.update_statistics(statistics, step_type, next_step_type, reward)


def step_types(ends: np.ndarray) -> np.ndarray:
    """Returns step types [T+1, N]; `ends` [T, N] says where an episode in progress ends."""
    types = np.zeros([ends.shape[0] + 1, ends.shape[1]], np.int32)
    for t, n in np.ndindex(*ends.shape):
        types[t + 1, n] = FIRST if types[t, n] == LAST else LAST if ends[t, n] else MID
    return types


@st.composite
def rows(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
    num_rows, num_envs = draw(st.integers(1, 60)), draw(st.integers(1, 6))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ends = random.random([num_rows, num_envs]) < draw(st.sampled_from([0.0, 0.05, 0.3, 1.0]))
    types = step_types(ends)
    if draw(st.booleans()):  # orders that no environment produces, such as LAST after LAST
        types = random.integers(FIRST, LAST + 1, types.shape).astype(np.int32)
    # Boundary rows have a reward too, which must not count.
    reward = random.integers(-9, 10, [num_rows, num_envs]).astype(np.float32)
    cuts = draw(st.sets(st.integers(1, num_rows), max_size=5))
    return types[:-1], types[1:], reward, sorted({0, num_rows, *cuts})


@settings(max_examples=150)
@given(rows())
def test_statistics_equal_the_definition_however_rows_are_cut(
    drawn: tuple[np.ndarray, np.ndarray, np.ndarray, list[int]],
) -> None:
    *arrays, cuts = drawn
    expected = NaiveStatistics(arrays[0].shape[1])
    statistics = episode_statistics.initial_statistics(arrays[0].shape[1])
    for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
        part = [array[start:stop] for array in arrays]
        expected.update(*part)
        statistics = update(*map(tf.constant, part), statistics)
        expected.assert_equals(statistics)


def test_simultaneous_ends_join_the_window_in_order_of_environment() -> None:
    statistics = update(
        tf.fill([1, 3], MID),
        tf.fill([1, 3], LAST),
        tf.constant([[5.0, 3.0, 4.0]]),
        episode_statistics.initial_statistics(3),
    )
    assert statistics.last_returns[-3:].numpy().tolist() == [5.0, 3.0, 4.0]


def test_more_than_a_window_of_episodes_in_one_call() -> None:
    ends = np.ones([130, 4], bool)  # steps and boundary rows alternate
    types = step_types(ends)
    reward = np.arange(520, dtype=np.float32).reshape(130, 4)
    expected = NaiveStatistics(4)
    expected.update(types[:-1], types[1:], reward)
    assert len(expected.finished) > 100
    arrays = map(tf.constant, (types[:-1], types[1:], reward))
    expected.assert_equals(update(*arrays, episode_statistics.initial_statistics(4)))


def test_statistics_carry_through_a_graph_loop() -> None:
    @tf.function
    def loop(iterations: tf.Tensor) -> episode_statistics.EpisodeStatistics:
        statistics = episode_statistics.initial_statistics(2)
        for iteration in tf.range(iterations):
            ends = tf.equal(iteration % 3, 2)
            next_step_type = tf.fill([1, 2], tf.where(ends, LAST, MID))
            statistics = episode_statistics.update_statistics(
                statistics, tf.fill([1, 2], MID), next_step_type, tf.ones([1, 2])
            )
        return statistics

    statistics = loop(tf.constant(7))
    assert statistics.last_returns[-4:].numpy().tolist() == [3.0] * 4
    assert statistics.episode_return.numpy().tolist() == [1.0, 1.0]
    assert int(statistics.episodes) == 4
    assert int(statistics.env_steps) == 14


def test_record_before_the_first_episode_has_no_means() -> None:
    record = episode_statistics.metrics_record(
        episode_statistics.initial_statistics(2),
        updates=0,
        wall_seconds=1.5,
        env_steps_per_second=0.0,
    )
    assert record == {
        "env_steps": 0,
        "updates": 0,
        "episodes": 0,
        "wall_seconds": 1.5,
        "env_steps_per_second": 0.0,
        "return_mean_100": None,
        "episode_length_mean_100": None,
        "return_sum": 0.0,
    }


def test_record_averages_the_episodes_there_are_and_takes_any_scalar() -> None:
    statistics = episode_statistics.initial_statistics(1)
    for reward in (1.0, 4.0):
        statistics = update(
            tf.constant([[MID], [MID]]),
            tf.constant([[MID], [LAST]]),
            tf.constant([[0.0], [reward]]),
            statistics,
        )
    record = episode_statistics.metrics_record(
        statistics,
        updates=3,
        wall_seconds=2.0,
        env_steps_per_second=2.0,
        loss=tf.constant(0.5),
        epsilon=np.float32(0.25),
        gradient_norm=math.inf,
        evaluation_return_mean=None,
    )
    assert (record["env_steps"], record["updates"], record["episodes"]) == (4, 3, 2)
    assert (record["return_mean_100"], record["episode_length_mean_100"]) == (2.5, 2.0)
    assert record["return_sum"] == 5.0
    assert (record["loss"], record["epsilon"]) == (0.5, 0.25)
    assert record["gradient_norm"] is None
    assert record["evaluation_return_mean"] is None
    json.dumps(record, allow_nan=False)


def test_jsonl_appends_flushed_lines_of_plain_json(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "new" / "eval.jsonl"
    log = jsonl.JsonlLog(path)
    log.write({"env_steps": tf.constant(5), "returns": np.array([1.0, math.nan]), "name": "x"})
    log.write({"env_steps": np.int64(6), "loss": math.inf, "nested": {"a": (1, np.float32(0.5))}})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"env_steps": 5, "returns": [1.0, None], "name": "x"},
        {"env_steps": 6, "loss": None, "nested": {"a": [1, 0.5]}},
    ]
    log.close()


def test_jsonl_resume_cuts_later_records_and_a_torn_line(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = jsonl.JsonlLog(path)
    for env_steps in (100, 200, 300):
        log.write({"env_steps": env_steps})
    log.close()
    with path.open("a") as file:
        file.write('{"env_steps": 15')
    resumed = jsonl.JsonlLog(path)
    resumed.truncate_after(200)
    resumed.write({"env_steps": 300, "again": True})
    resumed.close()
    assert jsonl.read_jsonl(path) == [
        {"env_steps": 100},
        {"env_steps": 200},
        {"env_steps": 300, "again": True},
    ]
    assert [item.name for item in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_jsonl_truncate_of_an_open_log_and_of_a_missing_one(tmp_path: pathlib.Path) -> None:
    log = jsonl.JsonlLog(tmp_path / "metrics.jsonl")
    log.truncate_after(0)
    assert not (tmp_path / "metrics.jsonl").exists()
    log.write({"env_steps": 1})
    log.truncate_after(0)
    log.write({"env_steps": 2})
    log.close()
    assert jsonl.read_jsonl(tmp_path / "metrics.jsonl") == [{"env_steps": 2}]


@pytest.mark.parametrize("writes_between", [False, True])
def test_a_failed_sync_loses_no_record(tmp_path, monkeypatch, writes_between):
    """Syncs as a file server does that is full: the error comes once, and the data is dropped."""
    path, sync = tmp_path / "metrics.jsonl", os.fsync
    log = jsonl.JsonlLog(path)
    log.write({"env_steps": 1})
    log.sync()
    size = path.stat().st_size
    log.write({"env_steps": 2})

    def drop(descriptor):
        os.ftruncate(descriptor, size)
        monkeypatch.setattr(os, "fsync", sync)
        raise OSError(errno.EDQUOT, "the quota is used up")

    monkeypatch.setattr(os, "fsync", drop)
    with pytest.raises(OSError, match="quota"):
        log.sync()
    if writes_between:
        log.write({"env_steps": 3})
    log.sync()
    log.close()
    steps = [record["env_steps"] for record in jsonl.read_jsonl(path)]
    assert steps == ([1, 2, 3] if writes_between else [1, 2])


def test_a_log_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(errors.UserError, match="cannot read .*: Is a directory"):
        jsonl.read_jsonl(tmp_path)
    assert jsonl.read_jsonl(tmp_path / "missing.jsonl") == []


@pytest.mark.parametrize("line", ["nonsense", "[1]"])
def test_jsonl_names_a_line_that_is_no_record(tmp_path: pathlib.Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"env_steps": 1}}\n{line}\n{{"env_steps": 2}}\n')
    with pytest.raises(errors.UserError, match=r"metrics\.jsonl, line 2"):
        jsonl.JsonlLog(path).truncate_after(5)


def shown(accumulator: plugin_event_accumulator.EventAccumulator, tag: str) -> list[tuple]:
    accumulator.Reload()
    events = accumulator.Tensors(tag)
    return [(event.step, float(tf.make_ndarray(event.tensor_proto))) for event in events]


def open_tensorboard(folder: pathlib.Path) -> plugin_event_accumulator.EventAccumulator:
    everything = {"scalars": 0}
    return plugin_event_accumulator.EventAccumulator(
        str(folder), tensor_size_guidance=everything
    ).Reload()


def test_tensorboard_shows_each_record_once_after_resumes(tmp_path: pathlib.Path) -> None:
    log = tensorboard_log.EventLog(tmp_path)
    for env_steps in (100, 200, 300, 400):
        log.write({"env_steps": env_steps, "loss": 1.0, "name": "x", "empty": None})
    log.write({"env_steps": 350, "return_mean": 7.0}, prefix="evaluation/")
    watching = open_tensorboard(tmp_path)
    assert [step for step, _ in shown(watching, "loss")] == [100, 200, 300, 400]
    assert watching.Tags()["tensors"] == ["loss", "evaluation/return_mean"]

    for session, resumed_at in ((2.0, 200), (3.0, 300)):
        log = tensorboard_log.EventLog(tmp_path)
        log.truncate_after(*[resumed_at] * 3)
        for env_steps in (resumed_at + 100, resumed_at + 200):
            log.write({"env_steps": env_steps, "loss": session})

    expected = [(100, 1.0), (200, 1.0), (300, 2.0), (400, 3.0), (500, 3.0)]
    assert shown(watching, "loss") == expected
    assert shown(watching, "evaluation/return_mean") == []
    fresh = open_tensorboard(tmp_path)
    assert shown(fresh, "loss") == expected
    assert fresh.Tags()["tensors"] == ["loss"]


def test_events_that_a_run_resumed_at_their_step_writes_again_are_removed(
    tmp_path: pathlib.Path,
) -> None:
    """A run that was stopped in an evaluation has a checkpoint of before that evaluation."""
    log = tensorboard_log.EventLog(tmp_path)
    for env_steps in (200, 300):
        log.write({"env_steps": env_steps, "loss": 1.0})
        log.write({"env_steps": env_steps, "return_mean": 7.0}, tensorboard_log.EVALUATION)
    log.truncate_after(logged=300, evaluated=200, env_steps=300)
    shows = open_tensorboard(tmp_path)
    assert shown(shows, "loss") == [(200, 1.0), (300, 1.0)]
    assert shown(shows, "evaluation/return_mean") == [(200, 7.0)]
    log.truncate_after(logged=200, evaluated=200, env_steps=300)
    assert shown(open_tensorboard(tmp_path), "loss") == [(200, 1.0)]


def test_counts_are_histograms_in_tensorboard(tmp_path: pathlib.Path) -> None:
    log = tensorboard_log.EventLog(tmp_path)
    log.write({"env_steps": 100, "staleness_counts": [0, 2, 3], "returns": [1.0, 2.0]})
    log.write({"env_steps": 200, "staleness_counts": []})
    log.close()
    ((step, value),) = events(tmp_path)
    assert (step, value.tag) == (100, "staleness_counts")
    assert (value.histo.min, value.histo.max, value.histo.num) == (1, 2, 5)
    assert (value.histo.sum, value.histo.sum_squares) == (8, 14)
    assert list(value.histo.bucket_limit) == [0.5, 1.5, 2.5]
    assert list(value.histo.bucket) == [0, 2, 3]


def test_event_files_hold_each_record_once_after_a_kill(tmp_path: pathlib.Path) -> None:
    log = tensorboard_log.EventLog(tmp_path)
    for env_steps in (100, 200, 300):
        log.write({"env_steps": env_steps, "loss": 1.0})
    (path,) = tmp_path.iterdir()
    torn = path.read_bytes()[:-5]
    path.write_bytes(torn)
    resumed = tensorboard_log.EventLog(tmp_path)
    resumed.truncate_after(200, 200, 200)
    resumed.write({"env_steps": 300, "loss": 2.0})
    resumed.close()
    assert all_records(tmp_path) == [(100, 1.0), (200, 1.0), (300, 2.0)]


def test_event_files_of_other_names_are_left_alone(tmp_path: pathlib.Path) -> None:
    kept = [tmp_path / f"events.out.tfevents.{name}" for name in ("old", "1old.host.5")]
    for path in kept:
        path.write_text("mine")
    log = tensorboard_log.EventLog(tmp_path)
    log.truncate_after(0, 0, 0)
    log.write({"env_steps": 1, "loss": 1.0})
    log.close()
    assert [path.read_text() for path in kept] == ["mine", "mine"]


def test_a_resume_reads_back_to_the_event_file_that_it_goes_on_from(tmp_path: pathlib.Path) -> None:
    for begun in (0, 100, 200):
        log = tensorboard_log.EventLog(tmp_path)
        log.truncate_after(*[begun] * 3)
        log.write({"env_steps": begun + 100, "loss": 1.0})
        log.close()
    first, second, third = sorted(tmp_path.iterdir())

    def rewritten(env_steps: int) -> list[bool]:
        before = [path.stat().st_ino for path in (first, second, third)]
        tensorboard_log.EventLog(tmp_path).truncate_after(*[env_steps] * 3)
        after = [path.stat().st_ino for path in (first, second, third)]
        return [old != new for old, new in zip(before, after, strict=True)]

    assert rewritten(250) == [False, False, True]
    assert all_records(tmp_path) == [(100, 1.0), (200, 1.0)]
    assert rewritten(150) == [False, True, True]
    assert all_records(tmp_path) == [(100, 1.0)]


def test_event_files_sort_by_age_under_a_clock_that_went_back(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for env_steps, clock in ((100, 2e9), (200, 1e9), (300, 1e9)):
        monkeypatch.setattr(tensorboard_log.time, "time", lambda clock=clock: clock)
        log = tensorboard_log.EventLog(tmp_path)
        log.write({"env_steps": env_steps, "loss": 1.0})
        log.close()
    assert [step for step, _ in all_records(tmp_path)] == [100, 200, 300]
    assert len(os.listdir(tmp_path)) == 3


def all_records(folder: pathlib.Path) -> list[tuple[int, float]]:
    return [(step, value.simple_value) for step, value in events(folder)]


def test_returns_of_long_episodes_are_not_rounded() -> None:
    statistics = episode_statistics.initial_statistics(1)
    statistics = statistics._replace(episode_return=tf.constant([1e8], tf.float64))
    for last in (MID, LAST):
        statistics = update(
            tf.fill([1, 1], MID), tf.fill([1, 1], last), tf.constant([[0.5]]), statistics
        )
    assert statistics.return_sum.numpy() == 1e8 + 1.0
