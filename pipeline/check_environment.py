"""Reports how an environment suits training, from random steps.

python -m pipeline.check_environment --gin_bindings="gymnasium_environment.name = 'Taxi-v4'"
"""

from __future__ import annotations

import contextlib
import math
import pathlib
import tempfile
import textwrap
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import gin
import gymnasium
import numpy as np
from absl import flags
from gymnasium.utils import env_checker
from rich.text import Text

from pipeline import cli, configuration
from pipeline.utils.errors import UserError
from pipeline.utils.processor import machine
from pipeline.utils.shutdown import StopSignal

if TYPE_CHECKING:
    from pipeline.acting.collect_driver import Carry, CollectDriver
    from pipeline.acting.policies import RandomPolicy
    from pipeline.environments import VectorEnvironment

_GIN_FILE = flags.DEFINE_multi_string(
    "gin_file", ["environments/gymnasium"], "Path or shipped config that binds the environment."
)
_GIN_BINDINGS = flags.DEFINE_multi_string(
    "gin_bindings", [], "Bindings, as in 'gymnasium_environment.name = \"Taxi-v4\"'."
)
_NUM_STEPS = flags.DEFINE_integer(
    "num_steps",
    1_000,
    "Random steps to take; by default, as many of 1,000 as fit in 20 seconds.",
    lower_bound=100,
)
_SEED = flags.DEFINE_integer("seed", 1, "Seed of all random numbers.", lower_bound=0)
_ALLOW_GIN_IMPORTS = flags.DEFINE_bool(
    "allow_gin_imports", False, "Let gin files import other packages: a gin file is code."
)

_MOST_SECONDS = 20.0  # Time limit of the random steps, unless --num_steps is set.
_CALL_STEPS = 20  # Vector steps in one graph call.
_IS_EXACT = "yes: seeds and actions determine the episodes"
_LARGE = 100.0  # Larger values slow learning down.
_FAST = 1_000.0  # Above this number of steps per second, separate processes are not worthwhile.


class _Rows(NamedTuple):
    """Holds the results of random steps, as NumPy arrays [T, N], without the observations.

    Attributes:
      largest: Largest magnitude in each array of the observations; NaN if there is a NaN.
      seconds: Seconds in the environments, with the resets that follow an episode.
    """

    step_type: np.ndarray
    next_step_type: np.ndarray
    reward: np.ndarray
    discount: np.ndarray
    largest: np.ndarray
    seconds: float

    @property
    def is_step(self) -> np.ndarray:
        """Returns False for the boundary rows, bool [T, N]."""
        from tf_agents.trajectories import StepType

        return self.step_type != StepType.LAST


@cli.program
def main(_: Sequence[str]) -> int:
    bindings = _GIN_BINDINGS.value
    statements = configuration.read(_GIN_FILE.value, bindings, _ALLOW_GIN_IMPORTS.value)
    cli.load_tensorflow(statements)
    from pipeline.environments import watched
    from pipeline.training.components import build_environment, configure_tensorflow
    from pipeline.training.train_loop import bound

    configuration.apply(statements)
    configure_tensorflow()
    create_environment = bound("create_environment")
    with StopSignal("stopping", ends_at_once=True) as stop:
        environment = build_environment(_SEED.value, create_environment)
        with watched(environment, stop):
            for title, text in _findings(environment, create_environment):
                lines = text.splitlines() or [""]
                print(f"{title:<14}{lines[0]}", flush=True)
                for line in lines[1:]:
                    print(f"{'':<14}{line}")
    configuration.warn_of_ignored()
    return 0


def _findings(environment: VectorEnvironment, create_environment: Any) -> Iterator[tuple[str, str]]:
    """Yields the title and the text of each finding."""
    yield "environment", f"{environment.name}, {environment.batch_size} at once"
    yield "observation", str(environment.observation_space)
    yield "encoder", _encoder(environment)
    yield "action", str(environment.action_space)
    yield "agents", _agents(environment)
    driver, policy = _collector(environment)
    carry, rows = _random_steps(driver, policy)
    yield "episodes", _episodes(rows)
    rate = int(rows.is_step.sum()) / max(rows.seconds, 1e-9)
    yield "speed", f"{rate:,.0f} environment steps per second, without an agent"
    resume = _resume(environment, create_environment, policy, carry)
    if resume == _IS_EXACT:
        # A resume in a long training begins at an anchor, which most of these steps did not reach.
        environment.episodes.anchor_interval = _CALL_STEPS
        carry, _ = _random_steps(driver, policy)
        resume = _resume(environment, create_environment, policy, carry)
    yield "exact resume", resume
    yield "gymnasium", _gymnasiums_view(environment)
    advice = [*environment.notes, *_advice(environment, rows, rate)]
    yield "advice", "\n".join(f"* {line}" for line in advice) or "none"


