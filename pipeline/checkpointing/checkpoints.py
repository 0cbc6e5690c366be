"""Saves and restores checkpoints of named parts, so that each exists completely or not at all.

    checkpoints/
        step-0000010000/        the number counts environment steps
            agent/ host/ ...    one folder per part, written by the part
            manifest.json       size and SHA-256 of every file, and a SHA-256 of itself; the mean
                                return of the weights, if they were evaluated
        step-0000010000.1/      saved again at the same step; it replaces the one above
        .tmp-...                being written or removed; deleted at the next start

A checkpoint is written under a temporary name, synced to the disk, and renamed. Neither a killed
process nor a power failure can therefore leave a partial checkpoint under a final name, and a name
is never used again for other contents. Only files that match the manifest are restored.
"""

from __future__ import annotations

import math
import pathlib
import re
import shutil
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol

from pipeline.checkpointing import manifest
from pipeline.utils.errors import UserError, WriteError
from pipeline.utils.files import UNFINISHED, error_kind, make_folder, sync, write_error

_NUM_NEWEST = 2  # checkpoints that are kept; the best one is kept, too
_START_OVER = "To start over and move the old run aside, pass --restart_behavior=restart."


class Part(Protocol):
    """Anything stateful that a checkpoint contains."""

    def save(self, folder: pathlib.Path, earlier: pathlib.Path | None = None) -> None:
        """Writes the part's own files into an empty folder.

        `earlier` is the part's folder in the previous checkpoint. A file that would be identical to
        one in there may be a hard link to it.
        """

    def restore(self, folder: pathlib.Path) -> None:
        """Reads what `save` wrote; raises ValueError on any mismatch."""


class Parts:
    """Saves several parts as one, each in a folder of its own name.

    Attributes:
      noun: What the parts are, for messages.
    """

    noun = "parts"

    def __init__(self, parts: Mapping[str, Part]):
        self._parts = dict(parts)

    def save(self, folder: pathlib.Path, earlier: pathlib.Path | None = None) -> None:
        """Saves all parts; see `Part.save`."""
        for name, part in self._parts.items():
            (folder / name).mkdir()
            part.save(folder / name, earlier / name if earlier else None)

    def restore(self, folder: pathlib.Path) -> None:
        """Restores all parts.

        Raises:
          ValueError: If other parts were saved, or one does not fit.
        """
        saved = {path.name for path in folder.iterdir() if path.is_dir()}
        if saved != self._parts.keys():
            raise ValueError(
                f"it was saved with {len(saved)} {self.noun}, this run has {len(self._parts)}"
            )
        for name, part in self._parts.items():
            part.restore(folder / name)


class Restored(NamedTuple):
    """Result of `restore`. Each warning names a checkpoint that was skipped and what is damaged."""

    path: pathlib.Path
    env_steps: int
    warnings: list[str]


class Best(NamedTuple):
    """Checkpoint with the highest evaluation return; the earliest if several are equal."""

    path: pathlib.Path
    return_mean: float


