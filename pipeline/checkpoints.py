"""The commit protocol over named parts: a checkpoint is there whole, or it is not there.

    checkpoints/
        step-0000010000/        the number counts environment steps
            agent/ host/ ...    one folder a part, written by the part
            manifest.json       size and SHA-256 of every file, and a SHA-256 of itself; what the
                                weights returned, if they were evaluated
        step-0000010000.1/      saved again at the same step: supersedes the one above
        .tmp-...                being written or removed; swept at the next start

A checkpoint is written under a temporary name, synced to the disk, and renamed. So neither a killed
process nor a power failure leaves half a checkpoint under a final name, and no name is ever used
for two contents. Restoring believes nothing that the manifest does not confirm.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
import shutil
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol

from pipeline import manifest
from pipeline.durable import make_folder, sync
from pipeline.errors import UserError, WriteError

_START_OVER = "--restart_behavior=restart starts over (and moves the old run aside)."


class Part(Protocol):
    """Anything stateful that a checkpoint holds."""

    def save(self, folder: pathlib.Path, earlier: pathlib.Path | None = None) -> None:
        """Writes its own files into an empty folder.

        Files that would be the same in `earlier`, this part's folder in the checkpoint before, may
        be hard links to those.
        """

    def restore(self, folder: pathlib.Path) -> None:
        """Reads them back; raises ValueError on any mismatch."""


class CheckpointError(WriteError):
    """A checkpoint could not be written; those before it are intact."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """What `restore` did. Each warning names a checkpoint that was passed over, and its fault."""

    path: pathlib.Path
    env_steps: int
    warnings: list[str]


class Best(NamedTuple):
    """The checkpoint whose evaluation returned most, the earlier of equals."""

    path: pathlib.Path
    return_mean: float


class Checkpoints:
    """The checkpoints of one run, all in one folder."""

    def __init__(
        self,
        folder: pathlib.Path,
        parts: Mapping[str, Part],
        *,
        max_to_keep: int = 2,
        writable: bool = True,
    ) -> None:
        """Makes the folder and sweeps what a killed process left in it, if it is writable.

        Args:
            folder: holds checkpoints and nothing else.
            parts: by name, which becomes a folder's name; saved and restored in this order.
            max_to_keep: the newest so many checkpoints stay, and the best one.
            writable: True only in the one process that trains.
        """
        self._folder = folder
        self._parts = dict(parts)
        self._max_to_keep = max_to_keep
        self._writable = writable
        self._damaged: set[str] = set()
        self._newest: pathlib.Path | None = None  # that this process has written or restored
        if writable:
            make_folder(folder)
            for path in folder.glob(".tmp-*"):
                _remove(path)

    def save(self, env_steps: int, return_mean: float | None = None) -> pathlib.Path:
        """Commits all parts as the newest checkpoint, then removes those that need not stay.

        An older checkpoint of the same step is superseded. Those of later steps are removed: they
        were damaged, `restore` has passed over them, and the run has since gone another way.

        Args:
            env_steps: names the checkpoint.
            return_mean: of these very weights' evaluation, if there was one; see `best`.

        Raises:
            CheckpointError: the disk is full, not writable, ...
        """
        same = [x.revision for x in self._list() if x.env_steps == env_steps]
        name = _Name(env_steps, max(same, default=-1) + 1)
        temporary = self._folder / f".tmp-{name}"
        try:
            self._write(temporary, {"env_steps": env_steps, "return_mean": return_mean})
            path = temporary.rename(self._folder / str(name))
            self._newest = path
            sync(self._folder)
            self._prune(name)
        except OSError as error:
            raise CheckpointError(
                f"Cannot write the checkpoint of step {env_steps} to {self._folder}: {error}.\n"
                "The checkpoints before it are intact: --restart_behavior=resume, which is the "
                "default, goes on from the newest."
            ) from error
        finally:
            # What cannot be removed now is swept at the next start.
            shutil.rmtree(temporary, ignore_errors=True)
        return path

    def best(self) -> Best | None:
        """None if there is no checkpoint of weights that were evaluated.

        Raises:
            UserError: a manifest cannot be read now, or another version of the program wrote it.
        """
        best: Best | None = None
        newest_of_step = {x.env_steps: x for x in self._list() if str(x) not in self._damaged}
        for name in newest_of_step.values():
            mark = _mark(self._folder / str(name))
            if mark and (best is None or mark.return_mean > best.return_mean):
                best = mark
        return best

    def latest(self) -> pathlib.Path | None:
        """The newest checkpoint that is not known to be damaged."""
        names = [name for name in self._list() if str(name) not in self._damaged]
        return self._folder / str(names[-1]) if names else None

    def at(self, env_steps: int) -> pathlib.Path:
        """The checkpoint of this step.

        Raises:
            UserError: there is none; names those there are.
        """
        names = self._list()
        found = [x for x in names if x.env_steps == env_steps]
        if not found:
            steps = ", ".join(str(x) for x in sorted({x.env_steps for x in names})) or "none"
            raise UserError(f"No checkpoint of step {env_steps} in {self._folder}. Steps: {steps}.")
        return self._folder / str(found[-1])

    def restore(
        self, path: pathlib.Path | None = None, names: Collection[str] | None = None
    ) -> Restored | None:
        """Restores the newest checkpoint that its manifest confirms, or the given one.

        Args:
            path: this checkpoint and no other.
            names: the parts to restore; the others are neither verified nor read. Default: all.

        Returns:
            None if the folder holds no checkpoint.

        Raises:
            UserError: none is intact, the given one is not, one cannot be read now, or an intact
                one does not fit the parts.
        """
        candidates = [path] if path else [self._folder / str(x) for x in reversed(self._list())]
        faults: list[str] = []
        for candidate in candidates:
            try:
                env_steps, saved = _verified(candidate, names)
            except manifest.Damaged as fault:
                self._damaged.add(candidate.name)
                if path:
                    raise UserError(f"{path} is damaged: {fault}") from fault
                faults.append(f"{candidate.name} is damaged: {fault}")
                continue
            except OSError as error:
                raise UserError(
                    f"Cannot read {candidate}: {error}.\n"
                    "If it stays so, move that folder away: the checkpoint before it counts then."
                ) from error
            self._restore_parts(candidate, saved, names)
            self._newest = candidate
            return Restored(candidate, env_steps, faults)
        if faults:
            lines = "\n  ".join([f"No intact checkpoint in {self._folder}:", *faults])
            raise UserError(f"{lines}\n{_START_OVER}" if self._writable else lines)
        return None

    def _write(self, temporary: pathlib.Path, header: dict[str, Any]) -> None:
        temporary.mkdir()
        earlier = self._newest if self._newest and self._newest.is_dir() else None
        for name, part in self._parts.items():
            (temporary / name).mkdir()
            part.save(temporary / name, earlier / name if earlier else None)
        manifest.seal(temporary, {**header, "parts": list(self._parts)}, earlier)

    def _prune(self, saved: _Name) -> None:
        names = self._list()
        past = [x for x in names if x <= saved and str(x) not in self._damaged]
        newest_of_step = {x.env_steps: str(x) for x in past}
        keep = {*list(newest_of_step.values())[-self._max_to_keep :]}
        best = self.best()
        if best is not None:
            keep.add(best.path.name)
        superseded = {*map(str, past)} - keep
        for name in map(str, names):
            if name not in superseded | self._damaged:
                continue
            # Renamed first, so that a removal cut short leaves no damaged checkpoint.
            _remove((self._folder / name).rename(self._folder / f".tmp-removed-{name}"))
        self._damaged.clear()

    def _restore_parts(
        self, path: pathlib.Path, saved: list[str], names: Collection[str] | None
    ) -> None:
        wanted = self._parts if names is None else {x: self._parts[x] for x in names}
        missing = wanted.keys() - set(saved)
        left_over = set(saved) - wanted.keys() if names is None else set()
        if missing or left_over:
            why = f"parts missing {sorted(missing)}, left over {sorted(left_over)}"
            raise self._misfit(path, why)
        for name, part in wanted.items():
            try:
                part.restore(path / name)
            except (ValueError, OSError) as error:
                raise self._misfit(path, f"part {name!r}: {error}") from error

    def _misfit(self, path: pathlib.Path, why: str) -> UserError:
        message = (
            f"{path} is intact but does not fit this run: {why}\nUse the configuration and the "
            "revision of this program that it was saved with"
        )
        return UserError(
            message + (f" (run.json has both); {_START_OVER}" if self._writable else ".")
        )

    def _list(self) -> list[_Name]:
        """Oldest first; raises WriteError if the folder cannot be read now."""
        try:
            return sorted(x for x in map(_Name.parse, self._folder.iterdir()) if x)
        except FileNotFoundError:
            return []
        except OSError as error:  # not to be mistaken for a folder without checkpoints
            raise WriteError(f"Cannot read {self._folder}: {error}.") from error


class _Name(NamedTuple):
    """A checkpoint's folder name; sorts from old to new."""

    env_steps: int
    revision: int

    def __str__(self) -> str:
        return f"step-{self.env_steps:010d}" + (f".{self.revision}" if self.revision else "")

    @classmethod
    def parse(cls, path: pathlib.Path) -> _Name | None:
        match = re.fullmatch(r"step-(\d+)(?:\.(\d+))?", path.name)
        return cls(int(match[1]), int(match[2] or 0)) if match else None


def _mark(path: pathlib.Path) -> Best | None:
    """None if the weights were not evaluated, or their return is no number."""
    try:
        value = manifest.header_of(path).get("return_mean")
    except manifest.Damaged:
        return None
    except OSError as error:  # not to be mistaken for a checkpoint that need not stay
        raise WriteError(f"Cannot read {path}: {error}.") from error
    return Best(path, value) if isinstance(value, float) and not math.isnan(value) else None


def _verified(path: pathlib.Path, names: Collection[str] | None) -> tuple[int, list[str]]:
    """Environment steps and names of parts; raises what `manifest.verify` does."""
    header = manifest.verify(path, names)
    env_steps, parts = header.get("env_steps"), header.get("parts")
    if not isinstance(env_steps, int) or not isinstance(parts, list):
        raise manifest.Damaged("its manifest is not of a checkpoint")
    return env_steps, list(map(str, parts))


def _remove(path: pathlib.Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
