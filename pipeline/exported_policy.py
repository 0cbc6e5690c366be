"""Converts an agent's greedy policy to a function of tensors and writes it in several formats."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from pipeline import configuration
from pipeline.checkpointing.checkpoints import Checkpoints, return_mean_of
from pipeline.checkpointing.saveables import Variables
from pipeline.environments import specs
from pipeline.runs.saved_run import NETWORKS, SavedRun
from pipeline.saved_policy import SavedPolicy, load_policy, restore_agent
from pipeline.utils.errors import UserError, WriteError
from pipeline.utils.files import write_json, write_text

# A function that writes a loaded policy to a path, and lines that describe the policy.
Export = tuple[Callable[[pathlib.Path], None], list[str]]
_OUTPUT = "action"


class ExportedPolicy(tf.Module):
    """Maps a batch of observations to greedy actions of the environment's action space.

    Attributes:
      act: `tf.function` of the observation's arrays [B, ...], in the order of `tf.nest.flatten`.
        It returns {"action": actions [B, ...]}.
    """

    def __init__(self, policy: SavedPolicy):
        """Defines the function.

        Args:
          policy: Policy to export.
        """
        super().__init__(name="policy")
        names = _names(specs.arrays(policy.observation_space))
        self._inputs = [
            tf.TensorSpec([None, *spec.shape], spec.dtype, name)
            for name, spec in zip(names, tf.nest.flatten(policy.observation_spec), strict=True)
        ]

        @tf.function(input_signature=self._inputs, autograph=False)
        def act(*arrays: tf.Tensor) -> dict[str, tf.Tensor]:
            observation = tf.nest.pack_sequence_as(policy.observation_spec, arrays)
            return {_OUTPUT: policy.greedy_actions(observation)}

        self.act = act
        # Policies do not list the statistics of a normaliser.
        self._read_variables = act.get_concrete_function().graph.variables

    def description(self) -> Iterator[str]:
        """Yields a line for each input and for the output: name, dtype and shape."""
        output = self.act.get_concrete_function().structured_outputs[_OUTPUT]
        rows = [("input", x.name, x) for x in self._inputs] + [("output", _OUTPUT, output)]
        for kind, name, spec in rows:
            shape = ", ".join(["batch", *map(str, spec.shape[1:])])
            yield f"  {kind:7} {name}: {spec.dtype.name} ({shape})"


def _names(leaves: Sequence[specs.Leaf]) -> list[str]:
    """Returns a name for each part of an observation, such as observation_position_0."""
    names: list[str] = []
    for leaf in leaves:
        name = "_".join(map(str, ("observation", *leaf.path)))
        name = re.sub(r"\W", "_", name, flags=re.ASCII)
        while name in names:
            name += "_"
        names.append(name)
    return names


def write_saved_model(policy: ExportedPolicy, path: pathlib.Path) -> None:
    """Writes a folder that `tf.saved_model.load` reads; its signature is "serving_default".

    Raises:
      UserError: If the disk is full or not writable.
    """
    try:
        tf.saved_model.save(policy, str(path), signatures=policy.act)
    except tf.errors.OpError as error:
        is_full = isinstance(error, tf.errors.ResourceExhaustedError)
        # The message begins with names of operations and ends with that of the operation.
        reason = error.message.rpartition("; ")[2].partition(" [Op:")[0]
        kind = WriteError if is_full else UserError
        raise kind(f"the policy cannot be written: {reason}") from error


def write_tflite(policy: ExportedPolicy, path: pathlib.Path) -> None:
    """Writes a file for LiteRT's interpreter, with the signature "serving_default".

    Raises:
      UserError: If an operation of the policy cannot be converted.
    """
    # Not beside `path`, where TensorFlow would take some characters of a folder for a pattern.
    with tempfile.TemporaryDirectory() as folder:
        write_saved_model(policy, pathlib.Path(folder))
        with _converting("tflite"):
            content = tf.lite.TFLiteConverter.from_saved_model(folder).convert()
    path.write_bytes(content)


def write_onnx(policy: ExportedPolicy, path: pathlib.Path) -> None:
    """Writes a file for ONNX Runtime.

    Raises:
      UserError: If an operation of the policy cannot be converted.
    """
    import onnx
    import tf2onnx

    with _converting("onnx"):
        model, _ = tf2onnx.convert.from_function(policy.act, policy.act.input_signature)
        onnx.checker.check_model(model)  # tf2onnx only logs what it cannot convert
    path.write_bytes(model.SerializeToString())


@contextlib.contextmanager
def _converting(export_format: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each converter has errors of its own
        text = str(error).strip()
        operation = re.search(r"tf\.\w+\(.*", text)  # in MLIR, with the dtypes of its arguments
        reason = operation.group() if operation else text.partition("\n")[0]
        raise UserError(
            f"the policy cannot be converted to {export_format} ({reason}). Choose another "
            "--format."
        ) from error


def load_export(run: SavedRun, allow_gin_imports: bool, export_format: str) -> Export:
    """Loads the policy of a run, to be written as "saved_model", "tflite", "onnx" or "run".

    Raises:
      UserError: If the run cannot be loaded.
    """
    if export_format == "run":
        return _load_small_run(run, allow_gin_imports)
    write = {"saved_model": write_saved_model, "tflite": write_tflite, "onnx": write_onnx}
    # The other formats have no bfloat16 convolutions. The weights are float32 in any case.
    bindings = [] if export_format == "saved_model" else ["encoder_precision.policy = 'float32'"]
    policy = load_policy(
        run, allow_gin_imports, bindings, computes_float64=export_format != "tflite"
    )
    exported = ExportedPolicy(policy)
    description = [*_warnings(policy.warnings), _after(policy.env_steps), *exported.description()]
    return functools.partial(write[export_format], exported), description


def _load_small_run(run: SavedRun, allow_gin_imports: bool) -> Export:
    """Loads what a run folder for acting has: configuration, spaces and networks."""
    with configuration.preserved():
        configuration.apply(run.read_config([], allow_gin_imports))
        restored = restore_agent(run)
    env_steps = restored.checkpoint.env_steps

    def write(path: pathlib.Path) -> None:
        path.mkdir()
        write_text(path / "operative_config.gin", run.config)
        write_json(path / "run.json", run.origin)
        networks = Variables(**restored.agent.trained)
        checkpoints = Checkpoints(path / "checkpoints", {NETWORKS: networks})
        checkpoints.save(env_steps, return_mean_of(restored.checkpoint.path))

    return write, [*_warnings(restored.checkpoint.warnings), _after(env_steps)]


def _warnings(of_checkpoint: Sequence[str]) -> list[str]:
    return [f"warning: {warning}" for warning in of_checkpoint]


def _after(env_steps: int) -> str:
    return f"  after {env_steps:,} environment steps"
