"""Builds the components of a run from gin's bindings."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple, TypeVar

import gin
import tensorflow as tf
from tf_agents.specs.tensor_spec import BoundedTensorSpec
from tf_agents.trajectories import TimeStep

from pipeline import configuration
from pipeline.acting.collect_driver import CollectDriver
from pipeline.acting.evaluation import Evaluator
from pipeline.agents.agent import Agent
from pipeline.environments import TrainingEnvironment
from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.ops.randomness import stream_key
from pipeline.replay import Experience
from pipeline.training.iteration import Iterations, Runner
from pipeline.utils.constraints import Range, check_arguments
from pipeline.utils.errors import UserError
from pipeline.utils.execution import HOST, Execution, accelerator, configure_gpu, device_name
from pipeline.utils.shutdown import kept_handlers
from pipeline.utils.tensorflow_import import ONEDNN

T = TypeVar("T")

Threads = Annotated[int, Range(0, 4_096)]
EVALUATION = "evaluation"  # gin scope and random stream of evaluation


@gin.configurable(denylist=["execution"])
def configure_tensorflow(
    intra_op: Threads = 0,
    inter_op: Threads = 0,
    onednn: bool = True,
    use_gpu: bool = True,
    *,
    execution: Execution = Execution.GRAPH,
) -> dict[str, Any]:
    """Configures TensorFlow's threads, oneDNN, GPU and execution mode.

    Call it before the first operation runs; only `execution` can be changed later.

    Args:
      intra_op: Threads that share one operation; 0 leaves the choice to TensorFlow.
      inter_op: Operations that run at the same time; 0 leaves the choice to TensorFlow.
      onednn: True to use oneDNN's kernels, which are faster for images and wide layers and slower
        for small networks. TensorFlow reads this setting when it is imported, so the programs read
        the binding before that; this function only reports it. The environment variable
        TF_ENABLE_ONEDNN_OPTS takes precedence.
      use_gpu: True to run networks and updates on the first GPU, if there is one.
      execution: Whether to run eagerly or as a graph.

    Returns:
      The settings in force, for run.json.

    Raises:
      UserError: If a number of threads is out of range, or if TensorFlow already runs with other
        settings.
    """
    # TensorFlow aborts the process if it cannot start as many threads.
    check_arguments(configure_tensorflow, locals())
    threading = tf.config.threading
    try:
        if threading.get_intra_op_parallelism_threads() != intra_op:
            threading.set_intra_op_parallelism_threads(intra_op)
        if threading.get_inter_op_parallelism_threads() != inter_op:
            threading.set_inter_op_parallelism_threads(inter_op)
        configure_gpu(use_gpu)
    except RuntimeError as error:
        raise UserError(
            f"configure_tensorflow({intra_op=}, {inter_op=}, {use_gpu=}) comes too late: "
            "TensorFlow has already run in this process with other settings. Start a new process."
        ) from error
    del onednn
    execution.configure()
    return {
        "execution": execution.value,
        "device": device_name(),
        "threads": {"intra_op": intra_op, "inter_op": inter_op},
        "onednn": os.environ.get(ONEDNN, "TensorFlow's choice"),
    }


class Components(NamedTuple):
    """Components of a run."""

    environment: TrainingEnvironment
    agent: Agent
    experience: Experience
    runner: Runner
    evaluator: Evaluator
    env_steps: tf.Variable

    def close(self) -> None:
        """Closes all environments and ends the threads of the runner."""
        self.evaluator.close()
        self.runner.close()


@contextlib.contextmanager
def closed_on_error(*resources: Any) -> Iterator[contextlib.ExitStack]:
    """Closes `resources`, and the stack that it yields, if the context raises and only then."""
    with contextlib.ExitStack() as opened:
        for resource in resources:
            opened.callback(resource.close)
        yield opened
        opened.pop_all()


def build(
    seed: int,
    create_environment: Callable[..., VectorEnvironment],
    create_agent: Callable[..., Agent],
    create_experience: Callable[..., Experience],
) -> Components:
    """Builds the components of a run; a checkpoint may be restored into them."""
    seed_generators(seed)
    environment = build_environment(stream_key(seed, "training"), create_environment)
    with closed_on_error(environment) as opened:
        env_steps = count_of_env_steps()
        specs = environment.time_step_spec(), environment.action_spec()
        agent = build_agent(*specs, environment.batch_size, seed, create_agent, env_steps)
        compile_update(agent)
        experience = build_experience(agent, environment.batch_size, seed, create_experience)
        evaluator = build_evaluator(agent, seed, create_environment, environment, may_share=True)
        opened.callback(evaluator.close)
        driver = CollectDriver(environment, seed=seed)
        runner = Iterations(agent, experience, driver, env_steps)
        return Components(environment, agent, experience, runner, evaluator, env_steps)


def created(
    parameter: str, kind: type[T], factory: Callable[..., T], *args: Any, **kwargs: Any
) -> T:
    """Calls a factory that `parameter` binds, and checks its arguments and what it returns.

    Raises:
      UserError: If it takes other arguments, or returns something else than `kind`.
    """
    name = f"{parameter} = @{getattr(factory, '__name__', repr(factory))}"
    try:
        inspect.signature(factory).bind_partial(*args, **kwargs)  # gin may bind the others
    except TypeError as error:
        raise UserError(f"{name}: {error}.") from error
    made = factory(*args, **kwargs)
    if not isinstance(made, kind):
        raise UserError(f"{name}: returned {made!r:.80} instead of a {kind.__name__}.")
    return made


def count_of_env_steps() -> tf.Variable:
    """Creates the variable that counts the environment steps of a run, int64 []."""
    with tf.device(HOST):
        return tf.Variable(0, dtype=tf.int64, name="env_steps")


def seed_generators(seed: int) -> None:
    """Seeds the generators of Python, NumPy and TensorFlow.

    Keras draws weights from them, and some environments draw from those of Python and NumPy.
    """
    tf.keras.utils.set_random_seed(stream_key(seed, "weights") % 2**31)


def build_environment(
    seed: int, create_environment: Callable[..., VectorEnvironment], **kwargs: Any
) -> VectorEnvironment:
    """Builds an environment for training with arguments of the factory.

    Raises:
      UserError: If `create_environment` takes other arguments or returns no environment.
    """
    name = "train.create_environment"
    with kept_handlers():
        return created(name, VectorEnvironment, create_environment, seed, **kwargs)


def build_agent(
    time_step_spec: TimeStep,
    action_spec: BoundedTensorSpec,
    num_envs: int,
    seed: int,
    create_agent: Callable[..., Agent],
    env_steps: tf.Variable,
) -> Agent:
    """Builds the agent for the specs of `num_envs` training environments.

    Raises:
      UserError: If `create_agent` takes other arguments, or returns no agent, or one whose
        normaliser is not in `trained`.
    """
    with tf.device(accelerator()), _float32_layers():
        agent = created(
            "train.create_agent",
            Agent,
            create_agent,
            time_step_spec,
            action_spec,
            num_envs=num_envs,
            seed=seed,
            env_steps=env_steps,
        )
    variables = {id(v) for module in agent.trained.values() for v in module.variables}
    own = () if agent.normalizer is None else agent.normalizer.variables
    if not variables.issuperset(map(id, own)):
        raise UserError(
            f"{type(agent).__name__}.trained lacks the normaliser, so exports and collectors would "
            "not have its statistics: add `| self.normalizers()`."
        )
    return agent


@contextlib.contextmanager
def _float32_layers() -> Iterator[None]:
    """Lets layers without a dtype of their own be float32, whatever the program has set."""
    policy = tf.keras.mixed_precision.global_policy()
    if policy.name == "float32":
        yield
        return
    tf.keras.mixed_precision.set_global_policy("float32")
    try:
        yield
    finally:
        # Without a policy, Keras follows `floatx`, and must go on to do so.
        is_set = policy.name != tf.keras.backend.floatx()
        tf.keras.mixed_precision.set_global_policy(policy if is_set else None)


@gin.configurable(denylist=["agent"])
def compile_update(agent: Agent, jit_compile: bool = False) -> None:
    """Makes XLA compile the gradients of an agent's update.

    It has no effect with --eager and --exact_graph. For TRPO, only the gradients of the value
    function are compiled.

    Args:
      agent: Agent whose gradients are compiled.
      jit_compile: True to compile. The gradients then differ from those of the default graph by
        rounding, and XLA draws other random numbers (the noise of SAC's actions). On a GPU, XLA
        cannot read the environment steps, which an annealed `create_ppo_agent.clip_ratio` needs.
    """
    if jit_compile:
        agent.compile()


def build_experience(
    agent: Agent, num_envs: int, seed: int, create_experience: Callable[..., Experience]
) -> Experience:
    """Builds the replay buffer or rollout for the rows that `num_envs` environments collect.

    Raises:
      UserError: If `create_experience` takes other arguments or returns no experience, or if the
        agent cannot learn from the batches that it returns.
    """
    experience = created(
        "train.create_experience",
        Experience,  # type: ignore[type-abstract]
        create_experience,
        agent.collect_data_spec,
        num_envs,
        sequence_length=agent.train_sequence_length,
        training_spec=agent.training_data_spec,
        seed=seed,
    )
    _check_experience(agent, experience)
    return experience


def _check_experience(agent: Agent, experience: Experience) -> None:
    length = agent.train_sequence_length or 1
    if length > 1 and not experience.keeps_rows:
        raise UserError(
            f"This agent learns from sequences of {length} rows: bind train.create_experience = "
            "@ReplayBuffer."
        )
    if agent.needs_whole_rollouts and (experience.keeps_rows or experience.num_batches != 1):
        raise UserError(
            "This agent makes one update of a whole rollout: bind train.create_experience = "
            "@Rollout, Rollout.minibatch_size = None and Rollout.num_epochs = 1."
        )
    if agent.training_data_spec != agent.collect_data_spec and experience.keeps_rows:
        raise UserError(
            "This agent learns from values that are computed over a whole rollout, such as "
            "advantages: bind train.create_experience = @Rollout."
        )


def _note_shared(factory: str) -> None:
    """Notes which parameters of evaluations have no effect on an environment that they share."""
    trained, evaluated = (configuration.in_force(scope, factory) for scope in ("", EVALUATION))
    for name, value in evaluated.items():
        if value != trained.get(name):
            configuration.without_effect[f"{EVALUATION}/{factory}.{name}"] = (
                "build_evaluator.share_environment = True evaluates in the training environment"
            )


@gin.configurable(denylist=["agent", "seed", "create_environment", "environment", "may_share"])
def build_evaluator(
    agent: Agent,
    seed: int,
    create_environment: Callable[..., VectorEnvironment],
    environment: VectorEnvironment,
    may_share: bool,
    share_environment: bool = False,
) -> Evaluator:
    """Builds the evaluator of an agent.

    Args:
      agent: Agent to evaluate.
      seed: Seed of the run.
      create_environment: Factory of the environments.
      environment: Training environment.
      may_share: Whether the training environment may be used for evaluations.
      share_environment: Whether to evaluate in the training environment, for a machine that can
        run only one simulator. Each evaluation then truncates the training episodes.

    Raises:
      UserError: If `share_environment` is True without `may_share`, or the environment that is
        built for evaluation has other spaces.
    """
    check_arguments(build_evaluator, locals())
    if share_environment and not may_share:
        raise UserError(
            "build_evaluator.share_environment = True needs the default train.runner, which trains "
            "in one environment. Bind it to False."
        )
    if share_environment:
        _note_shared(create_environment.__name__)
    with closed_on_error() as opened:
        if not share_environment:
            trained = environment.observation_space, environment.action_space
            environment = build_evaluation_environment(seed, create_environment)
            opened.callback(environment.close)
            environment.check_spaces(*trained)
        evaluator = Evaluator(
            environment,
            agent.policy,
            agent.collect_policy,
            seed=stream_key(seed, EVALUATION),
            shares_environment=share_environment,
        )
    if evaluator.num_env_steps is not None:
        reason = "Evaluator.num_env_steps sets the length of evaluations"
        for name in ("train.num_eval_episodes", "train.num_final_episodes"):
            configuration.without_effect[name] = reason
    return evaluator


def build_evaluation_environment(
    seed: int, create_environment: Callable[..., VectorEnvironment], **kwargs
) -> VectorEnvironment:
    """Builds an environment in gin's scope `evaluation`, with seeds that training never uses."""
    try:
        with gin.config_scope(EVALUATION):
            return build_environment(stream_key(seed, EVALUATION), create_environment, **kwargs)
    except UserError as error:
        if " raised " not in str(error):
            raise
        raise UserError(
            f"{configuration.explain_call_error(error)}\nThe error occurred while the evaluation "
            "environment was built. If a process can run only one such simulator, bind "
            'gymnasium_environment.vectorization_mode = "async" to give each environment its own '
            "process. If the machine can run only one, bind build_evaluator.share_environment = "
            "True, which needs the default train.runner."
        ) from error
