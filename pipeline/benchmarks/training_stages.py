"""The stages of one work, each timed alone, and the whole training."""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import gin
import tensorflow as tf
from tf_agents.trajectories import StepType

from pipeline.benchmarks.workers.protocol import Answer, Stage
from pipeline.benchmarks.workers.restored import restored
from pipeline.benchmarks.workers.works import SEED, Work
from pipeline.collect import Carry, CollectDriver, initial_carry
from pipeline.components import Components, configure_tensorflow
from pipeline.host_loop import HostLoop
from pipeline.iteration import Iterations
from pipeline.plan import Plan
from pipeline.policies import RandomPolicy
from pipeline.progress import Progress
from pipeline.randomness import stream_key
from pipeline.run_folder import RunFolder
from pipeline.shutdown import StopSignal
from pipeline.train_loop import bound, build_bound

_CALL_SECONDS = 0.3  # of a graph call, so that its overhead is nothing beside it
_WARM_UP_SECONDS = 3.0
_FOREVER = 10**12  # environment steps
_LOG_INTERVAL = 5_000  # environment steps
_DRAWN = 1_000  # random actions of every environment, before the clock runs


def prepare(work: Work, output_dir: pathlib.Path) -> tuple[dict[str, Any], dict[str, Stage]]:
    """Builds what gin has bound and warms it up; facts of it, and its stages."""
    settings = configure_tensorflow()
    parts = build_components()
    steps_an_update = 1 + work.value_steps(parts.environment.batch_size)
    training = Training(parts, work.warm_up, output_dir, steps_an_update)
    training(_WARM_UP_SECONDS)
    if not isinstance(parts.runner, Iterations):  # actors have no stages that run alone
        return settings, {"training": training}
    stages = Stages(parts)
    weights = [w for network in parts.agent.trained.values() for w in network.trainable_variables]
    facts = {**settings, "num_parameters": sum(w.shape.num_elements() for w in weights)}
    return facts, {
        "environment": stages.environment(),
        "collect": stages.collect(),
        "sample": stages.sample(),
        "update": stages.update(),
        "training": training,
    }


def build_components() -> Components:
    """What `train` would build from gin's bindings."""
    gin.bind_parameter("train.num_env_steps", _FOREVER)
    return build_bound(SEED)


class _TimeIsUp(Exception):
    pass


class _Deadline(Progress):
    """Shows nothing; ends a training at the first chunk that ends after the deadline."""

    def __init__(self) -> None:
        super().__init__(_FOREVER)
        self.at = float("inf")
        self.return_mean: float | None = None

    def message(self, text: str) -> None:
        del text

    def update(
        self,
        record: Mapping[str, Any],
        phase: str = "",
        of_phase: tuple[int, int] | None = None,
    ) -> None:
        del phase, of_phase
        self.return_mean = record["return_mean_100"]
        if time.perf_counter() >= self.at:
            raise _TimeIsUp


class Training:
    """`pipeline.train`'s own loop, logs included, in pieces of some seconds."""

    def __init__(
        self, parts: Components, warm_up: int, output_dir: pathlib.Path, steps_an_update: int = 1
    ):
        """Args:
        parts: what is trained.
        warm_up: environment steps that a replay buffer holds before anything is timed.
        output_dir: for the run's folder.
        steps_an_update: what the agent counts in a call of its `train`.
        """
        self._parts = parts
        self._steps_an_update = steps_an_update
        self._deadline = _Deadline()
        folder = RunFolder(output_dir / "run")
        folder.open("fail", SEED)
        plan = Plan(_FOREVER, _LOG_INTERVAL, 0, 0, 1, 1)  # neither evaluations nor checkpoints
        self._loop = HostLoop(parts, plan, folder, self._deadline, StopSignal())
        self._loop.collect_randomly(warm_up if parts.experience.keeps_rows else 0)

    def __call__(self, seconds: float) -> Answer:
        steps, updates = self._loop.env_steps, self._updates()
        started = time.perf_counter()
        self._deadline.at = started + seconds
        with contextlib.suppress(_TimeIsUp):
            self._loop.train()
        return {
            "seconds": time.perf_counter() - started,
            "count": self._loop.env_steps - steps,
            "unit": "environment steps",
            "updates": self._updates() - updates,
            "return_mean": self._deadline.return_mean,
        }

    def _updates(self) -> int:
        return int(self._parts.agent.train_step_counter) // self._steps_an_update


def repeated(body: Callable[[Any], Any], state: Any, times: tf.Tensor) -> Any:
    """`body` applied `times` times, one after the other, inside the graph."""
    _, state = tf.while_loop(
        lambda count, _: count < times,
        lambda count, state: (count + 1, body(state)),
        (tf.zeros([], tf.int64), state),
        parallel_iterations=1,
    )
    return state


def timed(repeat: Callable[[tf.Tensor], float], unit: str, **facts: Any) -> Stage:
    """A stage that calls `repeat(times)`, which returns how many units it did."""

    def stage(seconds: float) -> Answer:
        times, count, spent = 1, 0.0, 0.0
        while count == 0 or spent < seconds:
            started = time.perf_counter()
            count += repeat(tf.constant(times, tf.int64))
            call = time.perf_counter() - started
            spent += call
            times = max(1, min(4 * times, int(times * _CALL_SECONDS / call)))
        return {"seconds": spent, "count": count, "unit": unit, **facts}

    stage(0.0)  # traces
    return stage


