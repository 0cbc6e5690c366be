"""Builds a run from gin's bindings and trains it to its end.

`iteration.py` holds the iteration that all agents share. `host_loop.py` makes the graph calls, and
logs, evaluates and saves between them.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import gin
import numpy as np
import tensorflow as tf
from tf_agents.utils.common import Periodically

from pipeline import configuration
from pipeline.acting.episode_statistics import initial_statistics, metrics_record
from pipeline.agents.agent import Agent
from pipeline.checkpointing.checkpoints import Checkpoints
from pipeline.checkpointing.exactness import (
    DEFAULT_EXACTNESS,
    Circumstances,
    Exactness,
    configured_otherwise,
)
from pipeline.checkpointing.saveables import Variables
from pipeline.environments import specs
from pipeline.environments.saved_spaces import to_json
from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.environments.watchdog import Watchdog
from pipeline.networks.encoders import encoder_precision
from pipeline.networks.summary import summarize
from pipeline.replay import Experience
from pipeline.runs import pretrained
from pipeline.runs.run_folder import RunFolder
from pipeline.runs.saved_run import SavedRun
from pipeline.training.components import Components, build, configure_tensorflow, created
from pipeline.training.graph_calls import SHARES
from pipeline.training.host_loop import HostLoop
from pipeline.training.intervals import Plan, check_store, check_warm_up, initialize_replay_buffer
from pipeline.utils.constraints import NonNegativeInt, PositiveInt, check_arguments
from pipeline.utils.errors import UserError, hinting
from pipeline.utils.execution import Execution
from pipeline.utils.progress import Progress
from pipeline.utils.retry import Patience
from pipeline.utils.shutdown import StopSignal

_CHECKED_COUNTS = 21  # of a schedule
_LARGE = 1_000.0  # Observations with larger values cause a note.
BUILDERS = ("create_environment", "create_agent", "create_experience")


@contextlib.contextmanager
def _out_of_memory_named() -> Iterator[None]:
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"the memory of the device does not suffice ({reason}). Make ReplayBuffer.batch_size, "
            "Rollout.minibatch_size or the networks smaller, or accumulate gradients over several "
            "batches."
        ) from error


@gin.configurable(
    denylist=[
        *("root_dir", "seed", "restart_behavior", "stop", "dry_run", "exactness", "execution"),
        "warm_start",
    ]
)
def train(
    root_dir: str,
    seed: int,
    restart_behavior: str,
    stop: StopSignal,
    dry_run: bool = False,
    exactness: Exactness = DEFAULT_EXACTNESS,
    execution: Execution = Execution.GRAPH,
    warm_start: str | None = None,
    *,
    create_environment: Callable[..., VectorEnvironment] = gin.REQUIRED,
    create_agent: Callable[..., Agent] = gin.REQUIRED,
    create_experience: Callable[..., Experience] = gin.REQUIRED,
    runner: Callable[..., Components] = build,
    num_env_steps: PositiveInt = gin.REQUIRED,
    log_interval: NonNegativeInt = 1_000,
    eval_interval: NonNegativeInt = 10_000,
    checkpoint_interval: NonNegativeInt = 10_000,
    num_eval_episodes: PositiveInt = 10,
    num_final_episodes: PositiveInt = 100,
) -> dict[str, Any]:
    """Trains a run to its end, from its newest checkpoint if it has one.

    Args:
      root_dir: Folder of the run.
      seed: Seed of everything random.
      restart_behavior: "resume", "restart" or "fail", for a folder that already holds a run.
      stop: Signal to stop, which is polled between graph calls.
      dry_run: Whether to build everything and call every configurable once, but train and write
        nothing.
      exactness: What to do with a run that cannot be resumed bit for bit.
      execution: Whether to run eagerly or as a graph. A resumed run must use the same mode.
      warm_start: Folder of another run. A new run starts with its newest agent: weights, optimizer
        and normalisers. Environments, replay and all counts start anew.
      create_environment: Factory of the training and evaluation environments.
      create_agent: Factory of the agent.
      create_experience: Factory of the replay buffer or the rollout.
      runner: Builds the run from these factories; `asynchronous_runner` builds many actors.
      num_env_steps: Environment steps of the whole run, warm-up included.
      log_interval: Environment steps between records of metrics.jsonl; 0 writes only the last one.
      eval_interval: Environment steps between evaluations; 0 evaluates only at the end.
      checkpoint_interval: Environment steps between checkpoints; 0 saves only after the warm-up,
        after an evaluation that is the best so far, and at the end.
      num_eval_episodes: Episodes of an evaluation during training.
      num_final_episodes: Episodes of the evaluation of the final weights.

    Returns:
      The contents of result.json, also for a run that was already finished. If `dry_run` is True, a
      dict with the key "networks", whose value summarises the networks.

    Raises:
      UserError: If a binding is wrong or not used, if the folder holds another run, or if
        `HostLoop.train` raises it.
      Stopped: If a signal arrived. A checkpoint has been written.
    """
    check_arguments(train, locals())
    # Paths are made absolute before an environment can change the working directory.
    folder = RunFolder(root_dir or "")
    source = _source(warm_start, folder) if warm_start else None
    plan = Plan(
        num_env_steps, log_interval, eval_interval, checkpoint_interval, num_eval_episodes,
        num_final_episodes,
    )  # fmt: skip
    warm_up = initialize_replay_buffer()
    check_warm_up(warm_up, plan)
    may_be_finished = not dry_run and restart_behavior == "resume"
    flags = {"execution": execution.value, **({"warm_start": source} if source else {})}
    if may_be_finished and (result := _finished(folder, seed, num_env_steps, flags)):
        return result
    checkpoints = Checkpoints(folder.checkpoints, {}, writable=False)
    is_new = restart_behavior == "restart" or not checkpoints.latest()
    if source and is_new:
        SavedRun(source)  # raises at once if there is no such run; a resumed run does not need it
    settings = configure_tensorflow(execution=execution) | flags
    with _out_of_memory_named():
        factories = create_environment, create_agent, create_experience
        components = created("train.runner", Components, runner, seed, *factories)
    with contextlib.closing(components), _out_of_memory_named():
        check_store(warm_up, components.experience, is_new)
        _call_what_training_calls()
        _check_schedules(components.agent, num_env_steps)
        _check_names(components)
        if dry_run:
            agent = components.agent
            return {"networks": summarize(agent.trained, agent.time_step_spec.observation)}
        if message := configuration.ignored():  # every configurable of a run has been called
            raise UserError(f"{message} --explain lists what is read.")
        exactness.check_runner(components.runner.is_repeatable)
        with Progress(num_env_steps) as progress, contextlib.closing(folder):
            for message in folder.open(restart_behavior, seed):
                progress.message(message)
            for note in components.evaluator.environment.notes:
                progress.message(f"note: {note}")
            for warning in configuration.warnings():
                progress.message(f"warning: {warning}")
            settings |= {
                "encoder_precision": encoder_precision(),
                "observation_space": to_json(components.environment.observation_space),
                "action_space": to_json(components.environment.action_space),
            }
            circumstances = Circumstances(settings, seed, folder.path, exactness)
            loop = HostLoop(components, plan, folder, progress, stop, circumstances)
            with contextlib.closing(loop):
                _restore(loop, components, folder, progress, circumstances, source)
                loop.collect_randomly(warm_up)
                _note_large_numbers(loop, components, progress, create_agent)
                return loop.train()


def _source(warm_start: str, folder: RunFolder) -> str:
    """Returns the absolute path of the run whose agent a new run starts with.

    Raises:
      UserError: If it is the new run itself.
    """
    path = pretrained.find(warm_start).absolute()
    if path.resolve() == folder.path.resolve():
        raise UserError(
            "--warm_start names --root_dir itself. A run continues without it; a new run needs "
            "another --root_dir."
        )
    return str(path)


def _check_schedules(agent: Agent, num_env_steps: int) -> None:
    """Checks values of the schedules at counts from 0 to `num_env_steps`.

    Raises:
      UserError: If one raises, is negative or not finite, or an epsilon above 1.
    """
    for name, schedule in agent.schedules.items():
        highest = 1.0 if name == "epsilon" else float(np.finfo(np.float32).max)
        for count in np.linspace(0, num_env_steps, _CHECKED_COUNTS).astype(np.int64):
            try:
                value = float(schedule(tf.constant(count)))
            except Exception as error:  # whatever the user's function raises
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                raise UserError(
                    f"the schedule of the {name} raised after {count:_} environment steps: {reason}"
                ) from error
            if not 0.0 <= value <= highest:
                raise UserError(
                    f"the schedule of the {name} is {value:g} after {count:_} environment steps: "
                    f"must be {'in [0, 1]' if name == 'epsilon' else 'finite and at least 0'}."
                )


def _check_names(components: Components) -> None:
    """Checks that losses and schedules have names of their own in the records of metrics.jsonl.

    Raises:
      UserError: If one has not.
    """
    agent = components.agent
    record = metrics_record(
        initial_statistics(1), updates=0, wall_seconds=0.0, env_steps_per_second=0.0
    )
    others = [*record, *SHARES, *components.runner.measurements()]
    counts = Counter([*agent.loss_names, *agent.schedules, *others])
    if twice := [name for name, count in counts.items() if count > 1]:
        raise UserError(
            f"{type(agent).__name__}: the records of metrics.jsonl have more than one value named "
            f"{', '.join(twice)}. Give the loss (loss_names) or the schedule another name."
        )


def _call_what_training_calls() -> None:
    # gin knows which bindings a run reads only once the configurables have been called.
    Patience(print, lambda: None)
    Watchdog([], str, StopSignal()).close()


def bound(name: str) -> Callable[..., Any]:
    """Returns the factory that gin has bound `train.<name>` to, for a name of `BUILDERS`.

    Raises:
      UserError: If `train.<name>` is not bound.
    """
    bindings = gin.get_bindings(train)
    if name not in bindings:
        raise UserError(configuration.missing_file_message(f"train.{name}"))
    return bindings[name]


def build_bound(seed: int) -> Components:
    """Builds the components that `train` would build from gin's bindings.

    Raises:
      UserError: If a factory is not bound.
    """
    runner = gin.get_bindings(train).get("runner", build)
    return created("train.runner", Components, runner, seed, *map(bound, BUILDERS))


def _finished(
    folder: RunFolder, seed: int, num_env_steps: int, flags: dict[str, str]
) -> dict[str, Any] | None:
    """Returns the contents of result.json and prints a message if the run is finished, else None.

    Raises:
      UserError: If it was finished with another configuration.
    """
    result = folder.finished(seed, num_env_steps)
    if not result:
        return None
    before = folder.read_json("run.json")
    if not before:
        return None  # it was deleted; the run goes on from its last checkpoint and writes it anew
    differences = [
        f"{name}: {before.get(name, 'nothing')} there, {flags.get(name, 'nothing')} here"
        for name in ("execution", "warm_start")
        if before.get(name) != flags.get(name)
    ]
    differences += configured_otherwise(folder.config)
    if differences:
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


def _start_with(source: str, agent: Agent, progress: Progress) -> None:
    """Restores the newest agent of another run, and lists what is configured otherwise there."""
    start = SavedRun(source)
    hint = f"--warm_start={source} needs a run with the same agent and networks."
    with hinting(lambda: hint):
        restored = start.restore(Variables(agent=agent))
    for warning in restored.warnings:
        progress.message(f"warning: {warning}")
    _begin_anew(agent)
    progress.message(
        f"starting with the agent that {start.path} has after {restored.env_steps:_} "
        "environment steps"
    )
    if differences := configured_otherwise(RunFolder(start.path).config):
        lines = "\n  ".join(differences)
        progress.message(f"note: that run has another configuration:\n  {lines}")


def _begin_anew(agent: Agent) -> None:
    """Sets everything that counts, or belongs to episodes, back to the start of a run."""
    agent.train_step_counter.assign(0)
    for module in agent.submodules:
        if hasattr(module, "begin_anew"):
            module.begin_anew()
        elif isinstance(module, Periodically):
            for counter in module.variables:
                counter.assign(tf.zeros_like(counter))


def _note_large_numbers(
    loop: HostLoop,
    components: Components,
    progress: Progress,
    create_agent: Callable[..., Agent],
) -> None:
    """Prints a note if observations are large and the agent does not normalise them."""
    if components.agent.normalizer is not None:
        return
    takes_it = "normalize_observations" in inspect.signature(create_agent).parameters
    owner = create_agent.__name__ if takes_it else "ActorCritic"
    advice = f"Bind {owner}.normalize_observations = True"
    if "scheduler" in components.runner.description:  # asynchronous actors share no statistics
        advice = "Scale them with a wrapper (gymnasium_environment.wrappers)"
    leaves = specs.arrays(components.environment.observation_space)
    arrays = tf.nest.flatten(loop.state.carry.time_step.observation)
    for leaf, array in zip(leaves, arrays, strict=True):
        largest = np.abs(array.numpy().astype(np.float64)).max(initial=0)
        if largest > _LARGE and not specs.categories(leaf.space):
            progress.message(
                f"note: {leaf.name} reaches {largest:.3g}. Agents learn poorly from values this "
                f"large. {advice}."
            )


def _restore(
    loop: HostLoop,
    components: Components,
    folder: RunFolder,
    progress: Progress,
    circumstances: Circumstances,
    source: str | None,
) -> None:
    """Restores the newest checkpoint, if there is one, and describes the run in its folder."""
    is_resumed = loop.restore()
    if is_resumed:
        for difference in circumstances.differences:
            if source and difference.startswith("--warm_start"):
                raise UserError(
                    f"{folder.path} continues from its checkpoint, so another --warm_start has no "
                    f"effect ({difference}). Name the one that it began with, which is not read "
                    "again and need not exist, or choose another --root_dir."
                )
        progress.message(f"resuming {folder.path} at environment step {loop.env_steps:_}")
    elif source:
        _start_with(source, components.agent, progress)
    divergence = components.environment.divergence
    circumstances.exactness.check_episodes(divergence)
    loop.cut_logs()
    for message in folder.describe(
        circumstances.seed,
        components.environment.batch_size,
        circumstances.settings,
        loop.env_steps,
        [*circumstances.differences, *([divergence] if divergence else [])],
    ):
        progress.message(message)
    if source and not is_resumed:
        loop.save()  # or the same command would start with another agent if the source trains on
