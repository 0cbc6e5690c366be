"""Times each stage of a run alone, and the whole training."""

from __future__ import annotations

import contextlib
import io
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import gin
import tensorflow as tf
from rich.console import Console
from tf_agents.trajectories import StepType

from pipeline.acting.collect_driver import CollectDriver
from pipeline.acting.policies import RandomPolicy
from pipeline.environments import watched
from pipeline.ops.observations import action_mask
from pipeline.ops.randomness import stream_key
from pipeline.runs.run_folder import RunFolder
from pipeline.training.components import Components
from pipeline.training.host_loop import HostLoop
from pipeline.training.intervals import Plan, initialize_replay_buffer
from pipeline.training.iteration import Iterations, LoopState
from pipeline.training.train_loop import bound, build_bound
from pipeline.utils.progress import Progress
from pipeline.utils.shutdown import StopSignal

#: The result of a stage: "seconds", "count", "unit", and further facts.
Answer: TypeAlias = dict[str, Any]
#: Measures a stage for at least the given number of seconds.
Stage: TypeAlias = Callable[[float], Answer]

_SEED = 1
_CALL_SECONDS = 0.3  # aimed at for one graph call, so that the overhead of the call is negligible
_WARM_UP_SECONDS = 3.0
_FOREVER = 10**12  # environment steps
_LOG_INTERVAL = 5_000  # environment steps
_DRAWN = 1_000  # random actions per environment, drawn before the time measurement starts