def finishing(graph: Callable[[tf.Tensor], tf.Tensor], each: float) -> Callable[[tf.Tensor], float]:
    """For `timed`: waits for `graph(times)`, of which each time does `each` units."""

    def repeat(times: tf.Tensor) -> float:
        graph(times).numpy()
        return int(times) * each

    return repeat


def _digest(tensors: Any) -> tf.Tensor:
    """One element of each tensor, summed: the graph optimizer removes what nobody reads."""
    ends = [tf.cast(tf.reshape(t, [-1])[-1], tf.float32) for t in tf.nest.flatten(tensors)]
    return tf.add_n(ends)


class Stages:
    """The parts of an iteration, with the experience and the agent of the training.

    Environments are their own, so that the training's episodes stay whole. In a replay buffer one
    row a piece is followed by another game's: too few to matter for time.
    """

    def __init__(self, parts: Components):
        self._parts = parts
        self._num_envs = parts.environment.batch_size
        environment = bound("create_environment")(stream_key(SEED, "stages"))
        self._driver = CollectDriver(environment, seed=SEED)
        self._carry = initial_carry(environment, parts.agent.collect_policy)

    def environment(self) -> Stage:
        """Vector steps with random actions, drawn before; resets are no environment steps."""
        policy = self._parts.agent.collect_policy
        draw = RandomPolicy(policy.time_step_spec, policy.action_spec).action
        time_step = self._carry.time_step
        drawn = tf.stack([draw(time_step, (), tf.constant([1, i])).action for i in range(_DRAWN)])

        def body(state: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
            total, index = state
            step_type = self._driver.environment.step(drawn[index % _DRAWN]).step_type
            steps = tf.math.count_nonzero(step_type != StepType.FIRST, dtype=tf.float32)
            return total + steps, index + 1

        start = (tf.zeros([]), tf.zeros([], tf.int32))
        graph = tf.function(lambda times: repeated(body, start, times)[0], autograph=False)
        return timed(lambda times: int(graph(times)), "environment steps")

    def collect(self) -> Stage:
        """What an iteration does before its updates: act, step, count, store."""

        def body(carry: Carry) -> Carry:
            carry = self._collect_into(carry)
            self._parts.experience.end(lambda rows: None)
            return carry

        graph = tf.function(lambda carry, times: repeated(body, carry, times), autograph=False)

        def repeat(times: tf.Tensor) -> int:
            before = int(self._carry.statistics.env_steps)
            self._carry = graph(self._carry, times)
            return int(self._carry.statistics.env_steps) - before

        return timed(repeat, "environment steps")

    def sample(self) -> Stage:
        """Batches; of a rollout, with what prepares it."""
        experience = self._parts.experience

        def batch(total: tf.Tensor) -> tf.Tensor:
            return total + _digest(experience.next_batch())

        if experience.keeps_rows:
            return timed(finishing(self._sum_of(batch), 1), "batches")

        def all_batches(total: tf.Tensor) -> tf.Tensor:
            self._begin()
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
        """Updates on one batch; of TRPO each is the policy's step and the fit of the values."""
        agent, experience = self._parts.agent, self._parts.experience
        if not experience.keeps_rows:
            self._fill()
            self._begin()
        rows, weights, _ = experience.next_batch()
        experience.end(lambda rows: None)

        def body(total: tf.Tensor) -> tf.Tensor:
            return total + agent.train(rows, weights).loss

        once = tf.function(lambda rows, weights: agent.train(rows, weights).loss, autograph=False)
        flops = count_flops(once.get_concrete_function(rows, weights).graph)
        stage = timed(finishing(self._sum_of(body), 1), "updates", flops_per_count=flops)
        return lambda seconds: restored(agent, lambda: stage(seconds))

    def _collect_into(self, carry: Carry) -> Carry:
        parts = self._parts
        steps = parts.experience.collect_steps
        carry, rows = self._driver.run(parts.agent.collect_policy, carry, steps)
        parts.experience.add(tf.range(self._num_envs), rows)
        return carry

    def _fill(self) -> None:
        self._carry = tf.function(self._collect_into, autograph=False)(self._carry)

    def _begin(self) -> None:
        agent, final_time_step = self._parts.agent, self._carry.time_step
        self._parts.experience.begin(lambda rows: agent.prepare(rows, final_time_step))

    @staticmethod
    def _sum_of(body: Callable[[tf.Tensor], tf.Tensor]) -> Callable[[tf.Tensor], tf.Tensor]:
        return tf.function(lambda times: repeated(body, tf.zeros([]), times), autograph=False)


def count_flops(graph: tf.Graph) -> int | None:
    """Floating-point operations of matrix products and convolutions, a multiply-add being two.

    None where there are loops: how often they turn is not known before they do.
    """
    from tensorflow.python.profiler import model_analyzer, option_builder

    if any(operation.type in ("While", "StatelessWhile") for operation in graph.get_operations()):
        return None
    options = option_builder.ProfileOptionBuilder(
        option_builder.ProfileOptionBuilder.float_operation()
    )
    options.with_empty_output().with_accounted_types(["MatMul", "BatchMatMulV2", "Conv2D.*"])
    return model_analyzer.profile(graph, options=options.build()).total_float_ops
