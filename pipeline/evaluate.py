"""Evaluates a trained agent: python -m pipeline.evaluate --root_dir=runs/x --video=out.mp4."""

from __future__ import annotations

import contextlib
import os
import pathlib
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import flags

from pipeline import cli, configuration
from pipeline.configuration.statements import Binding, Import
from pipeline.runs import pretrained
from pipeline.runs.saved_run import SavedRun
from pipeline.utils.errors import UserError
from pipeline.utils.files import error_kind, read_object, write_json
from pipeline.utils.progress import EVALUATING, Progress, score_text
from pipeline.utils.shutdown import StopSignal

if TYPE_CHECKING:
    from pipeline.acting.evaluation import Evaluator

_ROOT_DIR = cli.define_path("root_dir", None, "Folder of the run.")
_PRETRAINED = flags.DEFINE_string(
    "pretrained", None, "Instead of --root_dir: the name of a policy that comes with the package."
)
_NUM_EPISODES = flags.DEFINE_integer(
    "num_episodes",
    None,
    "Number of episodes; 100 by default, or none for --video alone.",
    lower_bound=1,
)
_VIDEO = cli.define_path("video", None, "Record one episode as this MP4 file.")
_OUTPUT = cli.define_path(
    "output", None, "Also write the returns to this JSON file, in place of an earlier evaluation."
)
_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", "latest", "latest, best, or the number of environment steps of a checkpoint."
)
_SEED = flags.DEFINE_integer(
    "seed", 1, "Seed of the episodes, which always differ from those of training.", lower_bound=0
)
_GIN_BINDINGS = flags.DEFINE_multi_string(
    "gin_bindings",
    [],
    "Bindings that override those of the run, as in 'Evaluator.greedy = False'. Those of the "
    "environment need the scope evaluation: 'evaluation/gymnasium_environment.num_envs = 4'.",
)
_ALLOW_GIN_IMPORTS = flags.DEFINE_bool(
    "allow_gin_imports", False, "Let the run's configuration import other packages."
)


@cli.program
def main(_: Sequence[str]) -> int:
    if _ROOT_DIR.value and _PRETRAINED.value:
        raise UserError("--pretrained has no effect with --root_dir: drop one of them.")
    if not _ROOT_DIR.value and not _PRETRAINED.value:
        raise UserError(
            "say which run to evaluate: --root_dir=runs/NAME, or --pretrained=NAME with one of "
            f"{', '.join(pretrained.names())}."
        )
    name = f"{pretrained.PREFIX}{_PRETRAINED.value}"
    run = SavedRun(_ROOT_DIR.value or name, _CHECKPOINT.value)
    video, output = _path_of(_VIDEO, ".mp4"), _path_of(_OUTPUT, ".json")
    if output and output.exists() and output.stat().st_size:
        _check_evaluation(output)
    statements = run.read_config(_GIN_BINDINGS.value, _ALLOW_GIN_IMPORTS.value)
    # Import it before StopSignal, so that a signal during the import ends the process at once.
    cli.load_tensorflow(statements)
    with StopSignal("stopping") as stop:
        is_done = _evaluate(run, statements, video, output, stop)
    return 0 if is_done else 128 + (stop.signal or 0)


def _path_of(flag: flags.FlagHolder, suffix: str) -> pathlib.Path | None:
    if flag.value is None:
        return None
    path = pathlib.Path(flag.value).absolute()  # An environment may change the folder.
    if path.suffix.lower() != suffix:
        raise UserError(f"--{flag.name}={flag.value}: the name must end in {suffix}.")
    if path.is_dir():
        raise UserError(f"--{flag.name}={path} is a folder: choose another name.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"--{flag.name}={path}: cannot create its folder: {error.strerror}."
        raise error_kind(error)(message) from error
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"--{flag.name}={path}: its folder cannot be written to.")
    return path


def _check_evaluation(output: pathlib.Path) -> None:
    """Checks that a file holds an evaluation, which may be overwritten, and not part of a run.

    Raises:
      UserError: If it does not.
    """
    try:
        read_object(output, "env_steps", "seed", "returns")
    except (ValueError, OSError) as error:
        raise UserError(
            f"--output={output} exists and does not hold an evaluation ({error}): choose another "
            "name."
        ) from error


