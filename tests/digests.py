"""Prints the digests of the final weights of short seeded runs, of every agent and runner.

    .venv/bin/python tests/digests.py [--source=CHECKOUT] [NAME...]

Run it before and after a change that must not change results, on the same machine, or with another
checkout as the source.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

_SMALL_REPLAY = ("WARM_UP = 800", "ReplayBuffer.capacity = 2_000")
_IN_TURNS = 'asynchronous_runner.scheduler = "deterministic"'
_SHORT_GAMES = "atari_environment.max_episode_frames = 2_000"
#: Config, environment steps and bindings of each run.
RUNS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "dqn": ("dqn_cartpole", 8_000, ()),
    "ppo": ("ppo_cartpole", 16_000, ('gymnasium_environment.vectorization_mode = "async"',)),
    "a2c": ("a2c_cartpole", 16_000, ()),
    "trpo": ("trpo_cartpole", 16_000, ()),
    "sac": ("sac_pendulum", 2_500, ()),
    "nstep_q": ("nstep_q_cartpole", 16_000, ()),
    "a3c": ("a3c_cartpole", 6_000, (_IN_TURNS,)),
    "async_nstep_q": ("async_nstep_q_cartpole", 6_000, (_IN_TURNS,)),
    "impala": ("impala_cartpole", 16_000, ()),
    "collectors": ("dqn_cartpole", 6_000, ("train.runner = @distributed_runner",)),
    "dqn_pong": ("dqn_pong", 1_500, (*_SMALL_REPLAY, _SHORT_GAMES)),
    "ppo_breakout": ("ppo_atari", 8_000, ("atari_environment.game = 'breakout'", _SHORT_GAMES)),
    "dqn3_breakout": (
        "dqn3_atari",
        1_500,
        (
            "deepmind_atari_environment.game = 'breakout'",
            "Evaluator.num_env_steps = 100",
            *_SMALL_REPLAY,
        ),
    ),
}


def digest(name: str, folder: pathlib.Path, source: pathlib.Path) -> str:
    """Trains a run with the code of a checkout and returns the digest of its weights."""
    config, num_env_steps, bindings = RUNS[name]
    bindings = (f"train.num_env_steps = {num_env_steps}", "train.num_final_episodes = 1", *bindings)
    flags = [f"--gin_bindings={binding}" for binding in (*bindings, "train.eval_interval = 0")]
    command = [sys.executable, "-m", "pipeline.train", f"--root_dir={folder}"]
    command += [f"--gin_file={config}", *flags]
    environment = os.environ | {"PYTHONPATH": str(source)}
    subprocess.run(command, check=True, cwd=source, env=environment, stdout=subprocess.DEVNULL)
    return json.loads((folder / "result.json").read_text())["weights_sha256"]


def main() -> None:
    """Prints a line for each run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", type=pathlib.Path, default=pathlib.Path(__file__).parents[1])
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        for name in arguments.names or RUNS:
            folder = pathlib.Path(root, name)
            print(f"{name:<14} {digest(name, folder, arguments.source)[:16]}", flush=True)


if __name__ == "__main__":
    main()
