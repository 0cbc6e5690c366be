"""Runs this pipeline as a worker of `throughput`.

    python -m benchmarks.our_worker --work=dqn_pong_8 --output_dir=/tmp/x

A work of `workers/works.py`, optionally in a variant (`dqn_pong_8:bfloat16`), is timed stage by
stage with `pipeline.benchmarks.throughput`. The other works, in `machine_stages`, measure the
machine, the start of a run, memory and checkpoints.
"""

from __future__ import annotations

import importlib.metadata
import pathlib
from typing import Any

from benchmarks.workers import protocol, works
from benchmarks.workers.protocol import Stage
from pipeline import configuration
from pipeline.utils.tensorflow_import import import_tensorflow

BFLOAT16 = "bfloat16"
_SCHEDULERS = {"asynchronous": "threads", "in_turns": "deterministic"}  # of asynchronous actors
_PACKAGES = ("tensorflow", "tf-agents", "gymnasium", "ale-py", "numpy")


def has_variant(work: works.Work, variant: str) -> bool:
    """Returns True if the work can be measured in a variant.

    Args:
      work: The work.
      variant: Name of the variant; "" is float32 without asynchronous actors.
    """
    if variant == BFLOAT16:
        return work.is_atari  # only image encoders support bfloat16
    return not variant or variant in _SCHEDULERS and work.algorithm in ("a2c", "nstep_q")


def gin_files(work: works.Work, variant: str = "") -> list[str]:
    """Returns the shipped configs of a work, in the order in which they are applied."""
    runner = ["runners/asynchronous"] if variant in _SCHEDULERS else []
    if work.is_atari:
        return [f"{work.algorithm}_atari", *runner]
    return [f"agents/{work.algorithm}", "environments/gymnasium", *runner]


def gin_bindings(work: works.Work, num_envs: int, variant: str) -> list[str]:
    """Returns the bindings that make the configs of `gin_files` do exactly the work.

    With asynchronous actors, the number of actors is `num_envs`.
    """
    of_algorithm = {
        "dqn": _dqn, "dqn3": _dqn3, "sac": _sac, "ppo": _ppo, "a2c": _actor_critic,
        "trpo": _trpo, "nstep_q": _nstep_q,
    }[work.algorithm]  # fmt: skip
    agent = _agent(work)
    return [
        f"{agent}.discount = {works.DISCOUNT}",
        f"{agent}.learning_rate = {work.learning_rate}",
        f"{agent}.gradient_clip_norm = {work.gradient_clip_norm}",
        f"{work.optimizer}.epsilon = {work.optimizer_epsilon}",
        f"configure_tensorflow.onednn = {not work.has_small_layers}",
        *(f"configure_tensorflow.{kind} = {count}" for kind, count in work.threads.items()),
        *of_algorithm(work),
        *_environment(work, num_envs, variant),
        *(_actors(work, num_envs, _SCHEDULERS[variant]) if variant in _SCHEDULERS else []),
    ]


def _actors(work: works.Work, count: int, scheduler: str) -> list[str]:
    threads = min(count, 4 if work.is_atari else 2)  # as in the A3C configs
    return [
        f"asynchronous_runner.num_actors = {count}",
        f'asynchronous_runner.scheduler = "{scheduler}"',
        f"configure_tensorflow.inter_op = {threads}",
        "configure_tensorflow.intra_op = 1",
    ]


def _agent(work: works.Work) -> str:
    return f"create_{'dqn' if work.algorithm == 'dqn3' else work.algorithm}_agent"


def _environment(work: works.Work, num_envs: int, variant: str) -> list[str]:
    if work.is_atari:
        precision = "mixed_bfloat16" if variant == BFLOAT16 else "float32"
        environment = "deepmind_atari" if work.algorithm == "dqn3" else "atari"
        return [
            f'{environment}_environment.game = "pong"',
            f"{environment}_environment.num_envs = {num_envs}",
            f'encoder_precision.policy = "{precision}"',
        ]
    return [
        f'gymnasium_environment.name = "{work.environment}"',
        f"gymnasium_environment.num_envs = {num_envs}",
    ]


def _replay(work: works.Work) -> list[str]:
    return [
        f"ReplayBuffer.capacity = {work.replay_capacity}",
        f"ReplayBuffer.batch_size = {work.batch_size}",
        f"ReplayBuffer.env_steps_per_update = {work.env_steps_per_update}",
    ]


def _encoder(work: works.Work) -> list[str]:
    return [f"mlp_encoder.units = {work.units}"] if work.units else []