def measure(seconds: float) -> str:
    """Times the run that gin's bindings describe, after its warm-up.

    Args:
      seconds: Minimum number of seconds for which each stage is measured.

    Returns:
      A text with one line per stage.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:
        components = opened.enter_context(contextlib.closing(build_components()))
        warm_up = initialize_replay_buffer()
        stages = all_stages(components, warm_up, pathlib.Path(folder), opened)
        answers = {name: stage(seconds) for name, stage in stages.items()}
    rates = {name: (x["count"] / x["seconds"], x["unit"]) for name, x in answers.items()}
    return "\n".join(f"{name:12} {rate:12,.1f} {unit}/s" for name, (rate, unit) in rates.items())


def build_components() -> Components:
    """Builds the components that `train` would build, but with an endless budget."""
    gin.bind_parameter("train.num_env_steps", _FOREVER)
    return build_bound(_SEED)


def all_stages(
    components: Components,
    warm_up: int,
    output_dir: pathlib.Path,
    opened: contextlib.ExitStack,
    steps_per_update: int = 1,
) -> dict[str, Stage]:
    """Warms up a run and returns its stages by name.

    Asynchronous actors have no stages that run alone, only "training".

    Args:
      components: Components of the run.
      warm_up: Environment steps that are stored in a replay buffer before anything is timed.
      output_dir: Folder for the logs of the training.
      opened: Context of the stages. It closes their environments.
      steps_per_update: Increase of the agent's train step counter per call of its `train`.
    """
    training = Training(components, warm_up, output_dir, steps_per_update)
    training(_WARM_UP_SECONDS)
    if not isinstance(components.runner, Iterations):
        return {"training": training}
    stages = Stages(components, opened)
    return {
        "environment": stages.environment(),
        "collect": stages.collect(),
        "sample": stages.sample(),
        "update": stages.update(),
        "training": training,
    }


class Training:
    """Times the loop of `pipeline.train` with its logs, a few seconds per call."""

    def __init__(
        self,
        components: Components,
        warm_up: int,
        output_dir: pathlib.Path,
        steps_per_update: int = 1,
    ):
        """Warms up the run. The arguments are those of `all_stages`."""
        self._components = components
        self._steps_per_update = steps_per_update
        folder = RunFolder(output_dir / "run")
        folder.open("fail", _SEED)
        plan = Plan(_FOREVER, _LOG_INTERVAL, 0, 0, 1, 1)  # neither evaluations nor checkpoints
        silent = Progress(_FOREVER, console=Console(file=io.StringIO()))
        self._loop = HostLoop(components, plan, folder, silent, StopSignal())
        self._loop.collect_randomly(warm_up if components.experience.keeps_rows else 0)

    def __call__(self, seconds: float) -> Answer:
        steps, updates = self._loop.env_steps, self._updates()
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            self._loop.advance()
        return {
            "seconds": time.perf_counter() - started,
            "count": self._loop.env_steps - steps,
            "unit": "environment steps",
            "updates": self._updates() - updates,
            "return_mean": self._loop.record()["return_mean_100"],
        }

    def _updates(self) -> int:
        return int(self._components.agent.train_step_counter) // self._steps_per_update


def repeated(body: Callable[[Any], Any], state: Any, times: tf.Tensor) -> Any:
    """Applies `body` to `state` `times` times in sequence, inside the graph."""
    _, state = tf.while_loop(
        lambda count, _: count < times,
        lambda count, state: (count + 1, body(state)),
        (tf.zeros([], tf.int64), state),
        parallel_iterations=1,
    )
    return state


def timed(repeat: Callable[[tf.Tensor], float], unit: str, **facts: Any) -> Stage:
    """Returns a stage that calls a function with growing numbers of repetitions.

    Args:
      repeat: Function of the number of repetitions, int64 []. It returns how many units it did.
      unit: Name of the unit.
      **facts: Facts that are added to each answer.
    """

    def stage(seconds: float) -> Answer:
        times, count, spent = 1, 0.0, 0.0
        while count == 0 or spent < seconds:
            started = time.perf_counter()
            count += repeat(tf.constant(times, tf.int64))
            call = time.perf_counter() - started
            spent += call
            times = max(1, min(4 * times, int(times * _CALL_SECONDS / call)))
        return {"seconds": spent, "count": count, "unit": unit, **facts}

    stage(0.0)  # Trace the graph now, so that tracing is not timed later.
    return stage


def finishing(graph: Callable[[tf.Tensor], tf.Tensor], each: float) -> Callable[[tf.Tensor], float]:
    """Returns a function for `timed` that calls `graph(times)` and waits for its result.

    Args:
      graph: Function of the number of repetitions, int64 [].
      each: Number of units per repetition.
    """

    def repeat(times: tf.Tensor) -> float:
        graph(times).numpy()
        return int(times) * each

    return repeat


def _digest(tensors: Any) -> tf.Tensor:
    """Sums one element of each tensor, because the graph optimizer removes unread tensors."""
    ends = [tf.cast(tf.reshape(t, [-1])[-1], tf.float32) for t in tf.nest.flatten(tensors)]
    return tf.add_n(ends)


class Stages:
    """Times the parts of an iteration, with the experience and the agent of a run.

    It steps separate environments, so that the episodes of the training are not interrupted. As a
    result, one row per measurement in a replay buffer is followed by a row of another episode.
    These are too few to affect the times.
    """

    def __init__(self, components: Components, opened: contextlib.ExitStack):
        """Builds the separate environments, which `opened` watches, names if they fail, and closes.

        Raises:
          UserError: If an environment raises within `opened`.
        """
        self._agent, self._experience = components.agent, components.experience
        environment = bound("create_environment")(stream_key(_SEED, "stages"))
        opened.enter_context(watched(environment, StopSignal()))
        driver = CollectDriver(environment, seed=_SEED)
        self._environment = environment
        self._iterations = Iterations(
            components.agent, components.experience, driver, components.env_steps
        )
        self._state = self._iterations.initial_state()

    def environment(self) -> Stage:
        """Returns the stage that steps the environments with random actions.

        Resets are not counted as steps. If some actions are forbidden, each action is drawn from
        the mask of the newest observation, within the measured time.
        """
        policy = self._agent.collect_policy
        draw = RandomPolicy(policy.time_step_spec, policy.action_spec).action
        is_masked = action_mask(policy.time_step_spec.observation) is not None
        first = self._environment.current_time_step()
        drawn = tf.stack([draw(first, (), tf.constant([1, i])).action for i in range(_DRAWN)])

        def body(state: tuple[tf.Tensor, tf.Tensor, Any]) -> tuple[tf.Tensor, tf.Tensor, Any]:
            total, index, time_step = state
            action = drawn[index % _DRAWN]
            if is_masked:
                action = draw(time_step, (), tf.stack([1, index])).action
            following = self._environment.step(action)
            steps = tf.math.count_nonzero(following.step_type != StepType.FIRST, dtype=tf.float32)
            return total + steps, index + 1, following if is_masked else ()

        def run(time_step: Any, times: tf.Tensor) -> tf.Tensor:
            return repeated(body, (tf.zeros([]), tf.zeros([], tf.int32), time_step), times)[0]

        graph = tf.function(run, autograph=False)

        def repeat(times: tf.Tensor) -> int:
            return int(graph(self._environment.current_time_step() if is_masked else (), times))

        return timed(repeat, "environment steps")

    def collect(self) -> Stage:
        """Returns the stage that collects experience: act, step, count, store."""

        def body(state: LoopState) -> LoopState:
            state = self._collect(state)
            self._experience.end(lambda rows: None)
            return state

        graph = tf.function(lambda state, times: repeated(body, state, times), autograph=False)

        def repeat(times: tf.Tensor) -> int:
            before = int(self._state.carry.statistics.env_steps)
            self._state = graph(self._now(), times)
            return int(self._state.carry.statistics.env_steps) - before

        return timed(repeat, "environment steps")

    def sample(self) -> Stage:
        """Returns the stage that makes batches; for a rollout, its preparation is included."""
        experience = self._experience

        def batch(total: tf.Tensor) -> tf.Tensor:
            return total + _digest(experience.next_batch())

        if experience.keeps_rows:
            return timed(finishing(self._sum_of(batch), 1), "batches")

        def all_batches(total: tf.Tensor) -> tf.Tensor:
            self._iterations.begin_updates(self._state)
            return repeated(batch, total, tf.constant(experience.num_batches, tf.int64))

        self._fill()
        rounds = finishing(self._sum_of(all_batches), experience.num_batches)
        stage = timed(rounds, "batches")
        experience.end(lambda rows: None)

        def on_a_rollout(seconds: float) -> Answer:
            self._fill()
            answer = stage(seconds)
            experience.end(lambda rows: None)
            return answer

        return on_a_rollout

    def update(self) -> Stage:
        """Returns the stage that makes updates on one batch, whose gradients may be accumulated.

        An update of TRPO is the step of the policy and the fit of the value function.
        """
        agent, experience = self._agent, self._experience
        if not experience.keeps_rows:
            self._fill()
            self._iterations.begin_updates(self._state)
        rows, weights, _ = experience.next_batch()
        experience.end(lambda rows: None)

        def body(total: tf.Tensor) -> tf.Tensor:
            return total + agent.train(rows, weights).loss

        once = tf.function(lambda rows, weights: agent.train(rows, weights).loss, autograph=False)
        flops = count_flops(once.get_concrete_function(rows, weights).graph)
        num_batches = agent.accumulator.num_batches if agent.accumulator else 1
        stage = timed(
            finishing(self._sum_of(body), 1 / num_batches),
            "updates",
            flops_per_count=flops and flops * num_batches,
        )
        return lambda seconds: restored(agent, lambda: stage(seconds))

    def _collect(self, state: LoopState) -> LoopState:
        return self._iterations.collect(state, self._agent.collect_policy)

    def _fill(self) -> None:
        self._state = tf.function(self._collect, autograph=False)(self._now())

    def _now(self) -> LoopState:
        """Returns the state with the newest time step, because all stages share environments."""
        carry = self._state.carry._replace(time_step=self._environment.current_time_step())
        return self._state._replace(carry=carry)

    @staticmethod
    def _sum_of(body: Callable[[tf.Tensor], tf.Tensor]) -> Callable[[tf.Tensor], tf.Tensor]:
        return tf.function(lambda times: repeated(body, tf.zeros([]), times), autograph=False)


def restored(agent: tf.Module, measure: Callable[[], Answer]) -> Answer:
    """Calls `measure()` and restores `agent`, with its optimizers, to its state before the call.

    Many updates on one batch would leave weights that act differently, which would change the cost
    of later stages.
    """
    checkpoint = tf.train.Checkpoint(agent=agent)
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint.write(f"{folder}/agent")
        answer = measure()
        checkpoint.read(path).assert_existing_objects_matched().assert_consumed()
    return answer


def count_flops(graph: tf.Graph) -> int | None:
    """Counts the floating-point operations of matrix products and convolutions in a graph.

    A multiply-add counts as two.

    Returns:
      The number, or None if the graph has loops, whose number of iterations is unknown.
    """
    from tensorflow.python.profiler import model_analyzer, option_builder
    from tensorflow.python.util import deprecation

    if any(operation.type in ("While", "StatelessWhile") for operation in graph.get_operations()):
        return None
    options = option_builder.ProfileOptionBuilder(
        option_builder.ProfileOptionBuilder.float_operation()
    )
    options.with_empty_output().with_accounted_types(["MatMul", "BatchMatMulV2", "Conv2D.*"])
    with deprecation.silence():  # The profiler itself uses a deprecated function.
        return model_analyzer.profile(graph, options=options.build()).total_float_ops
