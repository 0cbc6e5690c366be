"""A finished or running run, read from its folder by those that do not train.

Imports no TensorFlow, so that a wrong folder or checkpoint is told at once.
"""

from __future__ import annotations

import pathlib

from pipeline import configuration
from pipeline.checkpoints import Checkpoints, Part, Restored
from pipeline.errors import UserError
from pipeline.gin_statements import Binding, Import, suggest
from pipeline.run_folder import RunFolder

_AGENT = "agent"


class SavedRun:
    """One checkpoint of the run in `root_dir`; nothing is ever written there.

    Attributes:
      seed: of the run.
      num_envs: environments that it trains with.
    """

    def __init__(self, root_dir: str | pathlib.Path, checkpoint: str | int = "latest"):
        """Args:
          root_dir: the run's folder.
          checkpoint: "latest" (the newest that is intact), "best" (by evaluation while it
            trained), or the number of environment steps of one.

        Raises:
          UserError: there is no such run or checkpoint.
        """
        self._folder = RunFolder(root_dir)
        if not self._config_path.is_file():
            raise UserError(_no_run(self._folder.path))
        description = self._folder.read_json("run.json")
        try:
            self.seed, self.num_envs = int(description["seed"]), int(description["num_envs"])
        except KeyError as error:
            path = self._folder.path / "run.json"
            raise UserError(
                f"{path} lacks {error}: it is damaged, or of another version of the program. Train "
                "again with --restart_behavior=restart."
            ) from error
        self._checkpoint = self._find(str(checkpoint))

    @property
    def _config_path(self) -> pathlib.Path:
        return self._folder.path / "operative_config.gin"

    def read_config(
        self, gin_bindings: list[str], allow_imports: bool = False
    ) -> list[Import | Binding]:
        """The run's configuration, then `gin_bindings`, for `configuration.apply`.

        Raises:
          UserError: see `configuration.read`.
        """
        return configuration.read([str(self._config_path)], gin_bindings, allow_imports)

    def restore(self, agent: Part) -> Restored:
        """Restores the weights and whatever else is the agent's own into `agent`.

        Raises:
          UserError: the checkpoint is damaged, or another agent's.
        """
        checkpoints = Checkpoints(self._folder.checkpoints, {_AGENT: agent}, writable=False)
        restored = checkpoints.restore(self._checkpoint, names=[_AGENT])
        if restored is None:
            raise UserError(self._no_checkpoint())
        return restored

    def _find(self, name: str) -> pathlib.Path | None:
        """The checkpoint's path; None for the newest that is intact."""
        checkpoints = Checkpoints(self._folder.checkpoints, {}, writable=False)
        if name == "latest":
            if checkpoints.latest() is None:
                raise UserError(self._no_checkpoint())
            return None
        if name == "best":
            return self._best(checkpoints)
        digits = name.replace("_", "").replace(",", "")
        if not digits.isdecimal():
            raise UserError(
                f"checkpoint {name!r} is none of latest, best, or a number of environment steps."
            )
        return checkpoints.at(int(digits))

    def _best(self, checkpoints: Checkpoints) -> pathlib.Path:
        best = checkpoints.best()
        if best is None:
            raise UserError(
                f"{self._folder.path} has no best checkpoint yet: it was never evaluated while it"
                " trained (train.eval_interval). Use latest."
            )
        return best.path

    def _no_checkpoint(self) -> str:
        path = self._folder.path
        return f"{path} has no checkpoint yet: run its training command until it saves one."


def _no_run(path: pathlib.Path) -> str:
    if path.is_dir():
        return f"{path} holds no run: it has no operative_config.gin."
    runs = [str(file.parent) for file in path.parent.glob("*/operative_config.gin")]
    return f"there is no run {path}.{suggest(str(path), runs)}"