def _encoder(environment: VectorEnvironment) -> str:
    from pipeline.networks.encoders import create_encoder
    from pipeline.networks.summary import summarize

    spec = environment.observation_spec()
    encoder = create_encoder(spec)
    encoder(environment.current_time_step().observation)
    _, _, layers = summarize({"encoder": encoder}, spec).partition("\n")
    return textwrap.dedent(layers) or "no weights"


def _agents(environment: VectorEnvironment) -> str:
    from pipeline.agents.sac import check_actions

    spec = environment.action_spec()
    if spec.dtype.is_integer:
        q_learning = "" if spec.shape.rank else "DQN, n-step Q-learning, "
        return f"{q_learning}PPO, A2C, A3C, IMPALA, TRPO"
    try:
        check_actions(spec)
    except UserError:
        return "PPO, A2C, A3C, IMPALA, TRPO"
    return "SAC, PPO, A2C, A3C, IMPALA, TRPO"


def _gymnasiums_view(environment: VectorEnvironment) -> str:
    """Returns what gymnasium's checker says about one environment."""
    from pipeline.environments.gymnasium_envs import maker
    from pipeline.environments.single_env import close_with_warning
    from pipeline.ops.observations import action_mask

    if action_mask(environment.observation_spec()) is not None:
        return "not checked: its checker does not know action masks"
    name = "gymnasium_environment"
    values = configuration.defaults(name) | gin.get_bindings(name)
    if not values.get("name"):
        return "not checked: its checker applies only to gymnasium_environment"
    names = ("name", "kwargs", "wrappers", "max_episode_steps", "render")
    try:
        env = maker(*(values[name] for name in names))()
    except UserError as error:
        return f"not checked: {_second(error)}"
    with contextlib.ExitStack() as ends:
        ends.callback(close_with_warning, env, values["name"])
        caught = ends.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        # It asks for environments without wrappers, but those of gymnasium.make have some.
        warnings.filterwarnings("ignore", ".*different from the unwrapped version")
        try:
            env_checker.check_env(env, skip_render_check=True, skip_close_check=True)
        except Exception as error:  # the checker and the environment raise what they like
            return f"check failed: {type(error).__name__}: {error}"
    said = dict.fromkeys(str(warning.message) for warning in caught)
    plain = (Text.from_ansi(text).plain.replace("WARN: ", "") for text in said)
    return "\n".join(plain) or "no problems found"


def _second(error: UserError) -> str:
    return (
        f"a second environment cannot be built: {configuration.explain_call_error(error)} Bind "
        'gymnasium_environment.vectorization_mode = "async" or build_evaluator.share_environment = '
        "True for training"
    )


def _collector(environment: VectorEnvironment) -> tuple[CollectDriver, RandomPolicy]:
    from pipeline.acting.collect_driver import CollectDriver
    from pipeline.acting.policies import RandomPolicy

    policy = RandomPolicy(environment.time_step_spec(), environment.action_spec())
    return CollectDriver(environment, seed=_SEED.value, reward_range=None), policy


