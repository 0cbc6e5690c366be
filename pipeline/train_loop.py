"""`train`: what gin calls a run, from the building of its parts to result.json.

One iteration, which all agents share, is in `iteration.py`; what the host does between chunks of
them is in `host_loop.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import gin

from pipeline import configuration
from pipeline.agents.agent import Agent
from pipeline.circumstances import (
    DEFAULT_EXACTNESS,
    Circumstances,
    Exactness,
    configured_otherwise,
)
from pipeline.collect import initialize_replay_buffer
from pipeline.components import Components, build, check_warm_up, configure_tensorflow
from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.errors import UserError
from pipeline.execution import Execution
from pipeline.experience import Experience
from pipeline.host_loop import HostLoop
from pipeline.patience import Patience
from pipeline.plan import Plan
from pipeline.progress import Progress
from pipeline.run_folder import RunFolder
from pipeline.shutdown import StopSignal
from pipeline.watchdog import Watchdog

BUILDERS = ("create_environment", "create_agent", "create_experience")


@gin.configurable(
    denylist=["root_dir", "seed", "restart_behavior", "stop", "dry_run", "exactness", "execution"]
)
def train(
    root_dir: str,
    seed: int,
    restart_behavior: str,
    stop: StopSignal,
    dry_run: bool = False,
    exactness: Exactness = DEFAULT_EXACTNESS,
    execution: Execution = Execution.GRAPH,
    *,
    create_environment: Callable[..., VectorEnvironment] = gin.REQUIRED,
    create_agent: Callable[..., Agent] = gin.REQUIRED,
    create_experience: Callable[..., Experience] = gin.REQUIRED,
    runner: Callable[..., Components] = build,  # @asynchronous_runner: many actors
    num_env_steps: int = gin.REQUIRED,  # of the whole run, warm-up included
    log_interval: int = 1_000,  # environment steps between records of metrics.jsonl
    eval_interval: int = 10_000,  # environment steps; 0: only at the end
    checkpoint_interval: int = 10_000,  # environment steps; 0: after warm-up and at the end
    num_eval_episodes: int = 10,
    num_final_episodes: int = 100,  # of the final weights' evaluation, which result.json holds
) -> dict[str, Any]:
    """Trains a run to its end, from its newest checkpoint if it has one.

    Args:
      root_dir: the run's folder.
      seed: of everything random.
      restart_behavior: "resume", "restart" or "fail", for a folder that holds a run.
      stop: polled between graph calls.
      dry_run: builds everything and calls every configurable once; trains and writes nothing.
      exactness: what to do with a run that cannot be resumed bit for bit.
      execution: eagerly or as a graph; a resumed run must go on as it was begun.

    Returns:
      What result.json holds, of a finished run too; nothing if `dry_run`.

    Raises:
      UserError, Stopped: see `Plan`, `HostLoop.train`; or a flag's binding is read by nothing.
    """
    plan = Plan(
        num_env_steps, log_interval, eval_interval, checkpoint_interval, num_eval_episodes,
        num_final_episodes,
    )  # fmt: skip
    plan.check()
    initialize_replay_buffer(plan.check_warm_up)
    may_be_finished = not dry_run and restart_behavior == "resume"
    if may_be_finished and (result := _finished(RunFolder(root_dir), seed, num_env_steps)):
        return result
    circumstances = Circumstances(configure_tensorflow(execution=execution), seed)
    components = runner(seed, create_environment, create_agent, create_experience)
    with contextlib.closing(components):
        _call_what_training_calls()
        if dry_run:
            return {}
        _check_bindings()
        folder = RunFolder(root_dir)
        with Progress(num_env_steps) as progress, contextlib.closing(folder):
            for message in folder.open(restart_behavior, seed):
                progress.message(message)
            loop = HostLoop(components, plan, folder, progress, stop, circumstances)
            with contextlib.closing(loop):
                return _run(loop, components, folder, progress, seed, circumstances, exactness)


def _call_what_training_calls() -> None:
    # gin lists what a run reads only once it has been called.
    Patience(print, lambda: None)
    Watchdog([], str).close()


def _check_bindings() -> None:
    """To be called once all has been called that training calls, before anything is written."""
    if message := configuration.ignored():
        raise UserError(f"{message} --explain lists what is read.")


def bound(name: str) -> Callable[..., Any]:
    """What gin has bound `train.create_environment`, or another of its builders, to.

    Raises:
      UserError: nothing is.
    """
    bindings = gin.get_bindings(train)
    if name not in bindings:
        raise UserError(f"nothing binds train.{name}: give a config that does.")
    return bindings[name]


def build_bound(seed: int) -> Components:
    """What `train` would build from gin's bindings; raises what `bound` does."""
    runner = gin.get_bindings(train).get("runner", build)
    return runner(seed, *map(bound, BUILDERS))


def _finished(folder: RunFolder, seed: int, num_env_steps: int) -> dict[str, Any] | None:
    """What result.json holds of a run that has come to its end, which the user is told."""
    result = folder.finished(seed, num_env_steps)
    if not result:
        return None
    if differences := configured_otherwise(folder.path / "operative_config.gin"):
        lines = "\n  ".join(differences)
        raise UserError(
            f"{folder.path} holds a finished run of another configuration:\n  {lines}\n"
            "Choose another --root_dir, or --restart_behavior=restart, which moves it aside."
        )
    print(
        f"{folder.path} is already finished, after {result['env_steps']:_} environment steps. "
        "Raise train.num_env_steps to go on (with --allow_inexact_resume where a schedule spans "
        "the whole run), or start over with --restart_behavior=restart."
    )
    return result


def _run(
    loop: HostLoop,
    components: Components,
    folder: RunFolder,
    progress: Progress,
    seed: int,
    circumstances: Circumstances,
    exactness: Exactness,
) -> dict[str, Any]:
    if loop.restore():
        progress.message(f"resuming {folder.path} at environment step {loop.env_steps:_}")

    def warm_up(until: int) -> None:
        check_warm_up(components.experience, until)
        # Only now has every configurable been called that the operative config lists.
        differences = circumstances.differences()
        divergence = components.environment.divergence
        exactness.check(folder.path, differences, divergence, components.runner.is_repeatable)
        loop.cut_logs()
        for message in folder.describe(
            seed, components.environment.batch_size, circumstances.settings, loop.env_steps,
            [*differences, *([divergence] if divergence else [])],
        ):  # fmt: skip
            progress.message(message)
        loop.collect_randomly(until)

    initialize_replay_buffer(warm_up)
    return loop.train()
