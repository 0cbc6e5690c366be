"""Which source runs: its git revision, and a digest of what it holds."""

from __future__ import annotations

import hashlib
import pathlib
import subprocess

from pipeline.gin_statements import shipped_folder

_PACKAGE = pathlib.Path(__file__).parent


def git_revision() -> str | None:
    """With "+" if the checkout has uncommitted changes; None if no checkout has this source."""
    try:
        _git("ls-files", "--error-unmatch", pathlib.Path(__file__).name)
        revision, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    except (OSError, subprocess.SubprocessError):
        return None
    return revision + ("+" if changes else "")


def source_sha256() -> str:
    """Of modules, configs and the peers' versions: a revision does not tell changes apart."""
    digest = hashlib.sha256()
    folders = {_PACKAGE: ("*.py", "*.txt"), shipped_folder(): ("*.gin",)}
    for folder, patterns in folders.items():
        for path in sorted(path for pattern in patterns for path in folder.rglob(pattern)):
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_PACKAGE), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