def _random_steps(driver: CollectDriver, policy: RandomPolicy) -> tuple[Carry, _Rows]:
    import tensorflow as tf

    from pipeline.acting.collect_driver import initial_carry

    @tf.function(autograph=False)
    def play(carry: Any) -> Any:
        return driver.run(policy, carry, _CALL_STEPS)

    chunks: list[list[np.ndarray]] = []
    largest = np.zeros(len(tf.nest.flatten(driver.environment.observation_spec())))
    carry = initial_carry(driver.environment, policy)
    before, started = driver.environment.seconds, time.monotonic()
    limit = math.inf if _NUM_STEPS.present else _MOST_SECONDS
    wanted = max(1, _NUM_STEPS.value // (_CALL_STEPS * driver.environment.batch_size))
    while len(chunks) < wanted and time.monotonic() - started < limit:
        carry, rows = play(carry)
        for number, array in enumerate(tf.nest.flatten(rows.observation)):
            magnitudes = np.abs(array.numpy().astype(np.float64))
            largest[number] = np.maximum(largest[number], magnitudes.max(initial=0))
        kept = rows.step_type, rows.next_step_type, rows.reward, rows.discount
        chunks.append([x.numpy() for x in kept])
    step_type, following, reward, discount = map(np.concatenate, zip(*chunks, strict=True))
    seconds = driver.environment.seconds - before
    return carry, _Rows(step_type, following, reward, discount, largest, seconds)


def _episodes(rows: _Rows) -> str:
    from tf_agents.trajectories import StepType

    is_step = rows.is_step
    rewards = rows.reward[is_step]
    steps, ends = int(is_step.sum()), is_step & (rows.next_step_type == StepType.LAST)
    terminated = int((ends & (rows.discount == 0)).sum())
    text = f"{int(ends.sum())} in {steps:,} random steps ({terminated} terminated)"
    if ends.any():
        # Unfinished episodes have no length.
        passed = zip(np.cumsum(is_step, axis=0).T, ends.T, strict=True)
        lengths = np.concatenate([np.diff(count[end], prepend=0) for count, end in passed])
        text += f", {lengths.mean():.0f} steps on average"
    return f"{text}; rewards from {rewards.min():g} to {rewards.max():g}"


def _resume(
    environment: VectorEnvironment, create_environment: Any, policy: RandomPolicy, carry: Carry
) -> str:
    """Restores the episodes in a second environment, and compares what follows in both."""
    import tensorflow as tf

    from pipeline.environments.training_environment import named_failures

    with tempfile.TemporaryDirectory() as folder:
        environment.save(pathlib.Path(folder))
        try:
            other = create_environment(_SEED.value)
        except UserError as error:
            return f"unknown: {_second(error)}"
        other.episodes.anchor_interval = environment.episodes.anchor_interval
        with contextlib.closing(other), named_failures(other):
            other.restore(pathlib.Path(folder))
            if other.divergence:
                return f"no: {other.divergence}"
            for _ in range(_CALL_STEPS):
                seed = tf.cast(tf.stack([carry.vector_steps, 0]), tf.int32)
                action = policy.action(carry.time_step, (), seed).action
                first, second = environment.step(action), other.step(action)
                pairs = zip(tf.nest.flatten(first), tf.nest.flatten(second), strict=True)
                if not all(np.array_equal(a, b, equal_nan=True) for a, b in pairs):
                    return f"no: {environment.name} takes other steps after it is restored"
                carry = carry._replace(time_step=first, vector_steps=carry.vector_steps + 1)
    return _IS_EXACT


def _advice(environment: VectorEnvironment, rows: _Rows, rate: float) -> Iterator[str]:
    from pipeline.environments import specs
    from pipeline.ops.batches import are_finite

    leaves = specs.arrays(environment.observation_space)
    for leaf, largest in zip(leaves, rows.largest, strict=True):
        is_number = leaf.space.dtype != np.uint8 and not specs.categories(leaf.space)
        if not are_finite(largest):
            yield (
                f"{leaf.name} contains NaN, infinity or a number too large for float32, which "
                "stops training. Fix the environment"
            )
        elif is_number and largest > _LARGE:
            yield (
                f"{leaf.name} reaches {largest:.3g}. Bind ActorCritic.normalize_observations = "
                "True (PPO, A2C, IMPALA, TRPO), or normalize_observations = True of "
                "create_dqn_agent, create_nstep_q_agent or create_sac_agent"
            )
    if not np.isfinite(rows.reward).all():
        yield (
            "rewards contain NaN, infinity or a number too large for float32, which stops "
            "training. Fix the environment"
        )
    elif np.abs(rows.reward).max(initial=0) > _LARGE:
        yield (
            f"rewards reach {np.abs(rows.reward).max():.3g}. Bind normalize_returns = True of "
            "create_ppo_agent, create_a2c_agent or create_trpo_agent, or scale the rewards with a "
            "wrapper"
        )
    bound = configuration.in_force("", "gymnasium_environment")
    is_gymnasiums = bool(bound.get("name"))
    if (rows.discount == 1).all() and (rows.next_step_type == 1).all():
        limit = ", or bind gymnasium_environment.max_episode_steps if episodes never end"
        yield f"no episode ended: increase --num_steps{limit if is_gymnasiums else ''}"
    if isinstance(environment.action_space, gymnasium.spaces.Box):
        yield from _advice_on_bounds(environment.action_spec())
    cpus = machine()["cpu_count"]
    is_sync = is_gymnasiums and bound.get("vectorization_mode") == "sync"
    if rate < _FAST and is_sync and cpus > 1:
        yield (
            'steps are slow. Bind gymnasium_environment.vectorization_mode = "async", and '
            f"gymnasium_environment.num_envs = {cpus} or more"
        )


def _advice_on_bounds(spec: Any) -> Iterator[str]:
    if not spec.dtype.is_integer and not np.isfinite(spec.maximum - spec.minimum).all():
        yield (
            "the actions have no finite bounds. PPO, A2C, A3C, IMPALA and TRPO start with a "
            "standard deviation of about 1; bind GaussianHead.initial_log_std to change it"
        )


if __name__ == "__main__":
    main()
