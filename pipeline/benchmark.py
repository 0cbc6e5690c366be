"""Runs benchmarks: python -m pipeline.benchmark --suite=classic --output_dir=runs/bench.

    python -m pipeline.benchmark --suite=classic --output_dir=runs/bench --seeds=10 --workers=2
    python -m pipeline.benchmark --report --output_dir=runs/bench
    python -m pipeline.benchmark --throughput --output_dir=runs/speed --peers

The same command again goes on where it was stopped or killed: finished runs and measured works are
not repeated, failed ones are tried again. The exit code is 1 if some of them have failed.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from absl import flags

from pipeline import cli
from pipeline.errors import UserError
from pipeline.shutdown import StopSignal

_SUITE = flags.DEFINE_string(
    "suite", None, "Run this suite: a shipped one, such as smoke or classic, or a gin file's path."
)
_OUTPUT_DIR = cli.define_path("output_dir", None, "Folder of the results; made if missing.")
_SEEDS = flags.DEFINE_integer(
    "seeds", None, "Run every experiment with seeds 1 to this; else the suite says.", lower_bound=1
)
_WORKERS = flags.DEFINE_integer(
    "workers", None, "Runs at once; 1 if not given. They share the machine.", lower_bound=1
)
_GIN_BINDINGS = flags.DEFINE_multi_string(
    "gin_bindings", [], "Bindings for every run, after the suite's; or for --throughput."
)
_REPORT = flags.DEFINE_bool(
    "report", False, "Write report.html and report.md, or throughput.md, of what is there."
)
_THROUGHPUT = flags.DEFINE_bool("throughput", False, "Measure the speed of every stage.")
_PEERS = flags.DEFINE_bool("peers", False, "With --throughput: measure other libraries, too.")

_ALLOW_GIN_IMPORTS = flags.DEFINE_bool(
    "allow_gin_imports", False, "Let the gin files of runs import modules of others."
)
_ALLOW_INEXACT_RESUME = flags.DEFINE_bool(
    "allow_inexact_resume", False, "Let runs go on although processor or versions differ."
)

_FOR_RUNS = (_ALLOW_GIN_IMPORTS, _ALLOW_INEXACT_RESUME)
_STOPPING = "stopping: the runs write their checkpoints (Ctrl-C again to exit at once)"


def main(_: Sequence[str]) -> int:
    output_dir = _check_flags()
    with cli.expendable_output():
        return _benchmark(output_dir)


def _benchmark(output_dir: pathlib.Path) -> int:
    code = 0
    if _THROUGHPUT.value:
        from pipeline.benchmarks import throughput

        failed = throughput.measure(output_dir, _PEERS.value, _GIN_BINDINGS.value)
        if failed:
            print(f"failed: {', '.join(failed)}; the same command tries these works again.")
        print(f"{output_dir / 'throughput.md'} has the tables.")
        code = int(bool(failed))
    if _SUITE.value:
        code = _run_suite(_SUITE.value, output_dir)
    if _REPORT.value and code <= 1:
        for path in _write_reports(output_dir):
            print(f"wrote {path}")
    return code


def _write_reports(output_dir: pathlib.Path) -> list[pathlib.Path]:
    from pipeline.benchmarks import ledger, report, throughput

    written = throughput.rewrite_tables(output_dir)
    if written and not ledger.suites_in(output_dir):
        return written
    return written + report.write(output_dir)


def _check_flags() -> pathlib.Path:
    """The output folder.

    Raises:
        UserError: there is nothing to do, or a flag would have no effect.
    """
    if not (_SUITE.value or _REPORT.value or _THROUGHPUT.value):
        raise UserError("say what to do: --suite=NAME, --report or --throughput.")
    if not _OUTPUT_DIR.value:
        raise UserError("say where results go: --output_dir=runs/NAME.")
    if _SUITE.value and _THROUGHPUT.value:
        raise UserError("--throughput measures the machine alone: run --suite before or after it.")
    either = _SUITE.value or _THROUGHPUT.value
    needs = [
        ("seeds", _SEEDS.value, _SUITE.value, "--suite"),
        ("workers", _WORKERS.value, _SUITE.value, "--suite"),
        ("gin_bindings", _GIN_BINDINGS.value, either, "--suite or --throughput"),
        ("peers", _PEERS.value, _THROUGHPUT.value, "--throughput"),
        *((flag.name, flag.value, _SUITE.value, "--suite") for flag in _FOR_RUNS),
    ]
    for name, value, is_met, need in needs:
        if value and not is_met:
            raise UserError(f"--{name} has no effect without {need}.")
    return pathlib.Path(_OUTPUT_DIR.value)


def _run_suite(name: str, output_dir: pathlib.Path) -> int:
    from pipeline.benchmarks import runner, suites

    suite = suites.load(name, _ALLOW_GIN_IMPORTS.value)
    suite = suite._replace(num_seeds=_SEEDS.value or suite.num_seeds)
    with StopSignal(_STOPPING) as stop:
        for_runs = [f"--{flag.name}" for flag in _FOR_RUNS if flag.value]
        outcome = runner.run_suite(
            suite, output_dir, _WORKERS.value or 1, _GIN_BINDINGS.value, stop, flags=for_runs
        )
    for run, reason in outcome.failed:
        printed = f"; all that it printed: {run.log}" if run.log.is_file() else ""
        print(f"{run.name} has failed ({reason}){printed}")
    if outcome.left:
        print(f"stopped; left: {outcome.left}. The same command goes on with them.")
        return 128 + (stop.signal or 0)
    if outcome.failed:
        print(f"failed: {len(outcome.failed)}; the same command tries these runs again.")
        print("One that cannot go on begins anew if its folder is deleted: its log without .log.")
    if not _REPORT.value:
        print(f"finished: {outcome.finished}. For the report:")
        print(f"  {cli.python_command()} -m pipeline.benchmark --report --output_dir={output_dir}")
    return 1 if outcome.failed else 0


def run() -> None:
    """Entry point of `pipeline-benchmark`."""
    cli.run(main)


if __name__ == "__main__":
    run()
