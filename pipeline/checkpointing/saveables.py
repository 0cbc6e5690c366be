"""Saves and restores the parts of a checkpoint: variables, host values and the loop's tensors.

A part writes its own files into an empty folder (`save`) and reads them back (`restore`), which
raises ValueError on any mismatch. Files hold data only (TensorFlow bundles, JSON, npz), no pickle.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import re
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tf_agents.utils import nest_utils

from pipeline.utils import files
from pipeline.utils.errors import UserError

Specs = dict[str, str]
"""Maps the name of each tensor to a text with its dtype and shape."""


class Variables:
    """Holds every variable that can be reached from the given trackables, as a checkpoint part.

    All variables, including optimizer slots, must exist before `restore`, because nothing is
    restored later when a variable is created. Hyperparameters of optimizers, such as Adam's beta_1,
    keep the values that they were built with: they belong to the configuration, which may have
    changed since the checkpoint.
    """

    def __init__(self, **trackables: Any) -> None:
        self._trackables = trackables
        self._first_specs = self._specs()
        self._built = [(variable, variable.numpy()) for variable in self._hyperparameters()]

    def check_complete(self) -> None:
        """Checks that `restore` would restore all that has changed since this object was created.

        Raises:
          UserError: If there are other variables, which a new process would not have yet, or if a
            hyperparameter of an optimizer has another value.
        """
        for variable, value in self._built:
            if variable.numpy() != value:
                raise UserError(
                    f"the optimizer's {variable.name.partition(':')[0]} was {value:g} and is "
                    f"{variable.numpy():g}, but no checkpoint restores it. Keep it in a "
                    "tf.Variable of the agent, and pass the optimizer a function that reads it."
                )
        if late := sorted(self._specs().keys() - self._first_specs.keys()):
            raise UserError(
                f"{len(late)} variables were created after the agent, such as {late[0]}. No "
                "checkpoint of them could be restored. Create them in the agent's constructor, "
                "those of an optimizer with build_slots(optimizer, variables)."
            )

    def save(self, folder: pathlib.Path, earlier: pathlib.Path | None = None) -> None:
        """Writes all variables.

        Raises:
          OSError: If the disk is full or not writable.
          UserError: See `check_complete`.
        """
        self.check_complete()
        try:
            tf.train.Checkpoint(**self._trackables).write(_prefix(folder))
        except tf.errors.PermissionDeniedError as error:
            raise PermissionError(errno.EACCES, error.message) from error
        except tf.errors.OpError as error:
            raise OSError(error.message) from error

    def restore(self, folder: pathlib.Path) -> None:
        """Restores all variables.

        Raises:
          ValueError: If a name, dtype or shape differs, before any variable is assigned, or if the
            files are missing or damaged.
          OSError: If they cannot be read now.
        """
        try:
            with _plain_name(folder) as plain:
                reader = tf.train.load_checkpoint(_prefix(plain))
                _check_specs(saved=_bundle_specs(reader), expected=self._first_specs)
                status = tf.train.Checkpoint(**self._trackables).read(_prefix(plain))
                status.assert_consumed()
                status.assert_existing_objects_matched()
        except (tf.errors.OpError, AssertionError, IndexError) as error:
            for number in files.PASSING:
                if os.strerror(number) in str(error):  # TensorFlow tells the number as text only.
                    raise OSError(number, str(error)) from error
            raise ValueError(f"the variables cannot be read: {error}") from error
        for variable, value in self._built:
            variable.assign(value)

    def _hyperparameters(self) -> list[tf.Variable]:
        # Keras stores those that are not functions in variables, so TensorFlow saves them.
        root = tf.train.Checkpoint(**self._trackables)
        return [
            value
            for trackable in tf.train.TrackableView(root).descendants()
            if isinstance(trackable, tf.keras.optimizers.legacy.Optimizer)
            for value in trackable._hyper.values()
            if isinstance(value, tf.Variable)
        ]

    def _specs(self) -> Specs:
        # Only TensorFlow's own writer knows which names it assigns to variables.
        with _bundle_in_memory(self._trackables) as reader:
            return _bundle_specs(reader)


class HostState(dict[str, Any]):
    """Holds a small dict of JSON values on the host, for example `HostState(wall_seconds=0.0)`."""

    def save(self, folder: pathlib.Path, earlier: pathlib.Path | None = None) -> None:
        """Writes all values to `state.json`.

        Raises:
          TypeError: If JSON cannot represent a value.
        """
        (folder / "state.json").write_text(json.dumps(self, indent=1, sort_keys=True))

    def restore(self, folder: pathlib.Path) -> None:
        """Replaces all values with the saved ones.

        Raises:
          ValueError: If the keys differ or the file is damaged. In this case no value is replaced.
          OSError: If it cannot be read now.
        """
        values = files.read_object(folder / "state.json")
        _check_specs(saved=dict.fromkeys(values, ""), expected=dict.fromkeys(self, ""))
        self.update(values)


class Tensors:
    """Holds a nest of tensors and arrays that are not variables, as a checkpoint part.

    An example is the carry of the train loop.
    """

    def __init__(self, get: Callable[[], Any], set: Callable[[Any], None]) -> None:
        """Initializes the part.

        Args:
          get: Returns the nest. It must work before `restore`, which checks against its result.
          set: Replaces the nest.
        """
        self._get = get
        self._set = set

    def save(self, folder: pathlib.Path, earlier: pathlib.Path | None = None) -> None:
        """Writes the nest to `tensors.npz`.

        Raises:
          ValueError: If a dtype is not one of NumPy's own bools, integers and floats. Strings and
            bfloat16, for example, cannot be saved.
        """
        arrays: dict[str, Any] = self._arrays()
        for name, array in arrays.items():
            if array.dtype.kind not in "biuf":
                raise ValueError(f"{name} has dtype {array.dtype}, which cannot be saved")
        np.savez(folder / "tensors.npz", **arrays)

    def restore(self, folder: pathlib.Path) -> None:
        """Passes the saved nest to `set`.

        A leaf is restored as a tensor if the current leaf is one, otherwise as a NumPy array.

        Raises:
          ValueError: If the structure, a shape or a dtype differs, or the file is damaged.
          OSError: If it cannot be read now.
        """
        saved = files.read_arrays(folder / "tensors.npz")
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
        # The prefix prevents collisions of names such as `file` with np.savez's own arguments.
        flat = nest_utils.flatten_with_joined_paths(self._get())
        return {f"tensors/{path}".rstrip("/"): np.asarray(leaf) for path, leaf in flat}


def weights_sha256(trackables: Mapping[str, Any]) -> str:
    """Returns a digest of (object path, dtype, shape, bytes) of every variable, sorted by path.

    An object path leads from the trackables' names through attributes to the variable. Unlike a
    variable name, it does not depend on the layers that the process created before.
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
def _plain_name(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a path of the folder without characters that TensorFlow reads as a pattern."""
    if not re.search(r"[][*?\\]", str(folder)):
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        link = pathlib.Path(temporary) / "checkpoint"
        link.symlink_to(folder.absolute())
        yield link


@contextlib.contextmanager
def _bundle_in_memory(trackables: Mapping[str, Any]) -> Iterator[Any]:
    """Yields a reader of what `Variables.save` would write."""
    folder = f"ram://{uuid.uuid4()}"  # TensorFlow's in-memory file system: no disk can be full.
    try:
        tf.train.Checkpoint(**trackables).write(f"{folder}/variables")
        # load_checkpoint would mistake the prefix for a folder, because ram:// stores names only.
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
    """Checks that the saved tensors are the expected ones.

    Raises:
      ValueError: If they differ. The message lists the missing, unexpected and different tensors.
    """
    differ = [x for x in sorted(saved.keys() & expected.keys()) if saved[x] != expected[x]]
    faults = (
        ("missing from the checkpoint", sorted(expected.keys() - saved.keys())),
        ("in the checkpoint but not in this run", sorted(saved.keys() - expected.keys())),
        ("different", [f"{x} ({saved[x]} in the checkpoint, {expected[x]} here)" for x in differ]),
    )
    text = "; ".join(f"{what}: {_some(names)}" for what, names in faults if names)
    if text:
        raise ValueError(text)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
