"""Tests that readers of files raise only their documented errors, whatever a file holds.

`make test-crash` runs these with many more examples.
"""

import contextlib
import copy
import functools
import hashlib
import io
import json
import pathlib
import tempfile
import tracemalloc
import zlib

import numpy as np
import pytest
import tensorflow as tf
from fuzzing import fuzzed, mutated
from gymnasium.spaces import Box
from hypothesis import given
from hypothesis import strategies as st
from scripted_environments import EchoEnv, environment
from tf_agents.trajectories import trajectory

from pipeline import configuration
from pipeline.checkpointing import manifest
from pipeline.checkpointing.checkpoints import Checkpoints
from pipeline.checkpointing.exactness import Circumstances, Exactness
from pipeline.checkpointing.saveables import HostState, Tensors
from pipeline.environments.action_log import ActionLog
from pipeline.replay import columns, disk_segments
from pipeline.replay.replay_buffer import ReplayBuffer
from pipeline.replay.rollout import Rollout
from pipeline.runs.run_folder import RunFolder
from pipeline.runs.saved_run import SavedRun
from pipeline.utils import jsonl
from pipeline.utils.errors import UserError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
DEEP = st.builds(lambda opening, depth: opening * depth, st.sampled_from([b"[", b'{"a":']),
                 st.integers(1, 200_000))  # fmt: skip


def places(document, above=()):
    """Yields the place of every value in nested lists and objects, as a tuple of keys."""
    yield above
    if isinstance(document, dict | list):
        items = document.items() if isinstance(document, dict) else enumerate(document)
        for key, value in items:
            yield from places(value, (*above, key))


def replaced(document, place, value):
    if not place:
        return value
    document = copy.deepcopy(document)
    inner = document
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return document


def documents(valid):
    """Returns a strategy for any JSON, or the valid document with one value or key replaced."""
    of_valid = st.sampled_from(list(places(valid)))
    return JSON | st.builds(lambda place, value: replaced(valid, place, value), of_valid, JSON)


@functools.cache
def contents(valid):
    """Returns a strategy for new contents of a file that held the valid content."""
    kinds = [st.binary(max_size=200), mutated(valid), DEEP]
    with contextlib.suppress(ValueError):
        kinds.append(documents(json.loads(valid)).map(lambda x: json.dumps(x).encode()))
    return st.one_of(kinds)


def fuzz(data, path, read, *documented):
    """Reads the file with other content, which is drawn once for each example."""
    valid = VALID.setdefault(path, path.read_bytes())
    path.write_bytes(data.draw(contents(valid)))
    with contextlib.suppress(*documented):
        read()


VALID: dict[pathlib.Path, bytes] = {}


# Checkpoints. -------------------------------------------------------------------------------------


@pytest.fixture
def checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path, {"host": HostState(a=1)})
    checkpoints.save(7, 2.5)
    return checkpoints


@given(data=st.data())
@fuzzed
def test_a_manifest(checkpoints, data):
    path = checkpoints.at(7) / "manifest.json"
    fuzz(data, path, lambda: manifest.verify(path.parent), manifest.Damaged, UserError)


@given(data=st.data())
@fuzzed
def test_a_manifest_that_confirms_itself(checkpoints, data):
    path = checkpoints.at(7) / "manifest.json"
    valid = json.loads(VALID.setdefault(path, path.read_bytes()))
    body = data.draw(documents(valid["manifest"]))
    digests = [
        hashlib.sha256(json.dumps(x, sort_keys=True).encode()).hexdigest()
        for x in (valid["manifest"], body)
    ]
    assert digests[0] == valid["sha256"]
    path.write_text(json.dumps({"manifest": body, "sha256": digests[1]}))
    with contextlib.suppress(manifest.Damaged, UserError):
        manifest.verify(path.parent)
    for read in (checkpoints.best, checkpoints.restore):
        with contextlib.suppress(UserError):
            read()


@given(data=st.data())
@fuzzed
def test_a_damaged_manifest_does_not_keep_the_next_checkpoint_from_being_written(checkpoints, data):
    path = checkpoints.at(7) / "manifest.json"
    path.write_bytes(data.draw(mutated(VALID.setdefault(path, path.read_bytes()))))
    later = pathlib.Path(tempfile.mkdtemp(dir=path.parent))
    manifest.seal(later, {"a": 1}, earlier=path.parent)
    assert manifest.verify(later) == {"a": 1}


# Parts. -------------------------------------------------------------------------------------------


@given(data=st.data())
@fuzzed
def test_host_state(tmp_path, data):
    HostState(a=1, b=[2]).save(tmp_path)
    path = tmp_path / "state.json"
    fuzz(data, path, lambda: HostState(a=0, b=[]).restore(tmp_path), ValueError)


@given(data=st.data())
@fuzzed
def test_tensors(tmp_path, data):
    part = Tensors(lambda: {"a": tf.ones([3]), "b": np.arange(2)}, lambda nest: None)
    part.save(tmp_path)
    fuzz(data, tmp_path / "tensors.npz", lambda: part.restore(tmp_path), ValueError)