class Checkpoints:
    """Manages the checkpoints of one run, which are all in one folder."""

    def __init__(
        self,
        folder: pathlib.Path,
        parts: Mapping[str, Part],
        *,
        writable: bool = True,
    ) -> None:
        """Initializes the object.

        If `writable`, the folder is created, and what a killed process left in it is deleted.

        Args:
          folder: Folder that contains checkpoints and nothing else.
          parts: Parts by name, saved and restored in this order. The names become folder names.
            Unless `writable`, a checkpoint may have more parts, which are neither verified nor
            read.
          writable: True only in the one process that trains.
        """
        self._folder = folder
        self._parts = dict(parts)
        self._writable = writable
        self._damaged: set[str] = set()
        self._newest: pathlib.Path | None = None  # That this process wrote or restored.
        if writable:
            make_folder(folder)
            for path in folder.glob(f"{UNFINISHED}*"):
                shutil.rmtree(path, ignore_errors=True)  # or the start after this one deletes it

    def save(self, env_steps: int, return_mean: float | None = None) -> pathlib.Path:
        """Saves all parts as the newest checkpoint, then removes those that need not be kept.

        An older checkpoint of the same step is superseded. Checkpoints that `restore` found damaged
        are removed, including those of later steps, because the run has since diverged from them.

        Args:
          env_steps: Number of environment steps, which names the checkpoint.
          return_mean: Mean return of exactly these weights, if they were evaluated; see `best`.

        Raises:
          WriteError: If a file cannot be written, for example because the disk is full.
        """
        same = [x.revision for x in self._list() if x.env_steps == env_steps]
        name = _Name(env_steps, max(same, default=-1) + 1)
        temporary = self._folder / f"{UNFINISHED}{name}"
        try:
            self._write(temporary, {"env_steps": env_steps, "return_mean": return_mean})
            path = temporary.rename(self._folder / str(name))
            self._newest = path
            sync(self._folder)
            self._prune(name)
        except OSError as error:
            raise write_error(error)(
                f"Cannot write the checkpoint of step {env_steps} to {self._folder}: {error}."
            ) from error
        finally:
            # The next start deletes what cannot be removed now.
            shutil.rmtree(temporary, ignore_errors=True)
        return path

    def best(self, unreadable: set[str] | None = None) -> Best | None:
        """Returns the best checkpoint, or None if no checkpoint holds evaluated weights.

        Args:
          unreadable: If given, the names of checkpoints whose manifests cannot be read are added to
            it, and these checkpoints are passed over.

        Raises:
          UserError: If a manifest cannot be read now, or another version of the program wrote it.
        """
        best: Best | None = None
        newest_of_step = {x.env_steps: x for x in self._list() if str(x) not in self._damaged}
        for name in newest_of_step.values():
            path = self._folder / str(name)
            try:
                mean = return_mean_of(path)
            except UserError:
                if unreadable is None:
                    raise
                unreadable.add(path.name)
                continue
            if mean is not None and (best is None or mean > best.return_mean):
                best = Best(path, mean)
        return best

    def latest(self) -> pathlib.Path | None:
        """Returns the newest checkpoint that is not known to be damaged, or None."""
        names = [name for name in self._list() if str(name) not in self._damaged]
        return self._folder / str(names[-1]) if names else None

    def at(self, env_steps: int) -> pathlib.Path:
        """Returns the checkpoint of this step.

        Raises:
          UserError: If this step has no checkpoint. The message lists the steps that have one.
        """
        names = self._list()
        found = [x for x in names if x.env_steps == env_steps]
        if not found:
            steps = ", ".join(str(x) for x in sorted({x.env_steps for x in names})) or "none"
            raise UserError(f"No checkpoint of step {env_steps} in {self._folder}. Steps: {steps}.")
        return self._folder / str(found[-1])

    def restore(self, path: pathlib.Path | None = None) -> Restored | None:
        """Restores the newest checkpoint that matches its manifest, or the given one.

        Args:
          path: Checkpoint to restore. None restores the newest intact one.

        Returns:
          The restored checkpoint, or None if the folder contains no checkpoint.

        Raises:
          UserError: If no checkpoint is intact, the given one is damaged, one cannot be read (a
            WriteError if that may pass), or an intact one does not match the parts.
        """
        wanted = None if self._writable else self._parts.keys()
        candidates = [path] if path else [self._folder / str(x) for x in reversed(self._list())]
        faults: list[str] = []
        for candidate in candidates:
            try:
                env_steps, saved = _verified(candidate, wanted)
            except manifest.Damaged as fault:
                self._damaged.add(candidate.name)
                if path:
                    message = f"is damaged: {fault}. Choose another checkpoint."
                    if not path.exists():
                        message = "has been removed by the run. Repeat the command."
                    raise UserError(f"{path} {message}") from fault
                faults.append(f"{candidate.name} is damaged: {fault}")
                continue
            except OSError as error:
                raise error_kind(error)(
                    f"Cannot read {candidate}: {error}.\n"
                    "If this persists, move that folder away to use the checkpoint before it."
                ) from error
            self._restore_parts(candidate, saved)
            self._newest = candidate
            return Restored(candidate, env_steps, faults)
        if faults:
            lines = "\n  ".join([f"No intact checkpoint in {self._folder}:", *faults])
            raise UserError(f"{lines}\n{_START_OVER}" if self._writable else lines)
        return None

    def _write(self, temporary: pathlib.Path, header: dict[str, Any]) -> None:
        make_folder(self._folder)  # it may have been deleted
        if temporary.exists():  # An earlier try could not remove it.
            shutil.rmtree(temporary)
        temporary.mkdir()
        earlier = self._newest if self._newest and self._newest.is_dir() else None
        Parts(self._parts).save(temporary, earlier)
        manifest.seal(temporary, {**header, "parts": list(self._parts)}, earlier)

    def _prune(self, saved: _Name) -> None:
        names = self._list()
        past = [x for x in names if x <= saved and str(x) not in self._damaged]
        newest_of_step = {x.env_steps: str(x) for x in past}
        keep = {*list(newest_of_step.values())[-_NUM_NEWEST:]}
        best = self.best(unreadable=keep)  # What cannot be read now may be the best one.
        if best is not None:
            keep.add(best.path.name)
        superseded = {*map(str, past)} - keep
        for name in map(str, names):
            if name not in superseded | self._damaged:
                continue
            # Rename first, so that an interrupted removal leaves no damaged checkpoint. The next
            # start deletes what cannot be removed now, such as files that others have open on NFS.
            removed = (self._folder / name).rename(self._folder / f"{UNFINISHED}removed-{name}")
            shutil.rmtree(removed, ignore_errors=True)
        self._damaged.clear()

    def _restore_parts(self, path: pathlib.Path, saved: list[str]) -> None:
        missing = self._parts.keys() - set(saved)
        left_over = set(saved) - self._parts.keys() if self._writable else set()
        if missing or left_over:
            why = f"parts missing {sorted(missing)}, left over {sorted(left_over)}"
            raise self._misfit(path, why)
        for name, part in self._parts.items():
            try:
                part.restore(path / name)
            except (ValueError, FileNotFoundError) as error:
                raise self._misfit(path, f"part {name!r}: {error}") from error
            except OSError as error:
                raise error_kind(error)(f"Cannot restore {path}: {error}.") from error

    def _misfit(self, path: pathlib.Path, why: str) -> UserError:
        message = (
            f"{path} is intact but does not fit this run: {why}\nUse the configuration and the "
            "revision of this program that it was saved with"
        )
        return UserError(
            message + (f" (run.json has both). {_START_OVER}" if self._writable else ".")
        )

    def _list(self) -> list[_Name]:
        """Returns the names of all checkpoints, oldest first.

        Raises:
          UserError: If the folder cannot be read; a WriteError if that may pass, or if this process
            trains, which then tries again.
        """
        try:
            return sorted(x for x in map(_Name.parse, self._folder.iterdir()) if x)
        except FileNotFoundError:
            return []
        except OSError as error:  # An unreadable folder is not one without checkpoints.
            kind = WriteError if self._writable else error_kind(error)
            raise kind(f"Cannot read {self._folder}: {error}.") from error