def _evaluate(
    run: SavedRun,
    statements: Sequence[Import | Binding],
    video: pathlib.Path | None,
    output: pathlib.Path | None,
    stop: StopSignal,
) -> bool:
    """Records the video, if any, and plays the episodes, if any, whose returns go to `output`.

    Returns:
      False if a signal has stopped it early.
    """
    from pipeline.acting.evaluation import Evaluator
    from pipeline.environments import watched
    from pipeline.ops.randomness import stream_key
    from pipeline.saved_policy import restore_agent
    from pipeline.training.components import (
        build_evaluation_environment,
        configure_tensorflow,
        seed_generators,
    )
    from pipeline.training.train_loop import bound

    configuration.apply(statements)
    configure_tensorflow()
    seed = stream_key(run.seed, "evaluate", _SEED.value)
    num_episodes = _NUM_EPISODES.value or (0 if video and not output else 100)
    restored = restore_agent(run)

    @contextlib.contextmanager
    def opened(**kwargs: Any) -> Iterator[Evaluator]:
        seed_generators(seed)
        environment = build_evaluation_environment(seed, bound("create_environment"), **kwargs)
        with watched(environment, stop):
            environment.check_spaces(restored.observation_space, restored.action_space)
            policies = restored.agent.policy, restored.agent.collect_policy
            # --num_episodes sets the length, however long the evaluations in training were.
            yield Evaluator(environment, *policies, seed=seed, num_env_steps=None)

    with Progress(0) as progress:
        for warning in restored.checkpoint.warnings:
            progress.message(f"warning: {warning}")
        if video:  # before the episodes, because some simulators allow one environment at a time
            with _rendering(), opened(render=True) as evaluator:
                if not num_episodes:
                    configuration.warn_of_ignored(progress.message)
                if not _record(evaluator, video, seed, stop, progress):
                    return False
        if not num_episodes:
            return True
        with opened() as evaluator:
            configuration.warn_of_ignored(progress.message)
            result = _play(evaluator, num_episodes, stop, progress)
        if result and (truncated := result.get("truncated")):
            progress.message(f"{truncated} episodes were truncated (Evaluator.max_episode_steps)")
    if result:
        _report(result, restored.checkpoint.env_steps, output)
    return result is not None


@contextlib.contextmanager
def _rendering() -> Iterator[None]:
    """Keeps libraries from complaints about what a recording does not need."""
    # pygame complains if there is no sound or no desktop.
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    with warnings.catch_warnings():
        # gymnasium only warns, but rendering the first frame reports this as an error.
        warnings.filterwarnings("ignore", ".*is not in the possible render_modes")
        yield


def _record(
    evaluator: Evaluator,
    path: pathlib.Path,
    seed: int,
    stop: StopSignal,
    progress: Progress,
) -> bool:
    from pipeline.acting.evaluation import record_video

    progress.message(f"recording an episode to {path} ...")
    episode_return = record_video(
        evaluator.environment,
        evaluator.policy,
        path,
        seed,
        lambda _: stop.requested,
        evaluator.max_episode_steps,
    )
    if episode_return is None:
        return False
    cut = any(is_cut for _, is_cut in evaluator.environment.episodes.endings)
    end = ", which was truncated (Evaluator.max_episode_steps)" if cut else ""
    progress.message(f"wrote {path}: an episode of return {score_text(episode_return)}{end}")
    return True


def _play(
    evaluator: Evaluator, num_episodes: int, stop: StopSignal, progress: Progress
) -> dict[str, Any] | None:
    def on_progress(done: int, length: int, longest: int) -> bool:
        progress.update({"episode_steps": longest}, EVALUATING, (done, length))
        return stop.requested

    return evaluator.run(num_episodes, 0, on_progress)


def _report(result: dict[str, Any], env_steps: int, output: pathlib.Path | None) -> None:
    returns = result["returns"]
    try:
        if output:
            write_json(output, {"env_steps": env_steps, "seed": _SEED.value, **result})
            print(f"wrote {output}")
    finally:  # what was found out is shown, also if it cannot be written
        print(
            f"evaluation of {_ROOT_DIR.value or _PRETRAINED.value} after {env_steps:,} environment "
            f"steps: {score_text(float(np.mean(returns)))} ± {score_text(float(np.std(returns)))} "
            f"(min {score_text(min(returns))}, max {score_text(max(returns))}) "
            f"over {len(returns)} episodes"
        )


if __name__ == "__main__":
    main()
