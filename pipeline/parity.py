"""Measures how far eager and graph training drift apart.

    python -m pipeline.parity --gin_file=ppo_cartpole
    python -m pipeline.parity --paired_runs=runs/paired

The first command makes the same updates eagerly, as a graph and as an exact graph. The second
compares the returns of finished runs. docs/eager-and-graph.md explains what they print.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from absl import flags

from pipeline import cli, configuration
from pipeline.utils.errors import UserError
from pipeline.utils.tensorflow_import import import_tensorflow

_GIN_FILE = flags.DEFINE_multi_string(
    "gin_file", [], "Path or shipped config, as in pipeline.train; several are applied in order."
)
_GIN_BINDINGS = flags.DEFINE_multi_string(
    "gin_bindings", [], "Bindings that override the files, as in 'mlp_encoder.units = (64,)'."
)
_ALLOW_GIN_IMPORTS = flags.DEFINE_bool(
    "allow_gin_imports", False, "Let gin files import other packages: a gin file is code."
)
_SEED = flags.DEFINE_integer("seed", 1, "Seed of weights and data.", lower_bound=0)
_NUM_UPDATES = flags.DEFINE_integer("num_updates", 20, "Number of updates.", lower_bound=1)
_PAIRED_RUNS = cli.define_path(
    "paired_runs",
    None,
    "Compare the finished runs in the subfolders of this folder instead. Each seed needs one run "
    "as a graph and one with --eager or --exact_graph.",
)


@cli.program
def main(_: Sequence[str]) -> int:
    has_gin = bool(_GIN_FILE.value or _GIN_BINDINGS.value)
    if has_gin == bool(_PAIRED_RUNS.value):
        raise UserError("say what to compare: either --gin_file=ppo_cartpole or --paired_runs=DIR.")
    if _PAIRED_RUNS.value:
        for flag in (_SEED, _NUM_UPDATES, _ALLOW_GIN_IMPORTS):
            if flag.present:
                raise UserError(f"--{flag.name} has no effect with --paired_runs: drop it.")
        _compare_runs(_PAIRED_RUNS.value)
    else:
        _compare_updates()
    return 0


def _compare_runs(folder: str) -> None:
    import_tensorflow(freeze=True)
    from pipeline.benchmarks.eager_graph import paired_runs, report

    print(report.of_pairs(paired_runs.read_pairs(folder)))


def _compare_updates() -> None:
    statements = configuration.read(_GIN_FILE.value, _GIN_BINDINGS.value, _ALLOW_GIN_IMPORTS.value)
    cli.load_tensorflow(statements)
    from pipeline.benchmarks.eager_graph import report
    from pipeline.benchmarks.eager_graph.updates import Updates
    from pipeline.training.components import build, configure_tensorflow
    from pipeline.training.train_loop import BUILDERS, bound

    configuration.apply(statements)
    builders = list(map(bound, BUILDERS))
    configure_tensorflow()
    # `train.runner` is ignored: for asynchronous actors, the synchronous form is compared.
    components = build(_SEED.value, *builders)
    with contextlib.closing(components):
        updates = Updates(components, _NUM_UPDATES.value)
        for text in report.of_updates(updates):
            print(f"\n{text}", flush=True)
    configuration.warn_of_ignored()


if __name__ == "__main__":
    main()
