"""Identifies the program's source by its git revision and by a digest."""

from __future__ import annotations

import contextlib
import hashlib
import pathlib
import subprocess
import sys
import sysconfig

from pipeline.configuration.statements import shipped_folder

_PACKAGE = pathlib.Path(__file__).parents[1]


def git_revision() -> str | None:
    """Returns the git revision, with "+" appended if the package or its configs have changed since.

    Returns None if the source is not tracked in a git checkout, or if git fails.
    """
    try:
        _git("ls-files", "--error-unmatch", "__init__.py")
        revision = _git("rev-parse", "HEAD")
        changes = _git("status", "--porcelain", "--", ".", str(shipped_folder()))
    except (OSError, subprocess.SubprocessError):
        return None
    return revision + ("+" if changes else "")


def source_sha256() -> str:
    """Returns the SHA-256 of the modules and text files of the package, and of the configs.

    Unlike the git revision, it distinguishes uncommitted changes.
    """
    digest = hashlib.sha256()
    for folder, pattern in ((_PACKAGE, "*.py"), (shipped_folder(), "*.gin")):
        # An editor may leave a link to nothing beside a file with unsaved changes.
        for path in sorted(path for path in folder.rglob(pattern) if path.is_file()):
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def own_modules() -> dict[str, str]:
    """Returns the SHA-256 of the file of each imported module that a user may edit, by name.

    These are the modules that are neither installed nor part of Python or of this package, such as
    those of an environment, a network or an agent of the user's own.
    """
    of_others = [pathlib.Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "scripts")]
    digests = {}
    for name, module in sorted(sys.modules.items()):
        # Generated modules, such as AutoGraph's, begin with two underscores.
        is_own_name = name == "__main__" or not name.startswith("__")
        file = getattr(module, "__dict__", {}).get("__file__")
        if not is_own_name or not isinstance(file, str):
            continue
        path = pathlib.Path(file).resolve()
        is_installed = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
        if is_installed or any(map(path.is_relative_to, [*of_others, _PACKAGE])):
            continue
        with contextlib.suppress(OSError):  # A run does not depend on files that are loaded.
            digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return digests


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_PACKAGE), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
