"""Manages the folder of one run: its files, its lock and its description.

root_dir/
    operative_config.gin    every binding in force; can be passed to `--gin_file`
    operative_config.until-N.gin    bindings in force until environment step N, if changed there
    run.json                command, seed, spaces, versions, processor, threads, resumptions
    metrics.jsonl           one JSON object per log record
    eval.jsonl              one JSON object per evaluation
    events.out.tfevents.*   the same records for TensorBoard
    checkpoints/            see `pipeline.checkpointing.checkpoints`
    result.json             written when the run is finished
    losses.json             of a suite or search: how often the machine of the run was lost
    .lock                   locked by the process that trains
"""

from __future__ import annotations

import pathlib
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from pipeline import configuration
from pipeline.checkpointing.exactness import check_seed, versions
from pipeline.runs import source_revision
from pipeline.utils import files
from pipeline.utils.errors import UserError
from pipeline.utils.files import Lock, lock, named_errors, write_text
from pipeline.utils.processor import machine

#: What to do without run.json, for messages.
REWRITE = (
    "repeat the run's training command, which continues from its checkpoint and writes run.json "
    "again"
)
RESTART_BEHAVIORS = ("resume", "restart", "fail")
_LOCK = ".lock"
_UNTIL = "operative_config.until-"
#: Beginning of the error message if another process holds the lock of a folder.
BUSY = "another process is training in"
_OTHER_SOURCE = (
    "{} changed since the last start; the run continues as if it had never been interrupted only "
    "if the change does not affect its computations."
)
# Types of the values that are read back from the folder's JSON files.
_KINDS: dict[str, type] = {
    "command": str,
    "seed": int,
    "num_envs": int,
    "observation_space": dict,
    "action_space": dict,
    "env_steps": int,
    "resumed_at_env_steps": list,
    "earlier_starts": list,
    "inexact_resumes": list,
    "has_checkpoint": bool,
    "own_modules": dict,
    "encoder_precision": str,
    "evaluation": dict,
}


