"""Builds what a run consists of from what gin has bound, in the one order that works."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import gin
import tensorflow as tf

from pipeline.agents.agent import Agent
from pipeline.collect import CollectDriver
from pipeline.environments import TrainingEnvironment
from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.errors import UserError, check_whole
from pipeline.evaluation import Evaluator
from pipeline.execution import HOST, Execution, accelerator, configure_gpu
from pipeline.experience import Experience
from pipeline.iteration import Iterations, Runner
from pipeline.randomness import stream_key

EVALUATION = "evaluation"  # gin scope and random stream of all that only evaluation uses


@gin.configurable(denylist=["execution"])
def configure_tensorflow(
    intra_op: int = 0,
    inter_op: int = 0,
    onednn: bool = True,
    use_gpu: bool = True,
    *,
    execution: Execution = Execution.GRAPH,
) -> dict[str, Any]:
    """Sets what moves bits, and speed. All but `execution` only before the first operation runs.

    Args:
      intra_op: threads that share one operation; 0 leaves the choice to TensorFlow.
      inter_op: operations that run at the same time; likewise.
      onednn: whether operations use oneDNN's kernels, which are faster for images and wide layers
        and slower for small networks. TensorFlow reads this when it is imported, so the
        binaries look the binding up before that; here it is declared.
      use_gpu: whether networks and updates run on the first GPU, if there is one.
      execution: eagerly or as a graph.

    Returns:
      The settings in force, for run.json.

    Raises:
      UserError: a number of threads is negative, or TensorFlow already runs with other settings.
    """
    # TensorFlow takes what is no number of threads, and aborts the process when it starts them.
    check_whole("configure_tensorflow.intra_op", intra_op, 0)
    check_whole("configure_tensorflow.inter_op", inter_op, 0)
    threading = tf.config.threading
    try:
        if threading.get_intra_op_parallelism_threads() != intra_op:
            threading.set_intra_op_parallelism_threads(intra_op)
        if threading.get_inter_op_parallelism_threads() != inter_op:
            threading.set_inter_op_parallelism_threads(inter_op)
        device = configure_gpu(use_gpu)
    except RuntimeError as error:
        raise UserError(
            f"configure_tensorflow({intra_op=}, {inter_op=}, {use_gpu=}) comes too late: "
            "TensorFlow has already run in this process with other settings. Start a new process."
        ) from error
    del onednn
    execution.configure()
    return {
        "execution": execution.value,
        "device": device,
        "threads": {"intra_op": intra_op, "inter_op": inter_op},
        "onednn": os.environ.get("TF_ENABLE_ONEDNN_OPTS", "TensorFlow's choice"),
    }


class Components(NamedTuple):
    """What gin has built for a run."""

    environment: TrainingEnvironment
    agent: Agent
    experience: Experience
    runner: Runner
    evaluator: Evaluator
    env_steps: tf.Variable

    def close(self) -> None:
        """Closes all environments, and ends what threads the runner has."""
        self.evaluator.close()
        self.runner.close()


def build(
    seed: int,
    create_environment: Callable[..., VectorEnvironment],
    create_agent: Callable[..., Agent],
    create_experience: Callable[..., Experience],
) -> Components:
    """Everything that training needs, fresh: a checkpoint may be restored into it."""
    seed_weights(seed)
    environment = create_environment(stream_key(seed, "training"))
    with tf.device(HOST):
        env_steps = tf.Variable(0, dtype=tf.int64, name="env_steps")
    agent = build_agent(environment, environment.batch_size, seed, create_agent, env_steps)
    compile_update(agent)
    experience = build_experience(agent, environment.batch_size, seed, create_experience)
    evaluator = build_evaluator(agent, seed, create_environment)
    driver = CollectDriver(environment, seed=seed)
    runner = Iterations(agent, experience, driver, env_steps)
    return Components(environment, agent, experience, runner, evaluator, env_steps)


def seed_weights(seed: int) -> None:
    """Seeds what Keras draws when networks are built."""
    tf.keras.utils.set_random_seed(stream_key(seed, "weights") % 2**31)


def check_warm_up(experience: Experience, num_env_steps: int) -> None:
    """Raises UserError if the experience cannot keep rows that are not learnt from at once."""
    if num_env_steps and not experience.keeps_rows:
        raise UserError(
            f"initialize_replay_buffer.num_env_steps = {num_env_steps:_}, but a rollout is not a "
            "replay buffer: bind it to 0 for an on-policy agent."
        )


def build_agent(
    environment: VectorEnvironment,
    num_envs: int,
    seed: int,
    create_agent: Callable[..., Agent],
    env_steps: tf.Variable,
) -> Agent:
    """The agent for an environment's specs; `num_envs` is the training environment's."""
    with tf.device(accelerator()):
        return create_agent(
            environment.time_step_spec(),
            environment.action_spec(),
            num_envs=num_envs,
            seed=seed,
            env_steps=env_steps,
        )


@gin.configurable(denylist=["agent"])
def compile_update(agent: Agent, jit_compile: bool = False) -> None:
    """Has XLA compile the gradients of an agent's update.

    --eager and --exact_graph do without it. Of TRPO it compiles what fits the value function.

    Args:
      agent: whose gradients.
      jit_compile: whether to compile. Gradients then differ from the default graph's by rounding,
        and XLA draws other random numbers (the noise of SAC's actions). On a GPU XLA cannot read
        the environment steps, which an annealed `create_ppo_agent.clip_ratio` needs.
    """
    if jit_compile:
        agent.compile()


def build_experience(
    agent: Agent, num_envs: int, seed: int, create_experience: Callable[..., Experience]
) -> Experience:
    """The store for what `num_envs` environments collect for an agent.

    Raises:
      UserError: this store does not hand out what the agent learns from.
    """
    experience = create_experience(
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
            "This agent learns from what only a rollout as a whole tells, such as advantages: bind "
            "train.create_experience = @Rollout."
        )


def build_evaluator(
    agent: Agent, seed: int, create_environment: Callable[..., VectorEnvironment]
) -> Evaluator:
    """The evaluator of an agent, with environments of its own."""
    environment = build_evaluation_environment(seed, create_environment)
    return Evaluator(
        environment, agent.policy, agent.collect_policy, seed=stream_key(seed, EVALUATION)
    )


def build_evaluation_environment(
    seed: int, create_environment: Callable[..., VectorEnvironment], **kwargs
) -> VectorEnvironment:
    """The environment under gin's scope `evaluation`, with seeds that training never uses."""
    with gin.config_scope(EVALUATION):
        return create_environment(stream_key(seed, EVALUATION), **kwargs)
