"""Runs this pipeline as a worker of `throughput`.

    python -m benchmarks.our_worker --workload=dqn_pong_8 --output_dir=/tmp/x

A workload of `workers/workloads.py`, optionally in a variant (`dqn_pong_8:bfloat16`), is timed
stage by stage with `pipeline.benchmarks.throughput`. The other workloads, in `machine_stages`,
measure the machine, the start of a run, memory and checkpoints.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import pathlib
from typing import Any

from benchmarks.workers import protocol, workloads
from benchmarks.workers.protocol import Stage
from pipeline import configuration
from pipeline.utils.tensorflow_import import import_tensorflow

BFLOAT16 = "bfloat16"
_SCHEDULERS = {"asynchronous": "threads", "in_turns": "deterministic"}  # of asynchronous actors
_PACKAGES = ("tensorflow", "tf-agents", "gymnasium", "ale-py", "numpy")


def has_variant(workload: workloads.Workload, variant: str) -> bool:
    """Returns True if the workload can be measured in a variant.

    Args:
      workload: The workload.
      variant: Name of the variant; "" is float32 without asynchronous actors.
    """
    if variant == BFLOAT16:
        return workload.is_atari  # only image encoders support bfloat16
    return not variant or variant in _SCHEDULERS and workload.algorithm in ("a2c", "nstep_q")


def gin_files(workload: workloads.Workload, variant: str = "") -> list[str]:
    """Returns the shipped configs of a workload, in the order in which they are applied."""
    runner = ["runners/asynchronous"] if variant in _SCHEDULERS else []
    if workload.is_atari:
        return [f"{workload.algorithm}_atari", *runner]
    return [f"agents/{workload.algorithm}", "environments/gymnasium", *runner]


def gin_bindings(workload: workloads.Workload, num_envs: int, variant: str) -> list[str]:
    """Returns the bindings that make the configs of `gin_files` do exactly the workload.

    With asynchronous actors, the number of actors is `num_envs`.
    """
    of_algorithm = {
        "dqn": _dqn, "dqn3": _dqn3, "sac": _sac, "ppo": _ppo, "a2c": _actor_critic,
        "trpo": _trpo, "nstep_q": _nstep_q,
    }[workload.algorithm]  # fmt: skip
    agent = _agent(workload)
    return [
        f"{agent}.discount = {workloads.DISCOUNT}",
        f"{agent}.learning_rate = {workload.learning_rate}",
        f"{agent}.gradient_clip_norm = {workload.gradient_clip_norm}",
        f"{workload.optimizer}.epsilon = {workload.optimizer_epsilon}",
        f"configure_tensorflow.onednn = {not workload.has_small_layers}",
        *(f"configure_tensorflow.{kind} = {count}" for kind, count in workload.threads.items()),
        *of_algorithm(workload),
        *_environment(workload, num_envs, variant),
        *(_actors(workload, num_envs, _SCHEDULERS[variant]) if variant in _SCHEDULERS else []),
    ]


def _actors(workload: workloads.Workload, count: int, scheduler: str) -> list[str]:
    threads = min(count, 4 if workload.is_atari else 2)  # as in the A3C configs
    return [
        f"asynchronous_runner.num_actors = {count}",
        f'asynchronous_runner.scheduler = "{scheduler}"',
        f"configure_tensorflow.inter_op = {threads}",
        "configure_tensorflow.intra_op = 1",
    ]


def _agent(workload: workloads.Workload) -> str:
    return f"create_{'dqn' if workload.algorithm == 'dqn3' else workload.algorithm}_agent"


def _environment(workload: workloads.Workload, num_envs: int, variant: str) -> list[str]:
    if workload.is_atari:
        precision = "mixed_bfloat16" if variant == BFLOAT16 else "float32"
        environment = "deepmind_atari" if workload.algorithm == "dqn3" else "atari"
        return [
            f'{environment}_environment.game = "pong"',
            f"{environment}_environment.num_envs = {num_envs}",
            f'encoder_precision.policy = "{precision}"',
        ]
    return [
        f'gymnasium_environment.name = "{workload.environment}"',
        f"gymnasium_environment.num_envs = {num_envs}",
    ]


def _replay(workload: workloads.Workload) -> list[str]:
    return [
        f"ReplayBuffer.capacity = {workload.replay_capacity}",
        f"ReplayBuffer.batch_size = {workload.batch_size}",
        f"ReplayBuffer.env_steps_per_update = {workload.env_steps_per_update}",
    ]


def _encoder(workload: workloads.Workload) -> list[str]:
    return [f"mlp_encoder.units = {workload.units}"] if workload.units else []


def _dqn(workload: workloads.Workload) -> list[str]:
    return [
        "create_dqn_agent.double_q = False",
        "create_dqn_agent.td_loss = @huber_loss",
        f"create_dqn_agent.epsilon = {workloads.EPSILON}",
        f"create_dqn_agent.target_update_period = {workload.target_update_period}",
        *_encoder(workload),
        *_replay(workload),
    ]


def _dqn3(workload: workloads.Workload) -> list[str]:
    return [
        f"create_dqn_agent.epsilon = {workloads.EPSILON}",
        f"create_dqn_agent.target_update_env_steps = {workload.target_update_period}",
        *_replay(workload),
    ]


def _rollout(workload: workloads.Workload) -> list[str]:
    return [
        f"Rollout.num_steps = {workload.rollout_steps}",
        f"Rollout.num_epochs = {workload.num_epochs}",
        f"Rollout.minibatch_size = {workload.batch_size}",
        *([f"RMSprop.rho = {workloads.RMSPROP_DECAY}"] if workload.optimizer == "RMSprop" else []),
        *_encoder(workload),
    ]


def _actor_critic(workload: workloads.Workload) -> list[str]:
    agent = _agent(workload)
    return [
        f"{agent}.entropy_coefficient = {workload.entropy_coefficient}",
        f"{agent}.value_coefficient = {workload.value_coefficient}",
        f"{agent}.gae_lambda = {workload.gae_lambda}",
        *_rollout(workload),
    ]


def _ppo(workload: workloads.Workload) -> list[str]:
    return [f"create_ppo_agent.clip_ratio = {workload.clip_ratio}", *_actor_critic(workload)]


def _trpo(workload: workloads.Workload) -> list[str]:
    return [
        f"create_trpo_agent.gae_lambda = {workload.gae_lambda}",
        f"TrustRegion.max_kl = {workloads.MAX_KL}",
        f"TrustRegion.cg_iterations = {workload.cg_iterations}",
        f"TrustRegion.fisher_fraction = {workload.fisher_fraction}",
        f"TrustRegion.cg_damping = {workload.cg_damping}",
        f"TrustRegion.line_search_steps = {workloads.LINE_SEARCH_STEPS}",
        f"TrustRegion.line_search_shrink = {workloads.LINE_SEARCH_SHRINK}",
        f"create_trpo_agent.value_epochs = {workload.value_epochs}",
        f"create_trpo_agent.value_minibatch_size = {workload.value_batch_size}",
        *_rollout(workload),
    ]


def _nstep_q(workload: workloads.Workload) -> list[str]:
    return [
        "create_nstep_q_agent.one_step = False",
        f"create_nstep_q_agent.epsilon = {workloads.EPSILON}",
        f"create_nstep_q_agent.target_update_env_steps = {workload.target_update_period}",
        *_rollout(workload),
    ]


def _sac(workload: workloads.Workload) -> list[str]:
    return [
        f"create_sac_agent.actor_units = {workload.units}",
        f"create_sac_agent.critic_units = {workload.units}",
        f"create_sac_agent.initial_alpha = {workload.initial_alpha}",
        f"create_sac_agent.target_update_tau = {workloads.TARGET_UPDATE_TAU}",
        *_replay(workload),
    ]


def main() -> None:
    """Measures the stages of the workload from the command line until standard input ends."""
    channel = protocol.Channel()
    flags = protocol.arguments()
    output_dir = pathlib.Path(flags.output_dir)
    name, _, variant = flags.workload.partition(":")
    with contextlib.ExitStack() as opened:
        if name.rpartition("_")[0] in workloads.WORKLOADS:
            facts, stages = _training(*workloads.parse(name), variant, output_dir, opened)
        else:
            import_tensorflow(onednn=True, freeze=True)
            from benchmarks import machine_stages

            facts, stages = machine_stages.prepare(name, output_dir)
        versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
        channel.serve({"versions": versions, **facts}, stages)


def _training(
    workload: workloads.Workload,
    num_envs: int,
    variant: str,
    output_dir: pathlib.Path,
    opened: contextlib.ExitStack,
) -> tuple[dict[str, Any], dict[str, Stage]]:
    """Builds a training and warms it up; returns facts about it and its stages."""
    statements = configuration.read(
        gin_files(workload, variant), gin_bindings(workload, num_envs, variant)
    )
    import_tensorflow(configuration.uses_onednn(statements), freeze=True)
    from pipeline.benchmarks import throughput
    from pipeline.training.components import configure_tensorflow

    configuration.apply(statements)
    settings = configure_tensorflow()
    parts = opened.enter_context(contextlib.closing(throughput.build_components()))
    steps_per_update = 1 + workload.value_steps(num_envs)
    stages = throughput.all_stages(parts, workload.warm_up, output_dir, opened, steps_per_update)
    weights = [w for network in parts.agent.trained.values() for w in network.trainable_variables]
    num_parameters = sum(w.shape.num_elements() for w in weights)
    return {**settings, "num_parameters": num_parameters}, stages


if __name__ == "__main__":
    main()
