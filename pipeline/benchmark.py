"""Runs benchmarks: suites of training runs, reports and throughput.

    python -m pipeline.benchmark --suite=classic --output_dir=runs/bench --seeds=10 --workers=2
    python -m pipeline.benchmark --report --output_dir=runs/bench
    python -m pipeline.benchmark --throughput --gin_file=dqn_cartpole

If the suite was stopped or killed, the same command continues it: finished runs are not repeated,
and failed runs are tried again. The exit code is 1 if runs have failed.
"""

from __future__ import annotations

import math
import pathlib
import shlex
from collections.abc import Sequence

from absl import flags

from pipeline import cli, configuration
from pipeline.benchmarks import run_flags
from pipeline.utils.errors import UserError
from pipeline.utils.shutdown import StopSignal

_SUITE = flags.DEFINE_string(
    "suite", None, "Suite to run: a shipped one, such as smoke or classic, or a gin file's path."
)
_OUTPUT_DIR = cli.define_path("output_dir", None, "Folder of the results; created if missing.")
_SEEDS = flags.DEFINE_integer(
    "seeds", None, "Number N of seeds, which are 1 to N; the default is the suite's.", lower_bound=1
)
_EXPERIMENTS = flags.DEFINE_list(
    "experiments",
    None,
    "Experiments of the suite to run, as names or patterns, separated by commas: "
    "dqn-CartPole-v1,ppo-*; by default all.",
)
_GIN_FILE = flags.DEFINE_multi_string(
    "gin_file", [], "With --throughput: the run to time, as for pipeline.train."
)
_GIN_BINDINGS = flags.DEFINE_multi_string(
    "gin_bindings", [], "Bindings for every run, after the suite's, or for --throughput."
)
_REPORT = flags.DEFINE_bool("report", False, "Write report.html and report.md from the results.")
_THROUGHPUT = flags.DEFINE_bool(
    "throughput", False, "Time each stage of a run alone, and the whole training."
)
_SECONDS = flags.DEFINE_float(
    "seconds", 5.0, "With --throughput: minimum seconds for each stage.", lower_bound=0.1
)
flags.register_validator("seconds", math.isfinite, "must be a finite number")
flags.adopt_module_key_flags(run_flags)  # --help lists them


@cli.program
def main(_: Sequence[str]) -> int:
    _check_flags()
    if _THROUGHPUT.value:
        _measure_throughput()
        return 0
    output_dir = pathlib.Path(_OUTPUT_DIR.value or "")
    with cli.expendable_output():
        code = _run_suite(_SUITE.value, output_dir) if _SUITE.value else 0
        if _REPORT.value and code <= 1:
            from pipeline.benchmarks import report

            for path in report.write(output_dir):
                print(f"wrote {path}")
        return code


def _measure_throughput() -> None:
    allow_imports = run_flags.ALLOW_GIN_IMPORTS.value
    statements = configuration.read(_GIN_FILE.value, _GIN_BINDINGS.value, allow_imports)
    cli.load_tensorflow(statements)
    from pipeline.benchmarks import throughput
    from pipeline.training.components import configure_tensorflow

    configuration.apply(statements)
    configure_tensorflow()
    print(throughput.measure(_SECONDS.value))
    configuration.warn_of_ignored()


def _check_flags() -> None:
    """Checks that there is something to do, and that every flag has an effect.

    Raises:
      UserError: If a flag is missing or has no effect.
    """
    if not (_SUITE.value or _REPORT.value or _THROUGHPUT.value):
        raise UserError("say what to do: --suite=NAME, --report or --throughput.")
    if _THROUGHPUT.value and (_SUITE.value or _REPORT.value):
        raise UserError("--throughput needs the machine for itself: drop --suite and --report.")
    if _THROUGHPUT.value and not _GIN_FILE.value:
        raise UserError("say which run to time: --throughput --gin_file=dqn_cartpole.")
    if not (_OUTPUT_DIR.value or _THROUGHPUT.value):
        raise UserError("say where results go: --output_dir=runs/NAME.")
    either = _SUITE.value or _THROUGHPUT.value
    of_suite = _SUITE.value or _REPORT.value
    needs = [
        ("seeds", _SEEDS.value, _SUITE.value, "--suite"),
        ("experiments", _EXPERIMENTS.value, _SUITE.value, "--suite"),
        ("output_dir", _OUTPUT_DIR.value, of_suite, "--suite or --report"),
        ("seconds", _SECONDS.present, _THROUGHPUT.value, "--throughput"),
        ("gin_file", _GIN_FILE.value, _THROUGHPUT.value, "--throughput"),
        ("gin_bindings", _GIN_BINDINGS.value, either, "--suite or --throughput"),
        ("allow_gin_imports", run_flags.ALLOW_GIN_IMPORTS.value, either, "--suite or --throughput"),
        *((flag.name, flag.value, _SUITE.value, "--suite") for flag in run_flags.OF_RUNS),
    ]
    for name, value, is_met, need in needs:
        if value and not is_met:
            raise UserError(f"--{name} has no effect without {need}.")


def _run_suite(name: str, output_dir: pathlib.Path) -> int:
    from pipeline.benchmarks import runner, suites

    suite = suites.load(name, run_flags.ALLOW_GIN_IMPORTS.value)
    suite = suite._replace(num_seeds=_SEEDS.value or suite.num_seeds)
    if _EXPERIMENTS.value is not None:
        suite = suites.select_experiments(suite, _EXPERIMENTS.value)
    with (
        run_flags.machines(output_dir) as on,
        StopSignal(run_flags.STOPPING) as stop,  # until then, Ctrl-C ends the program at once
    ):
        outcome = runner.run_suite(suite, on, _GIN_BINDINGS.value, stop)
    for run, reason in outcome.failed:
        printed = f"; its output is in {run.log}" if run.log.is_file() else ""
        print(f"{run.name} has failed ({reason}){printed}")
    if outcome.left:
        print(f"stopped; unfinished runs: {outcome.left}. The same command continues with them.")
        return 128 + (stop.signal or 0)
    if outcome.failed:
        print(f"failed: {len(outcome.failed)}; the same command tries these runs again.")
        print("To start a failed run over, delete its folder. Its log is beside it, as FOLDER.log.")
    if not _REPORT.value:
        print(f"finished: {outcome.finished}. For the report:")
        folder = shlex.quote(str(output_dir))
        print(f"  {cli.python_command()} -m pipeline.benchmark --report --output_dir={folder}")
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    main()