def _dqn(work: works.Work) -> list[str]:
    return [
        "create_dqn_agent.double_q = False",
        "create_dqn_agent.td_loss = @huber_loss",
        f"create_dqn_agent.epsilon = {works.EPSILON}",
        f"create_dqn_agent.target_update_period = {work.target_update_period}",
        *_encoder(work),
        *_replay(work),
    ]


def _dqn3(work: works.Work) -> list[str]:
    return [
        f"create_dqn_agent.epsilon = {works.EPSILON}",
        f"create_dqn_agent.target_update_env_steps = {work.target_update_period}",
        *_replay(work),
    ]


def _rollout(work: works.Work) -> list[str]:
    return [
        f"Rollout.num_steps = {work.rollout_steps}",
        f"Rollout.num_epochs = {work.num_epochs}",
        f"Rollout.minibatch_size = {work.batch_size}",
        *([f"RMSprop.rho = {works.RMSPROP_DECAY}"] if work.optimizer == "RMSprop" else []),
        *_encoder(work),
    ]


def _actor_critic(work: works.Work) -> list[str]:
    agent = _agent(work)
    return [
        f"{agent}.entropy_coefficient = {work.entropy_coefficient}",
        f"{agent}.value_coefficient = {work.value_coefficient}",
        f"{agent}.gae_lambda = {work.gae_lambda}",
        *_rollout(work),
    ]


def _ppo(work: works.Work) -> list[str]:
    return [f"create_ppo_agent.clip_ratio = {work.clip_ratio}", *_actor_critic(work)]


def _trpo(work: works.Work) -> list[str]:
    return [
        f"create_trpo_agent.gae_lambda = {work.gae_lambda}",
        f"TrustRegion.max_kl = {works.MAX_KL}",
        f"TrustRegion.cg_iterations = {work.cg_iterations}",
        f"TrustRegion.fisher_fraction = {work.fisher_fraction}",
        f"TrustRegion.cg_damping = {work.cg_damping}",
        f"TrustRegion.line_search_steps = {works.LINE_SEARCH_STEPS}",
        f"TrustRegion.line_search_shrink = {works.LINE_SEARCH_SHRINK}",
        f"create_trpo_agent.value_epochs = {work.value_epochs}",
        f"create_trpo_agent.value_minibatch_size = {work.value_batch_size}",
        *_rollout(work),
    ]


def _nstep_q(work: works.Work) -> list[str]:
    return [
        "create_nstep_q_agent.one_step = False",
        f"create_nstep_q_agent.epsilon = {works.EPSILON}",
        f"create_nstep_q_agent.target_update_env_steps = {work.target_update_period}",
        *_rollout(work),
    ]


def _sac(work: works.Work) -> list[str]:
    return [
        f"create_sac_agent.actor_units = {work.units}",
        f"create_sac_agent.critic_units = {work.units}",
        f"create_sac_agent.initial_alpha = {work.initial_alpha}",
        f"create_sac_agent.target_update_tau = {works.TARGET_UPDATE_TAU}",
        *_replay(work),
    ]


def main() -> None:
    """Measures the stages of the work from the command line until standard input ends."""
    channel = protocol.Channel()
    flags = protocol.arguments()
    output_dir = pathlib.Path(flags.output_dir)
    name, _, variant = flags.work.partition(":")
    if name.rpartition("_")[0] in works.WORKS:
        facts, stages = _training(*works.parse(name), variant, output_dir)
    else:
        import_tensorflow(onednn=True)
        from benchmarks import machine_stages

        facts, stages = machine_stages.prepare(name, output_dir)
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    channel.serve({"versions": versions, **facts}, stages)


def _training(
    work: works.Work, num_envs: int, variant: str, output_dir: pathlib.Path
) -> tuple[dict[str, Any], dict[str, Stage]]:
    """Builds a training and warms it up; returns facts about it and its stages."""
    statements = configuration.read(gin_files(work, variant), gin_bindings(work, num_envs, variant))
    import_tensorflow(configuration.uses_onednn(statements))
    from pipeline.benchmarks import throughput
    from pipeline.training.components import configure_tensorflow

    configuration.apply(statements)
    settings = configure_tensorflow()
    parts = throughput.build_components()
    steps_per_update = 1 + work.value_steps(num_envs)
    stages = throughput.all_stages(parts, work.warm_up, output_dir, steps_per_update)
    weights = [w for network in parts.agent.trained.values() for w in network.trainable_variables]
    num_parameters = sum(w.shape.num_elements() for w in weights)
    return {**settings, "num_parameters": num_parameters}, stages


if __name__ == "__main__":
    main()
