"""Creates the virtual environment of the peers that are not installed in this pipeline's own.

Stable-Baselines3 needs torch, which takes several gigabytes that this pipeline does not need.
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
# Torch is installed first and alone. Together with other packages, pip would consider its CUDA
# builds too.
_INSTALLATIONS = (
    ("torch",),
    (
        "stable-baselines3", "sb3-contrib", "ale-py", "gymnasium", "numpy",
        "opencv-python-headless",
    ),
)  # fmt: skip
_MAX_ERROR_LINES = 10


def ensure(folder: pathlib.Path = FOLDER, constraints: pathlib.Path = CONSTRAINTS) -> pathlib.Path:
    """Creates the environment if necessary, and returns the absolute path of its Python.

    The environment is created again if `constraints` or the version of Python has changed, or if
    its creation was interrupted.

    Args:
      folder: Folder of the environment.
      constraints: File with the versions to install, a constraints file of pip.

    Raises:
      UserError: If the environment cannot be created. The message includes the end of the output
        of pip or venv.
    """
    python = folder.absolute() / "bin" / "python"
    installed = folder / "installed.txt"
    wanted = f"# Python {platform.python_version()}\n{constraints.read_text()}"
    if installed.exists() and installed.read_text() == wanted:
        return python
    print(f"creating {folder} with the peers, 1 to 6 GB ...", flush=True)
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
            f"cannot create the peers' environment: {' '.join(command)} failed:\n{end}\n"
            "Solve this problem and run the same command again, or measure without --peers."
        )
