"""Exports a policy for programs without this package: python -m pipeline.export --root_dir=runs/x.

--format=saved_model writes a folder for TensorFlow, --format=tflite a file for LiteRT, and
--format=onnx a file for ONNX Runtime. Each of these maps a batch of observations to the greedy
actions, in the action space of the environment. --format=run writes a small run folder, which holds
only the networks, for `pipeline.evaluate` and `pipeline.load_policy`.
"""

from __future__ import annotations

import importlib.util
import pathlib
import tempfile
from collections.abc import Sequence

from absl import flags

from pipeline import cli
from pipeline.runs import pretrained
from pipeline.runs.saved_run import SavedRun
from pipeline.utils.errors import UserError
from pipeline.utils.files import UNFINISHED, named_errors

_SUFFIXES = {"saved_model": "", "tflite": ".tflite", "onnx": ".onnx", "run": "-run"}

_ROOT_DIR = cli.define_path("root_dir", None, "Folder of the run.")
_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", "latest", "latest, best, or the number of environment steps of a checkpoint."
)
_FORMAT = flags.DEFINE_enum("format", "saved_model", list(_SUFFIXES), "Format of the export.")
_OUTPUT = cli.define_path(
    "output",
    None,
    "File or folder to write. By default, it is in the run's folder and named policy, "
    "policy.tflite, policy.onnx or policy-run.",
)
_ALLOW_GIN_IMPORTS = flags.DEFINE_bool(
    "allow_gin_imports", False, "Let the run's configuration import other packages."
)


@cli.program
def main(_: Sequence[str]) -> None:
    if not _ROOT_DIR.value:
        raise UserError("say which run to export: --root_dir=runs/NAME.")
    if _ROOT_DIR.value.startswith(pretrained.PREFIX) and not _OUTPUT.value:
        raise UserError("a pretrained policy has no folder of yours: pass --output.")
    run = SavedRun(_ROOT_DIR.value, _CHECKPOINT.value)
    output = pathlib.Path(_OUTPUT.value or run.path / f"policy{_SUFFIXES[_FORMAT.value]}")
    output = output.absolute()  # a module that gin imports may change the folder
    _check(output)
    statements = run.read_config([], _ALLOW_GIN_IMPORTS.value)
    cli.load_tensorflow(statements)
    from pipeline import exported_policy
    from pipeline.utils.execution import configure_gpu

    configure_gpu(False)
    allow_imports, name = _ALLOW_GIN_IMPORTS.value, _FORMAT.value
    write, description = exported_policy.load_export(run, allow_imports, name)
    with named_errors(output, "--output"):
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=output.parent) as folder:
            temporary = pathlib.Path(folder) / output.name
            write(temporary)
            temporary.rename(output)
    print(f"exported to {output}")
    for line in description:
        print(line)


def _check(output: pathlib.Path) -> None:
    """Checks that the export can be written, before anything is loaded.

    Raises:
      UserError: If something is there already, if nothing could read the export by this name, or
        if a package is missing.
    """
    if output.exists():
        raise UserError(f"{output} exists already. Delete it, or choose another --output.")
    named = {".tflite": "tflite", ".onnx": "onnx"}.get(output.suffix, _FORMAT.value)
    if named != _FORMAT.value:
        raise UserError(
            f"--output={output} is not a name for --format={_FORMAT.value}. Pass --format={named}, "
            "or choose another --output."
        )
    if _FORMAT.value == "saved_model" and set(str(output)) & set("[\\"):
        raise UserError(
            f"--output={output}: TensorFlow cannot load a SavedModel from a path that contains "
            "[ or a backslash. Choose another --output."
        )
    if _FORMAT.value == "onnx" and importlib.util.find_spec("tf2onnx") is None:
        raise UserError("--format=onnx needs tf2onnx, which is not installed: pip install tf2onnx")


if __name__ == "__main__":
    main()
