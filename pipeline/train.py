"""Trains an agent: python -m pipeline.train --root_dir=runs/x --gin_file=dqn_cartpole."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from absl import flags

from pipeline import cli, configuration
from pipeline.configuration.statements import Binding
from pipeline.runs import pretrained
from pipeline.runs.run_folder import RESTART_BEHAVIORS
from pipeline.utils.errors import UserError
from pipeline.utils.progress import score_text

_ROOT_DIR = cli.define_path("root_dir", None, "Folder of the run; created if missing.")
_GIN_FILE = flags.DEFINE_multi_string(
    "gin_file", [], "Path or shipped config (see --list_configs); several are applied in order."
)
_GIN_BINDINGS = flags.DEFINE_multi_string(
    "gin_bindings", [], "Bindings that override the files, as in 'train.num_env_steps = 50_000'."
)
_SEED = flags.DEFINE_integer("seed", 1, "Seed of all random numbers.", lower_bound=0)
_RESTART_BEHAVIOR = flags.DEFINE_enum(
    "restart_behavior",
    "resume",
    list(RESTART_BEHAVIORS),
    "If root_dir holds a run: resume it, move it aside and start over, or stop with an error.",
)
_ALLOW_INEXACT_RESUME = flags.DEFINE_bool(
    "allow_inexact_resume",
    False,
    "Resume even if versions, threads, processor or configuration differ.",
)
_REQUIRE_EXACT_RESUME = flags.DEFINE_bool(
    "require_exact_resume",
    False,
    "Refuse to resume if an environment cannot continue its episodes.",
)
_WARM_START = cli.define_path(
    "warm_start",
    None,
    "Folder of another run: start with its weights, optimizer and normalisers.",
)
_EAGER = flags.DEFINE_bool("eager", False, "Run every operation from Python. This is slow.")
_EXACT_GRAPH = flags.DEFINE_bool(
    "exact_graph",
    False,
    "Disable TensorFlow's graph optimizer, so that a graph computes the same bits as --eager.",
)
_LIST_CONFIGS = flags.DEFINE_bool("list_configs", False, "List the shipped configs and exit.")
_EXPLAIN = flags.DEFINE_bool(
    "explain",
    False,
    "List every binding in force and where it is set, summarise the networks, and exit.",
)
_RAY_ADDRESS = flags.DEFINE_string(
    "ray_address",
    None,
    "With runners/distributed: Ray cluster whose processes collect, such as auto or HOST:6379.",
)
_ALLOW_GIN_IMPORTS = flags.DEFINE_bool(
    "allow_gin_imports", False, "Let gin files import other packages: a gin file is code."
)


@cli.program
def main(_: Sequence[str]) -> int:
    if _LIST_CONFIGS.value:
        configs = configuration.list_configs()
        width = max(len(name) for name, _ in configs)
        print("\n".join(f"{name:{width}}  {comment}" for name, comment in configs))
        return 0
    if not _GIN_FILE.value and not _GIN_BINDINGS.value:
        raise UserError("say what to train: --gin_file=dqn_cartpole, or see --list_configs.")
    if not _ROOT_DIR.value and not _EXPLAIN.value:
        raise UserError("say where the run goes: --root_dir=runs/NAME.")
    if _EAGER.value and _EXACT_GRAPH.value:
        raise UserError("--exact_graph has no effect with --eager, which runs no graph: drop one.")
    if _EXPLAIN.value:  # The output is the result, so it must not be lost silently.
        return _train()
    with cli.expendable_output():
        return _train()


def _train() -> int:
    bindings = list(_GIN_BINDINGS.value)
    if _RAY_ADDRESS.value is not None:
        bindings.append(f"distributed_runner.ray_address = {_RAY_ADDRESS.value!r}")
    statements = configuration.read(_GIN_FILE.value, bindings, _ALLOW_GIN_IMPORTS.value)
    runners = [s for s in statements if isinstance(s, Binding) and s.short_name == "train.runner"]
    if _RAY_ADDRESS.value is not None and (
        not runners or "asynchronous_runner" in str(runners[-1])
    ):
        raise UserError("--ray_address has no effect without --gin_file=runners/distributed.")
    cli.load_tensorflow(statements)
    from pipeline.checkpointing.exactness import Exactness
    from pipeline.training.train_loop import train
    from pipeline.utils.execution import Execution
    from pipeline.utils.shutdown import Stopped, StopSignal

    graph = Execution.EXACT_GRAPH if _EXACT_GRAPH.value else Execution.GRAPH

    # Modules that gin imports, and environments, may change the working directory.
    python = cli.python_command()
    root_dir = _ROOT_DIR.value and os.path.abspath(_ROOT_DIR.value)
    warm_start = _WARM_START.value and str(pretrained.find(_WARM_START.value).absolute())
    configuration.apply(statements)
    with StopSignal(ends_at_once=True) as stop:
        try:
            result = train(
                root_dir,
                _SEED.value,
                _RESTART_BEHAVIOR.value,
                stop,
                dry_run=_EXPLAIN.value,
                exactness=Exactness(_ALLOW_INEXACT_RESUME.value, _REQUIRE_EXACT_RESUME.value),
                execution=Execution.EAGER if _EAGER.value else graph,
                warm_start=warm_start,
            )
        except Stopped:
            how = "" if _RESTART_BEHAVIOR.value == "resume" else " with --restart_behavior=resume"
            print(f"stopped; the same command{how} resumes {_ROOT_DIR.value}.")
            return 128 + (stop.signal or 0)
        if _EXPLAIN.value:
            print(f"{configuration.explain()}\n\n# Networks: layers, shapes, weights")
            print(result["networks"])
        else:
            print(_closing_words(result, python))
    return 0


def _closing_words(result: dict, python: str) -> str:
    returns = result["evaluation"]["returns"]
    folder = _ROOT_DIR.value or ""  # No run starts without a folder.
    root_dir = f"--root_dir={shlex.quote(folder)}"
    video = shlex.quote(f"{folder}/episode.mp4")
    imports = " --allow_gin_imports" if _ALLOW_GIN_IMPORTS.value else ""
    score = "no episode ended"
    if returns:
        mean, deviation = (score_text(result["evaluation"][f"return_{x}"]) for x in ("mean", "std"))
        score = f"{mean} ± {deviation} over {len(returns)} episodes"
    return (
        f"evaluation of the final weights: {score}\n"
        f"{folder}/result.json has the return of each episode. Next steps:\n"
        f"  {python} -m pipeline.plot {root_dir} --output=curve.png\n"
        f"  {python} -m pipeline.evaluate {root_dir} --video={video}{imports}"
    )


if __name__ == "__main__":
    main()
