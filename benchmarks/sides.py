"""Defines the workloads that `throughput` measures, and the sides of each.

A workload is a training or a machine test, for example `dqn_pong_8`. A side is one program that
runs the workload: this pipeline or a peer.
"""

from __future__ import annotations

import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.our_worker import has_variant
from benchmarks.workers import workloads as trainings
from pipeline.utils.errors import UserError

DEFAULT_WORKLOADS = (
    "machine",
    "dqn_pong_1", "dqn_pong_1:bfloat16", "dqn_pong_8", "dqn_pong_8:bfloat16",
    "ppo_pong_8", "ppo_pong_8:bfloat16", "sac_pong_8", "sac_pong_8:bfloat16",
    "a2c_pong_4", "a2c_pong_4:asynchronous", "a2c_pong_4:in_turns",
    "a2c_pong_16", "a2c_pong_16:bfloat16", "a2c_pong_16:asynchronous", "a2c_pong_16:in_turns",
    "nstep_q_pong_16", "trpo_pong_16", "dqn3_pong_1",
    "dqn_cartpole_1", "dqn_cartpole_8", "ppo_cartpole_8", "sac_pendulum_1",
    "a2c_cartpole_8", "a2c_cartpole_8:asynchronous", "a2c_cartpole_8:in_turns",
    "trpo_cartpole_2", "nstep_q_cartpole_8",
    "start_pong", "replay_pong",
)  # fmt: skip

_WITHOUT_PEERS = ("machine", "start_pong", "replay_pong")

_WORKERS = pathlib.Path(__file__).parent / "workers"
_PEER_WORKLOADS = {
    # Neither peer has n-step Q-learning or DQN 3.0. SB3's TRPO cannot do trpo_pong: when it uses a
    # part of the states, it drops the other states altogether.
    "sb3": (
        "dqn_pong", "ppo_pong", "sac_pong", "a2c_pong", "dqn_cartpole", "ppo_cartpole",
        "sac_pendulum", "a2c_cartpole", "trpo_cartpole",
    ),
    # TF-Agents has no A2C and no TRPO, and SacAgent's networks cannot share an image encoder.
    "tf_agents": ("dqn_pong", "ppo_pong", "dqn_cartpole", "ppo_cartpole", "sac_pendulum"),
}  # fmt: skip


class Side(NamedTuple):
    """One side of a workload.

    Attributes:
      name: Name of the side in the results.
      command: Command of its worker, without flags.
      workload: Name of the workload for the worker, with its variant.
    """

    name: str
    command: tuple[str, ...]
    workload: str


def check(names: Sequence[str]) -> None:
    """Checks the names of workloads.

    Raises:
      UserError: If a name is unknown, or if there are no names.
    """
    if not names:
        raise UserError("--workloads is empty: name at least one workload.")
    for name in names:
        if fault := _fault(name):
            raise UserError(
                f"--workloads: {name!r} is not a workload: {fault}. Choose from "
                f"{', '.join(_WITHOUT_PEERS)} and workloads such as dqn_pong_8, "
                "dqn_pong_8:bfloat16, a2c_pong_8:asynchronous or a2c_pong_8:in_turns. In "
                "WORKLOAD_N, N is the number of environments or actors, and WORKLOAD is one of "
                f"{', '.join(trainings.WORKLOADS)}."
            )


def _fault(name: str) -> str:
    """Returns why `name` is not a workload, or "" if it is one."""
    workload, colon, variant = name.partition(":")
    if workload in _WITHOUT_PEERS:
        return "it has no variants" if colon else ""
    try:
        training, _ = trainings.parse(workload)
    except ValueError as error:
        return str(error)
    is_known = has_variant(training, variant) and bool(variant) == bool(colon)
    return "" if is_known else f"{workload} has no such variant"


def grouped(names: Sequence[str]) -> dict[str, list[str]]:
    """Groups names by workload, and returns the variants of each workload, in order.

    The variant of a name without a variant is "".
    """
    variants: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        workload, _, variant = name.partition(":")
        variants.setdefault(workload, []).append(variant)
    return variants


def ours(workload: str, variants: Sequence[str]) -> list[Side]:
    """Returns the sides of this pipeline, one for each variant."""
    command = (sys.executable, "-m", "benchmarks.our_worker")
    names = [(":" + variant) if variant else "" for variant in variants]
    return [Side(f"ours{name}", command, f"{workload}{name}") for name in names]


def peers(workload: str, python: dict[str, str]) -> list[Side]:
    """Returns the sides of the peers that can run the workload.

    Args:
      workload: Name of the workload, without a variant.
      python: Path of the Python interpreter of each peer.
    """
    if workload in _WITHOUT_PEERS:
        return []
    training = trainings.parse(workload)[0]
    # The peers' TensorFlow uses the same kernels as ours; torch does not read this variable.
    onednn = f"TF_ENABLE_ONEDNN_OPTS={int(not training.has_small_layers)}"
    settings = (str(shutil.which("env")), onednn)
    return [
        Side(name, (*settings, python[name], str(_WORKERS / f"{name}_worker.py")), workload)
        for name, workloads in _PEER_WORKLOADS.items()
        if workload.rpartition("_")[0] in workloads
    ]
