"""Seals a folder with a manifest of every file's size and SHA-256, and verifies it later."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import pathlib
from collections.abc import Collection, Iterator
from concurrent import futures
from typing import Any

from pipeline.utils.errors import UserError
from pipeline.utils.files import parse_object, sync

_NAME = "manifest.json"
_FORMAT_VERSION = 1
# Errors which mean that the file does not exist. Any other error may be temporary.
_NO_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}


class Damaged(Exception):
    """Raised if a folder is not as it was sealed. The message names the file and the fault."""


def seal(folder: pathlib.Path, header: dict[str, Any], earlier: pathlib.Path | None = None) -> None:
    """Writes manifest.json for all files below the folder, and syncs files and folders to the disk.

    Args:
      folder: Folder to seal.
      header: JSON values, which `verify` returns.
      earlier: A sealed folder. Files that are hard links to its files are neither read nor synced.

    Raises:
      OSError: If a file cannot be written, for example because the disk is full.
    """
    sealed = _seals_of(earlier) if earlier else {}
    paths = sorted(folder.rglob("*"))
    files = [x for x in paths if x.is_file()]
    names = [x.relative_to(folder).as_posix() for x in files]

    def seal_of(name: str) -> dict[str, Any]:
        if earlier and name in sealed and _is_same(folder / name, earlier / name):
            return sealed[name]
        return _seal_file(folder / name)

    with futures.ThreadPoolExecutor() as pool:
        seals = list(pool.map(seal_of, names))
    body = {
        "format_version": _FORMAT_VERSION,
        "header": header,
        "files": dict(zip(names, seals, strict=True)),
    }
    document = {"manifest": body, "sha256": _json_sha256(body)}
    (folder / _NAME).write_text(json.dumps(document, indent=1))
    for path in [folder / _NAME, *(x for x in paths if x.is_dir()), folder]:
        sync(path)


def verify(folder: pathlib.Path, subfolders: Collection[str] | None = None) -> dict[str, Any]:
    """Verifies files against the manifest, and returns the manifest's header.

    Args:
      folder: A sealed folder.
      subfolders: Names of the subfolders whose files are verified. None verifies all files.

    Raises:
      Damaged: If a file, or the manifest itself, is missing or changed.
      OSError: If a file cannot be read now.
      UserError: If another version of the program wrote the manifest.
    """
    body = _read(folder / _NAME)
    files = {
        name: seal
        for name, seal in body["files"].items()
        if subfolders is None or name.split("/")[0] in subfolders
    }
    with futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda item: _verify_file(folder, *item), files.items()))
    return body["header"]


def header_of(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the manifest's header without verifying the folder's files.

    Raises:
      Damaged: If the manifest is missing or changed.
      OSError: If the manifest cannot be read now.
      UserError: If another version of the program wrote it.
    """
    return _read(folder / _NAME)["header"]


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        with _missing_is_damage(path.name):
            content = path.read_bytes()
        document = parse_object(content, "manifest", "sha256")
        body, confirmed = document["manifest"], document["sha256"]
        is_unchanged = _json_sha256(body) == confirmed
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path.name} is not a manifest: {error}") from error
    if not is_unchanged:
        raise Damaged(f"{path.name} has changed since it was written")
    if not isinstance(body, dict) or "format_version" not in body:
        raise Damaged(f"{path.name} is not a manifest: it has no format_version")
    if body["format_version"] != _FORMAT_VERSION:
        raise UserError(
            f"{path.parent} has format {body['format_version']}; this version of the program reads"
            f" format {_FORMAT_VERSION}. Use the version that wrote it."
        )
    if not _is_list_of_files(body):
        raise Damaged(f"{path.name} is not a manifest: it lists no files")
    return body


def _is_list_of_files(body: dict[str, Any]) -> bool:
    header, files = body.get("header"), body.get("files")
    if not isinstance(header, dict) or not isinstance(files, dict):
        return False
    return all(map(_is_seal, files.values()))


def _is_seal(value: Any) -> bool:
    types = {"size": int, "sha256": str}
    return isinstance(value, dict) and {key: type(x) for key, x in value.items()} == types


def _seals_of(folder: pathlib.Path) -> dict[str, Any]:
    try:
        return _read(folder / _NAME)["files"]
    except (Damaged, OSError):  # Damage to an earlier folder must not affect the new one.
        return {}


def _is_same(path: pathlib.Path, earlier: pathlib.Path) -> bool:
    try:
        return path.samefile(earlier)
    except OSError:  # The earlier file may have been deleted.
        return False


def _seal_file(path: pathlib.Path) -> dict[str, Any]:
    entry = {"size": path.stat().st_size, "sha256": _file_sha256(path)}
    sync(path)
    return entry


def _verify_file(folder: pathlib.Path, name: str, seal: dict[str, Any]) -> None:
    with _missing_is_damage(name):
        size = (folder / name).stat().st_size
        if size != seal["size"]:
            raise Damaged(f"{name} has {size:,} bytes, but {seal['size']:,} were written")
        if _file_sha256(folder / name) != seal["sha256"]:
            raise Damaged(f"{name} has changed since it was written")


@contextlib.contextmanager
def _missing_is_damage(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        is_missing = isinstance(error, FileNotFoundError)
        fault = "is missing" if is_missing else f"cannot be read: {error}"
        raise Damaged(f"{name} {fault}") from error
    except ValueError as error:  # The name is not a valid file name.
        raise Damaged(f"{name} cannot be read: {error}") from error


def _file_sha256(path: pathlib.Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _json_sha256(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
