"""A folder sealed by a manifest: size and SHA-256 of every file, all of it synced to the disk."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Collection
from concurrent import futures
from typing import Any

from pipeline.errors import UserError

_NAME = "manifest.json"
_FORMAT_VERSION = 1
_BLOCK_BYTES = 1 << 20


class Damaged(Exception):
    """The folder is not what was sealed; the message names the file and the fault."""


def seal(folder: pathlib.Path, header: dict[str, Any], earlier: pathlib.Path | None = None) -> None:
    """Writes manifest.json over all files below the folder, and syncs files and folders.

    Args:
        header: JSON values, which `verify` gives back.
        earlier: a sealed folder; files that are hard links to its own are neither read nor synced.
    """
    sealed = _read(earlier / _NAME)["files"] if earlier else {}
    paths = sorted(folder.rglob("*"))
    files = [x for x in paths if x.is_file()]
    names = [x.relative_to(folder).as_posix() for x in files]

    def seal_of(name: str) -> dict[str, Any]:
        if earlier and name in sealed and (folder / name).samefile(earlier / name):
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
    """Holds the files against the manifest, all or those in the subfolders, and gives the header.

    Raises:
        Damaged: a file, or the manifest itself, is missing or changed.
        UserError: another version of the program has written it.
    """
    try:
        body = _read(folder / _NAME)
        files = {
            name: seal
            for name, seal in body["files"].items()
            if subfolders is None or name.split("/")[0] in subfolders
        }
        with futures.ThreadPoolExecutor() as pool:
            list(pool.map(lambda item: _verify_file(folder, *item), files.items()))
    except FileNotFoundError as error:
        name = pathlib.Path(error.filename).relative_to(folder)
        raise Damaged(f"{name} is missing") from error
    except OSError as error:
        raise Damaged(f"cannot be read: {error}") from error
    return body["header"]


def sync(path: pathlib.Path) -> None:
    """Returns when the file's contents, or the folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
        body, confirmed = document["manifest"], document["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path.name} is not a manifest: {error}") from error
    if _json_sha256(body) != confirmed:
        raise Damaged(f"{path.name} has changed since it was written")
    if body["format_version"] != _FORMAT_VERSION:
        raise UserError(
            f"{path.parent} has format {body['format_version']}; this version of the program reads"
            f" format {_FORMAT_VERSION}. Use the version that wrote it."
        )
    return body


def _seal_file(path: pathlib.Path) -> dict[str, Any]:
    entry = {"size": path.stat().st_size, "sha256": _file_sha256(path)}
    sync(path)
    return entry


def _verify_file(folder: pathlib.Path, name: str, entry: dict[str, Any]) -> None:
    size = (folder / name).stat().st_size
    if size != entry["size"]:
        raise Damaged(f"{name} has {size:,} bytes, not {entry['size']:,}")
    if _file_sha256(folder / name) != entry["sha256"]:
        raise Damaged(f"{name} has changed since it was written")


def _file_sha256(path: pathlib.Path) -> str:
    digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(block):
            digest.update(block[:size])
    return digest.hexdigest()


def _json_sha256(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