class _Name(NamedTuple):
    """Folder name of a checkpoint. Names sort from old to new."""

    env_steps: int
    revision: int

    def __str__(self) -> str:
        return f"step-{self.env_steps:010d}" + (f".{self.revision}" if self.revision else "")

    @classmethod
    def parse(cls, path: pathlib.Path) -> _Name | None:
        match = re.fullmatch(r"step-(\d+)(?:\.(\d+))?", path.name)
        return cls(int(match[1]), int(match[2] or 0)) if match else None


def return_mean_of(path: pathlib.Path) -> float | None:
    """Returns the mean return of a checkpoint's evaluation; None if it was not evaluated.

    It is also None if the checkpoint is damaged.

    Raises:
      UserError: If its manifest cannot be read now, or another version of the program wrote it.
    """
    try:
        value = manifest.header_of(path).get("return_mean")
    except manifest.Damaged:
        return None
    except OSError as error:  # It must not pass for a checkpoint that need not be kept.
        raise error_kind(error)(f"Cannot read {path}: {error}.") from error
    return value if isinstance(value, float) and not math.isnan(value) else None


def _verified(path: pathlib.Path, names: Collection[str] | None) -> tuple[int, list[str]]:
    """Returns the environment steps and part names; raises the same errors as `manifest.verify`."""
    header = manifest.verify(path, names)
    env_steps, parts = header.get("env_steps"), header.get("parts")
    if not isinstance(env_steps, int) or not isinstance(parts, list):
        raise manifest.Damaged("its manifest is not that of a checkpoint")
    return env_steps, list(map(str, parts))
