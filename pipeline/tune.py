"""Searches for hyperparameters with Optuna, with trials that are ordinary runs.

    python -m pipeline.tune --search=search.gin --output_dir=runs/search --trials=40 --workers=2
    python -m pipeline.tune --report --output_dir=runs/search

If the search was stopped or killed, the same command continues it and ends with the same trials.
A larger --trials extends a finished search. docs/tutorials/tuning.md describes the search file.
"""

from __future__ import annotations

import importlib.util
import pathlib
import shlex
from collections.abc import Sequence

from absl import flags

from pipeline import cli
from pipeline.benchmarks import run_flags
from pipeline.utils.errors import UserError
from pipeline.utils.shutdown import StopSignal

_SEARCH = flags.DEFINE_string(
    "search", None, "Gin file of the search: what to train, and the distributions of parameters."
)
_OUTPUT_DIR = cli.define_path("output_dir", None, "Folder of the search; created if missing.")
_TRIALS = flags.DEFINE_integer(
    "trials", None, "Number of trials; default 20, for a grid all of its points.", lower_bound=1
)
_REPORT = flags.DEFINE_bool("report", False, "Only write the report of the trials so far.")
flags.adopt_module_key_flags(run_flags)  # --help lists them

_NUM_TRIALS = 20


@cli.program
def main(_: Sequence[str]) -> int:
    _check_flags()
    output_dir = pathlib.Path(_OUTPUT_DIR.value or "")
    with cli.expendable_output():
        code = 0 if _REPORT.value else _search(output_dir)
        if code == 0:
            from pipeline.tuning import search_report

            for path in search_report.write(output_dir):
                print(f"wrote {path}")
        return code


def _check_flags() -> None:
    """Checks that there is something to do, and that every flag has an effect.

    Raises:
      UserError: If a flag is missing or has no effect, or Optuna is not installed.
    """
    if importlib.util.find_spec("optuna") is None:
        raise UserError("Optuna is not installed. Install it with: pip install 'optuna>=5,<6'")
    if not (_SEARCH.value or _REPORT.value):
        raise UserError("set --search=FILE.gin to run a search, or --report to report on one.")
    if not _OUTPUT_DIR.value:
        raise UserError("--output_dir is required, for example --output_dir=runs/NAME.")
    if _REPORT.value:
        for flag in (_SEARCH, _TRIALS, run_flags.ALLOW_GIN_IMPORTS, *run_flags.OF_RUNS):
            if flag.value:
                raise UserError(f"--{flag.name} has no effect with --report.")


def _search(output_dir: pathlib.Path) -> int:
    from pipeline.tuning import search, tuner

    loaded = search.load(_SEARCH.value or "", run_flags.ALLOW_GIN_IMPORTS.value)
    default = loaded.grid_size if loaded.sampler == "grid" else _NUM_TRIALS
    with (
        run_flags.machines(output_dir) as on,
        StopSignal(run_flags.STOPPING) as stop,  # until then, Ctrl-C ends the program at once
    ):
        is_over = tuner.tune(loaded, on, _TRIALS.value or default, stop)
    if not is_over:
        print("stopped. The same command continues the search.")
        print(
            f"{cli.python_command()} -m pipeline.tune --report "
            f"--output_dir={shlex.quote(str(output_dir))} "
            "reports the trials so far."
        )
        return 128 + (stop.signal or 0)
    return 0


if __name__ == "__main__":
    main()
