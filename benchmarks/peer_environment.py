"""The virtual environment of the peers that this pipeline's own cannot hold.

Stable-Baselines3 needs torch, several gigabytes that training does not need.
"""

from __future__ import annotations

import pathlib
import platform
import shutil
import subprocess
import sys

from pipeline.utils.errors import UserError

FOLDER = pathlib.Path(".venv-peers")
CONSTRAINTS = pathlib.Path(__file__).parent / "peers.txt"
# Torch comes first and alone: asked for beside others, pip would look at its CUDA builds too.
_INSTALLATIONS = (
    ("torch",),
    (
        "stable-baselines3", "sb3-contrib", "ale-py", "gymnasium", "numpy",
        "opencv-python-headless",
    ),
)  # fmt: skip
_MAX_ERROR_LINES = 10


def ensure(folder: pathlib.Path = FOLDER, constraints: pathlib.Path = CONSTRAINTS) -> pathlib.Path:
    """The environment's Python, an absolute path; makes the environment if need be.

    It is made anew when `constraints` or the version of Python has changed, or when making it was
    broken off.

    Raises:
        UserError: it cannot be made; tells the end of what pip or venv said.
    """
    python = folder.absolute() / "bin" / "python"
    installed = folder / "installed.txt"
    wanted = f"# Python {platform.python_version()}\n{constraints.read_text()}"
    if installed.exists() and installed.read_text() == wanted:
        return python
    print(f"making {folder} with the peers, 1 to 6 GB ...", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    for packages in _INSTALLATIONS:
        _run([str(python), "-m", "pip", "install", "-q", "-c", str(constraints), *packages])
    installed.write_text(wanted)
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        end = "\n".join(done.stdout.strip().splitlines()[-_MAX_ERROR_LINES:])
        raise UserError(
            f"the peers' environment cannot be made: {' '.join(command)} failed:\n{end}\n"
            "Mend this and call again, or measure without --peers."
        )