@given(data=st.data())
@fuzzed
def test_circumstances(tmp_path, data):
    path = tmp_path / "circumstances.json"
    path.write_text(json.dumps({"seed": "1", "oneDNN": "1"}))
    settings = {"threads": {"intra_op": 1}, "execution": "graph", "onednn": "1", "device": "CPU"}
    part = Circumstances(settings, 1, tmp_path, Exactness(allow_inexact=True))
    fuzz(data, path, lambda: part.restore(tmp_path), ValueError, UserError)


SPEC = trajectory.Trajectory(
    tf.TensorSpec([], tf.int32), tf.TensorSpec([2], tf.float32), tf.TensorSpec([], tf.int32), (),
    tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.float32),
)  # fmt: skip


@pytest.mark.parametrize(
    ("create", "sizes"),
    [(ReplayBuffer, {"capacity": 8}), (Rollout, {"num_steps": 4, "minibatch_size": 8})],
)
@given(data=st.data())
@fuzzed
def test_experience(tmp_path, create, sizes, data):
    part = create(SPEC, 2, sequence_length=2, training_spec=SPEC, seed=1, **sizes)
    part.save(tmp_path)
    (path,) = tmp_path.glob("*.json")
    fuzz(data, path, lambda: part.restore(tmp_path), ValueError)
    # A later save shares with that checkpoint only what it can read.
    part.save(pathlib.Path(tempfile.mkdtemp(dir=tmp_path)), earlier=tmp_path)


def test_a_segment_that_would_grow_beyond_all_bounds_is_refused(tmp_path):
    variable = columns.create_column(tf.TensorSpec([2_000], tf.uint8), 3)
    column = disk_segments.Column("frames", variable, 3)
    disk_segments.save(tmp_path, [column], np.array([3]), None)
    (path,) = tmp_path.iterdir()
    path.write_bytes(zlib.compress(bytes(50_000_000)))
    tracemalloc.start()
    with pytest.raises(ValueError, match=path.name):
        disk_segments.restore(tmp_path, [column], np.array([3]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000


# Environments. ------------------------------------------------------------------------------------

ARRAYS = st.builds(
    lambda value, dtype, shape: np.resize(np.array(value).astype(dtype), shape),
    st.integers(-(2**40), 2**40) | st.floats(),
    st.sampled_from(["i8", "u8", "i4", "f4", "?", "U3", "V2", "c8", "M8[s]"]),
    st.lists(st.integers(0, 3), max_size=3),
)


@given(data=st.data())
@fuzzed
def test_a_log_of_actions(tmp_path, data):
    log = ActionLog(2)
    log.append(np.array([1, 2]))
    log.save(tmp_path)
    fuzz(data, tmp_path / "actions.npz", lambda: ActionLog(2).restore(tmp_path), ValueError)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(
    ("actions", "anchors", "numbers", "steps", "file"), ARRAYS)))  # fmt: skip
@fuzzed
def test_a_log_of_other_arrays(tmp_path, arrays):
    stream = io.BytesIO()
    np.savez(stream, **{f"{name}": value for name, value in arrays.items() if name != "file"})
    (tmp_path / "actions.npz").write_bytes(stream.getvalue())
    with contextlib.suppress(ValueError):
        ActionLog(2).restore(tmp_path)


@given(data=st.data())
@fuzzed
def test_an_environment_s_state(tmp_path, data):
    env = environment(EchoEnv(Box(0, 100, (3,), np.float32)))
    env.reset()
    env.save(tmp_path)

    def read():
        env.restore(tmp_path)
        env.reset()

    fuzz(data, tmp_path / "environment.json", read, ValueError)


# Logs and the run's folder. -----------------------------------------------------------------------

RECORDS = b'{"env_steps": 1, "loss": 0.5}\n{"env_steps": 2}\n{"env_steps": 3}\n'


@given(data=st.data())
@fuzzed
def test_a_log_of_records(tmp_path, data):
    path = tmp_path / "metrics.jsonl"
    lines = st.lists(contents(b'{"env_steps": 1}'), max_size=4).map(lambda x: b"\n".join(x) + b"\n")
    path.write_bytes(data.draw(mutated(RECORDS) | lines))
    with contextlib.suppress(UserError):
        jsonl.read_jsonl(path)
    with contextlib.suppress(UserError):
        jsonl.JsonlLog(path).truncate_after(2)


@given(data=st.data())
@fuzzed
def test_run_json(tmp_path, monkeypatch, data):
    monkeypatch.setattr(configuration, "operative_config", lambda: "")
    folder = RunFolder(tmp_path / "run")
    path = folder.path / "run.json"
    if not path.exists():
        folder.open("resume", 1)
        folder.describe(1, 4, {"threads": {}}, 0)
        (folder.path / "checkpoints").mkdir()

    def read():
        with contextlib.suppress(UserError):
            SavedRun(folder.path)
        with contextlib.closing(folder):
            folder.open("resume", 1)
            folder.describe(1, 4, {"threads": {}}, 0)

    fuzz(data, path, read, UserError)


@given(data=st.data())
@fuzzed
def test_result_json(tmp_path, data):
    path = tmp_path / "result.json"
    evaluation = {"return_mean": 1.0, "return_std": 0.0, "returns": [1.0]}
    path.write_text(json.dumps({"env_steps": 5, "evaluation": evaluation}))
    fuzz(data, path, lambda: RunFolder(tmp_path).finished(1, 5), UserError)