class RunFolder:
    """Names the files of a run, and applies `--restart_behavior` to a folder that holds a run."""

    def __init__(self, root_dir: str | pathlib.Path):
        self.path = pathlib.Path(root_dir).absolute()  # An environment may change the folder.
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.evaluations = self.path / "eval.jsonl"
        self.config = self.path / "operative_config.gin"
        self._held: Lock | None = None

    def open(self, restart_behavior: str, seed: int) -> list[str]:
        """Makes the folder ready for training.

        Args:
          restart_behavior: What to do with a run that the folder already holds: "resume" it,
            "restart" (which moves it aside) or "fail".
          seed: Seed of the run. A resumed run must have the same seed.

        Returns:
          Messages for the user.

        Raises:
          UserError: If the folder holds a run and `restart_behavior` is "fail", the seed differs,
            the folder holds other files, another process trains there, or the folder cannot be
            created or written to.
        """
        if not self._has_run() and self._has_something():
            raise UserError(
                f"{self.path} holds files but no run of this program; choose another --root_dir."
            )
        self._lock()
        # Another process may just have begun a run here, or moved one aside.
        return self._reopen(restart_behavior, seed) if self._has_run() else []

    def _has_something(self) -> bool:
        with named_errors(self.path):
            # A first start that failed may have left the lock, an empty folder or a part of a file.
            known = _LOCK, self.checkpoints.name
            names = [x.name for x in self.path.iterdir()] if self.path.is_dir() else []
            return any(x not in known and not x.startswith(files.UNFINISHED) for x in names)

    def _lock(self) -> None:
        """Keeps other processes out until `close` is called or this process ends in any way."""
        self.close()
        self._held = lock(self.path / _LOCK, BUSY, "--root_dir")

    def check_held(self) -> None:
        """Checks that the folder that `open` has locked is still where it was.

        Raises:
          UserError: If it was moved or deleted; see `Lock.check`.
        """
        if self._held is not None:
            self._held.check()

    def close(self) -> None:
        """Lets other processes train in the folder."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def _has_run(self) -> bool:
        with named_errors(self.path):
            has_checkpoints = self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
            # A user may have deleted a damaged run.json.
            files = self.path / "run.json", self.config
            return any(file.exists() for file in files) or has_checkpoints

    def _reopen(self, restart_behavior: str, seed: int) -> list[str]:
        if restart_behavior == "fail":
            raise UserError(
                f"{self.path} already holds a run. Choose another --root_dir, or pass "
                "--restart_behavior=resume to continue the run, or =restart to move it aside."
            )
        if restart_behavior == "restart":
            with named_errors(self.path):
                folder = self.path.resolve()  # A link stays, and leads to the new run.
                aside = _free_name(folder)
                folder.rename(aside)
                files.make_folder(folder)
            return [f"moved the old run to {aside}", *self.open(restart_behavior, seed)]
        self._check_seed(seed)
        return []

    def _check_seed(self, seed: int) -> None:
        check_seed(self.path, self.read_json("run.json").get("seed", seed), seed)

    def finished(self, seed: int, num_env_steps: int) -> dict[str, Any] | None:
        """Returns the contents of result.json if the run has taken `num_env_steps`, else None.

        Raises:
          UserError: If the run has another seed, or a file is damaged.
        """
        self._check_seed(seed)
        result = self.read_json("result.json")
        if result and not _is_evaluation(result.get("evaluation", {})):
            raise UserError(
                f"{self.path / 'result.json'} is damaged (invalid evaluation); delete it to "
                "continue."
            )
        return result if result.get("env_steps", 0) >= num_env_steps else None

    def describe(
        self,
        seed: int,
        num_envs: int,
        settings: dict[str, Any],
        env_steps: int,
        inexact: Sequence[str] = (),
    ) -> list[str]:
        """Writes run.json and operative_config.gin. Call it once everything is built.

        Args:
          seed: Seed of the run.
          num_envs: Number of training environments.
          settings: Settings of TensorFlow and of the encoders, and the environments' spaces.
          env_steps: Number of environment steps at which the run begins or continues.
          inexact: Reasons why the run does not continue bit for bit; empty if it does.

        Returns:
          Messages for the user: that the run is inexact, or that the configuration or the program
          has changed.
        """
        before = self.read_json("run.json")
        start = {
            "command": _command(),
            "seed": seed,
            "num_envs": num_envs,
            **settings,
            "versions": versions(),
            **machine(),
            "git_revision": source_revision.git_revision(),
            "source_sha256": source_revision.source_sha256(),
            "own_modules": source_revision.own_modules(),
        }
        earlier = [{name: before[name] for name in start if name in before}] if before else []
        self.write_json(
            "run.json",
            start
            | {
                "has_checkpoint": before.get("has_checkpoint", False) or env_steps > 0,
                "resumed_at_env_steps": before.get("resumed_at_env_steps", [])
                + [env_steps] * len(earlier),
                "earlier_starts": before.get("earlier_starts", []) + earlier,
                "inexact_resumes": before.get("inexact_resumes", [])
                + [{"env_steps": env_steps, "why": list(inexact)}] * bool(inexact),
            },
        )
        with named_errors(self.path):
            # A result.json that exists here is obsolete: train.num_env_steps was raised after it.
            (self.path / "result.json").unlink(missing_ok=True)
            changes = self._write_config(configuration.operative_config(), env_steps)
        if before.get("source_sha256", start["source_sha256"]) != start["source_sha256"]:
            changes.append(f"warning: {_OTHER_SOURCE.format('this program has')}")
        now, then = start["own_modules"], before.get("own_modules", {})
        if edited := [name for name in now if then.get(name, now[name]) != now[name]]:
            changed = f"modules of your own ({', '.join(edited)}) have"
            changes.append(f"warning: {_OTHER_SOURCE.format(changed)}")
        return [*(f"warning: the run is inexact from here on: {why}" for why in inexact), *changes]

    def note_checkpoint(self) -> None:
        """Records in run.json that the run has a checkpoint.

        Raises:
          WriteError: If the file cannot be written, for example because the disk is full.
        """
        self.write_json("run.json", self.read_json("run.json") | {"has_checkpoint": True})

    def check_none_lost(self) -> None:
        """Checks that no checkpoint was lost. Call it if the folder holds no checkpoint.

        Raises:
          UserError: If the run has had a checkpoint, or has results but no run.json that says so.
        """
        start = self.read_json("run.json")
        results = (self.metrics, self.evaluations, self.path / "result.json")
        if start.get("has_checkpoint"):
            reason = f"{self.path / 'run.json'} says that the run has a checkpoint"
        elif not start and any(path.exists() and path.stat().st_size for path in results):
            reason = f"{self.path} has the results of a run"
        else:
            return
        raise UserError(
            f"{reason}, but {self.checkpoints} holds none. Put the checkpoint back, or start over "
            "with --restart_behavior=restart, which moves aside what is left of the run."
        )

    def config_at(self, env_steps: int) -> pathlib.Path:
        """Returns the operative configuration in force when a checkpoint of a step was trained.

        It is not the newest one if the run was later resumed with other values.
        """
        later = [end for end in self._changes() if end >= env_steps]
        return self._config_until(min(later)) if later else self.config

    def _changes(self) -> list[int]:
        """Returns the environment steps at which the configuration was changed."""
        return [int(x.stem.removeprefix(_UNTIL)) for x in self.path.glob(f"{_UNTIL}*.gin")]

    def _config_until(self, env_steps: int) -> pathlib.Path:
        return self.path / f"{_UNTIL}{env_steps}.gin"

    def _write_config(self, text: str, env_steps: int) -> list[str]:
        path, past = self.config, self.config_at(env_steps)
        before, of_past = (
            x.read_text(encoding="utf-8", errors="replace") if x.exists() else text
            for x in (path, past)
        )
        changed = sorted(set(text.splitlines()) ^ set(before.splitlines()))
        aside = self._config_until(env_steps)
        if past != aside and of_past != text:
            write_text(aside, of_past)  # copied, not moved: readers may open `path` at any time
        write_text(path, text)
        # The run has gone back to a checkpoint before these changes. The last one goes first: if
        # this is interrupted, `config_at` still finds the first for older checkpoints.
        for end in sorted(self._changes(), reverse=True):
            if end > env_steps:
                self._config_until(end).unlink()
        lines = "\n  ".join(changed)
        warning = f"warning: the configuration differs from that of the last start:\n  {lines}"
        return [warning] if changed else []

    def read_json(self, name: str) -> dict[str, Any]:
        """Returns the object in a JSON file of the folder, or {} if there is no such file.

        Raises:
          UserError: If the file is damaged or cannot be read.
        """
        fix = f"delete it, and {REWRITE}" if name == "run.json" else "delete it to continue"
        return files.read_json(self.path / name, _KINDS, fix)

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Replaces a JSON file of the folder atomically.

        Raises:
          WriteError: If the file cannot be written, for example because the disk is full.
          UserError: If the folder was moved or deleted after `open`; see `Lock.check`.
        """
        self.check_held()
        files.write_json(self.path / name, value)


def _free_name(folder: pathlib.Path) -> pathlib.Path:
    """Returns a path to which the folder can be renamed."""
    if folder.samefile(pathlib.Path.cwd()):
        raise UserError(
            f"{folder} cannot be moved aside while it is the working directory: change to the "
            f"parent folder, and pass --root_dir={folder.name}."
        )
    if folder.is_mount():
        raise UserError(
            f"{folder} cannot be moved aside, because it is a mount point: move its files, or "
            f"pass a folder in it, such as --root_dir={folder / 'run'}."
        )
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    return aside


def _is_evaluation(value: dict[str, Any]) -> bool:
    kind = int | float if value.get("returns") else int | float | None  # no returns have no mean
    are_right = all(isinstance(value.get(name, ""), kind) for name in ("return_mean", "return_std"))
    return are_right and isinstance(value.get("returns"), list)


def _command() -> str:
    """Returns the training command, without the path of the program on this machine."""
    return shlex.join(["python", "-m", "pipeline.train", *sys.argv[1:]])
