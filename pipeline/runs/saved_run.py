"""Reads a finished or running run from its folder, for programs that do not train.

This module does not import TensorFlow, so that a wrong folder or checkpoint is reported at once.
"""

from __future__ import annotations

import pathlib
from typing import Any

from pipeline import configuration
from pipeline.checkpointing.checkpoints import Checkpoints, Part, Restored
from pipeline.configuration.statements import Binding, Import, suggest
from pipeline.runs import pretrained
from pipeline.runs.run_folder import REWRITE, RunFolder
from pipeline.utils.errors import UserError

_AGENT = "agent"
_PRECISION = "encoder_precision.policy"
#: Part of a checkpoint without optimizers and target networks, as `pipeline.export` writes it.
NETWORKS = "networks"


class SavedRun:
    """Reads one checkpoint of a run. Nothing is written to the run's folder.

    Attributes:
      seed: Seed of the run.
      num_envs: Number of environments that the run trains with.
    """

    def __init__(self, root_dir: str | pathlib.Path, checkpoint: str | int = "latest"):
        """Finds the checkpoint.

        Args:
          root_dir: Folder of the run, or "pretrained:NAME" for a policy of the package.
          checkpoint: "latest" (the newest intact checkpoint), "best" (by evaluation during
            training), or the number of environment steps of a checkpoint.

        Raises:
          UserError: If there is no such run or checkpoint.
        """
        self._folder = RunFolder(pretrained.find(root_dir))
        if not self._folder.config.is_file():
            raise UserError(_no_run(self._folder.path))
        self._description = self._folder.read_json("run.json")
        self.seed, self.num_envs = int(self._described("seed")), int(self._described("num_envs"))
        self._checkpoint = self._find(str(checkpoint))
        self._config = self._folder.config
        if self._checkpoint:
            digits = self._checkpoint.name.removeprefix("step-").partition(".")[0]
            self._config = self._folder.config_at(int(digits))

    def _described(self, key: str) -> Any:
        try:
            return self._description[key]
        except KeyError as error:
            path = self._folder.path / "run.json"
            raise UserError(f"{path} is missing or lacks {error}: {REWRITE}.") from error

    @property
    def origin(self) -> dict[str, Any]:
        """Returns the seed, the spaces, and what made the run, from run.json.

        The spaces are JSON; see `environments.saved_spaces`.

        Raises:
          UserError: If run.json does not hold them.
        """
        needed = "seed", "num_envs", "observation_space", "action_space"
        others = "versions", "cpu_model", "git_revision", "encoder_precision"
        known = {key: self._description[key] for key in others if key in self._description}
        return {key: self._described(key) for key in needed} | known

    @property
    def config(self) -> str:
        """Returns the text of the operative configuration."""
        return self._config.read_text(encoding="utf-8")

    @property
    def path(self) -> pathlib.Path:
        """Returns the folder of the run."""
        return self._folder.path

    def read_config(
        self, gin_bindings: list[str], allow_imports: bool = False
    ) -> list[Import | Binding]:
        """Returns the run's configuration and then `gin_bindings`, for `configuration.apply`.

        Raises:
          UserError: If a statement cannot be read; see `configuration.read`.
        """
        statements = configuration.read([str(self._config)], [], allow_imports)
        if precision := self._description.get("encoder_precision"):
            statements = [_in_precision(x, precision) for x in statements]
        return statements + configuration.read([], gin_bindings, allow_imports)

    def restore(self, agent: Part, networks: Part | None = None) -> Restored:
        """Restores the agent, or its networks if the run has nothing else.

        Args:
          agent: Part with the whole agent.
          networks: Part with the agent's `trained`, or None if the whole agent is needed.

        Raises:
          UserError: If the checkpoint is missing, is damaged, or belongs to another agent, or if
            the run has only networks and the whole agent is needed.
        """
        name, part = _AGENT, agent
        if any(self._folder.checkpoints.glob(f"*/{NETWORKS}")):
            if networks is None:
                raise UserError(
                    f"{self.path} has networks alone, without an optimizer. Training cannot start "
                    "with it; use the folder of a training run."
                )
            name, part = NETWORKS, networks
        checkpoints = Checkpoints(self._folder.checkpoints, {name: part}, writable=False)
        restored = checkpoints.restore(self._checkpoint)
        if restored is None:
            raise UserError(self._no_checkpoint())
        return restored

    def _find(self, name: str) -> pathlib.Path | None:
        """Returns the checkpoint's path, or None for the newest intact checkpoint."""
        checkpoints = Checkpoints(self._folder.checkpoints, {}, writable=False)
        if name == "latest":
            if checkpoints.latest() is None:
                raise UserError(self._no_checkpoint())
            return None
        if name == "best":
            if (best := checkpoints.best()) is None:
                raise UserError(
                    f"{self.path} has no best checkpoint yet, because no evaluation during "
                    "training has taken place or finished an episode (train.eval_interval). Pass "
                    "--checkpoint=latest."
                )
            return best.path
        digits = name.replace("_", "").replace(",", "")
        if not digits.isdecimal():
            raise UserError(
                f"checkpoint {name!r} must be latest, best, or a number of environment steps."
            )
        return checkpoints.at(int(digits))

    def _no_checkpoint(self) -> str:
        path = self._folder.path
        return f"{path} has no checkpoint yet: run its training command until it saves one."


def _in_precision(statement: Import | Binding, precision: str) -> Import | Binding:
    """Returns a statement with the precision that "auto" was in training, on another machine."""
    if not isinstance(statement, Binding):
        return statement
    is_chosen = (statement.short_name, statement.value) == (_PRECISION, "auto")
    return statement._replace(value=precision) if is_chosen else statement


def _no_run(path: pathlib.Path) -> str:
    if path.is_dir():
        return f"{path} holds no run: it has no operative_config.gin."
    runs = [str(file.parent) for file in path.parent.glob("*/operative_config.gin")]
    return f"there is no run {path}.{suggest(str(path), runs)}"
