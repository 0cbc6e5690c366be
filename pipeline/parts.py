"""The kinds of part a checkpoint is made of: variables, a dict of the host, tensors of the loop.

A part writes its own files into an empty folder (`save`) and reads them back (`restore`), which
raises ValueError on any mismatch. Files hold data only (TensorFlow bundles, JSON, npz), no pickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tf_agents.utils import nest_utils

from pipeline import data_files

Specs = dict[str, str]
"""A name for each tensor, with its dtype and shape in words."""


class Variables:
    """Every variable reachable from the given trackables, whatever created it.

    The variables must exist before `restore`: optimizer slots included, nothing is restored later
    on creation. Hyperparameters of optimizers, such as Adam's beta_1, keep the values that they
    were built with: they belong to the configuration, which may have changed since.
    """

    def __init__(self, **trackables: Any) -> None:
        self._trackables = trackables

    def save(self, folder: pathlib.Path, earlier: pathlib.Path | None = None) -> None:
        """Raises OSError when the disk is full or not writable."""
        try:
            tf.train.Checkpoint(**self._trackables).write(_prefix(folder))
        except tf.errors.OpError as error:
            raise OSError(error.message) from error

    def restore(self, folder: pathlib.Path) -> None:
        """Assigns every variable; raises ValueError, before any, if name, dtype or shape differ."""
        built = [(variable, variable.numpy()) for variable in self._hyperparameters()]
        try:
            reader = tf.train.load_checkpoint(_prefix(folder))
            _check_specs(saved=_bundle_specs(reader), expected=self._specs())
            status = tf.train.Checkpoint(**self._trackables).read(_prefix(folder))
            status.assert_consumed()
            status.assert_existing_objects_matched()
        except (tf.errors.OpError, AssertionError, IndexError) as error:
            raise ValueError(f"the variables cannot be read: {error}") from error
        for variable, value in built:
            variable.assign(value)

    def _hyperparameters(self) -> list[tf.Variable]:
        # Keras keeps those that are no functions in variables, and so TensorFlow saves them.
        root = tf.train.Checkpoint(**self._trackables)
        return [
            value
            for trackable in tf.train.TrackableView(root).descendants()
            if isinstance(trackable, tf.keras.optimizers.legacy.Optimizer)
            for value in trackable._hyper.values()
            if isinstance(value, tf.Variable)
        ]

    def _specs(self) -> Specs:
        # Only TensorFlow's own writer knows the names that it gives to variables.
        with _bundle_in_memory(self._trackables) as reader:
            return _bundle_specs(reader)


class HostState(dict[str, Any]):
    """A small dict of JSON values that the host keeps, such as `HostState(wall_seconds=0.0)`."""

    def save(self, folder: pathlib.Path, earlier: pathlib.Path | None = None) -> None:
        """Raises TypeError for a value that JSON does not know."""
        (folder / "state.json").write_text(json.dumps(self, indent=1, sort_keys=True))

    def restore(self, folder: pathlib.Path) -> None:
        """Replaces all values, or raises ValueError if the keys differ and replaces none."""
        values = data_files.read_object(folder / "state.json")
        _check_specs(saved=dict.fromkeys(values, ""), expected=dict.fromkeys(self, ""))
        self.update(values)


class Tensors:
    """A nest of tensors and arrays that lives outside variables, such as the loop's carry."""

    def __init__(self, get: Callable[[], Any], set: Callable[[Any], None]) -> None:
        """get gives the nest, also before `restore`, which checks against it; set replaces it."""
        self._get = get
        self._set = set

    def save(self, folder: pathlib.Path, earlier: pathlib.Path | None = None) -> None:
        """Raises ValueError for a dtype that npy cannot describe (strings, bfloat16, ...)."""
        arrays: dict[str, Any] = self._arrays()
        for name, array in arrays.items():
            if array.dtype.kind not in "biuf":
                raise ValueError(f"{name} has dtype {array.dtype}, which cannot be saved")
        np.savez(folder / "tensors.npz", **arrays)

    def restore(self, folder: pathlib.Path) -> None:
        """Hands the saved nest to `set`, or raises ValueError if structure, shape or dtype differ.

        Where the present nest holds tensors the restored one does, elsewhere NumPy arrays.
        """
        saved = data_files.read_arrays(folder / "tensors.npz")
        expected = self._arrays()
        _check_specs(_array_specs(saved), _array_specs(expected))
        nest = self._get()
        arrays = tf.nest.pack_sequence_as(nest, [saved[name] for name in expected])
        self._set(
            tf.nest.map_structure(
                lambda now, array: tf.constant(array) if tf.is_tensor(now) else array, nest, arrays
            )
        )

    def _arrays(self) -> dict[str, np.ndarray]:
        # The prefix keeps names such as `file` apart from np.savez's own arguments.
        flat = nest_utils.flatten_with_joined_paths(self._get())
        return {f"tensors/{path}".rstrip("/"): np.asarray(leaf) for path, leaf in flat}


def weights_sha256(trackables: Mapping[str, Any]) -> str:
    """Digest of (object path, dtype, shape, bytes) of every variable, in object-path order.

    An object path leads from the trackables' names through attributes to the variable. Unlike
    variable names it holds no counter of layers that the process has made before.
    """
    digest = hashlib.sha256()
    with _bundle_in_memory(trackables) as reader:
        for path in _variable_paths(reader):
            value = np.asarray(reader.get_tensor(path))
            digest.update(f"{path}\0{value.dtype}\0{value.shape}\0".encode())
            digest.update(value.tobytes())
    return digest.hexdigest()


def _prefix(folder: pathlib.Path) -> str:
    return str(folder / "variables")


@contextlib.contextmanager
def _bundle_in_memory(trackables: Mapping[str, Any]) -> Iterator[Any]:
    """A reader of what `Variables.save` would write."""
    folder = f"ram://{uuid.uuid4()}"  # TensorFlow's own file system: no disk can be full
    try:
        tf.train.Checkpoint(**trackables).write(f"{folder}/variables")
        # load_checkpoint would take the prefix for a folder: names are all that is there.
        yield tf.compat.v1.train.NewCheckpointReader(f"{folder}/variables")
    finally:
        tf.io.gfile.rmtree(folder)


def _variable_paths(reader: Any) -> Iterator[str]:
    not_variables = ("_CHECKPOINTABLE_OBJECT_GRAPH", "save_counter/.ATTRIBUTES/VARIABLE_VALUE")
    return (x for x in sorted(reader.get_variable_to_shape_map()) if x not in not_variables)


def _bundle_specs(reader: Any) -> Specs:
    shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    return {
        path.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE"): f"{dtypes[path].name} {shapes[path]}"
        for path in _variable_paths(reader)
    }


def _array_specs(arrays: Mapping[str, np.ndarray]) -> Specs:
    return {name: f"{array.dtype} {list(array.shape)}" for name, array in arrays.items()}


def _check_specs(saved: Specs, expected: Specs) -> None:
    """Raises ValueError which says what is missing, what is left over, and what has changed."""
    differ = [x for x in sorted(saved.keys() & expected.keys()) if saved[x] != expected[x]]
    faults = (
        ("missing from the checkpoint", sorted(expected.keys() - saved.keys())),
        ("in the checkpoint but not in this run", sorted(saved.keys() - expected.keys())),
        ("different", [f"{x} ({saved[x]} in the checkpoint, {expected[x]} here)" for x in differ]),
    )
    text = "; ".join(f"{what}: {_some(names)}" for what, names in faults if names)
    if text:
        raise ValueError(text)


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
