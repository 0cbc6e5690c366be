"""Prints the digests of the final weights of short seeded runs, one for each agent and runner.

    PYTHONPATH=. .venv/bin/python tests/digests.py [NAME...]

Run it before and after a change that must not change results, on the same machine. To run another
revision, set PYTHONPATH to a checkout of it.
"""

import json
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
    "dqn_pong": ("dqn_pong", 1_500, (*_SMALL_REPLAY, _SHORT_GAMES)),
    "ppo_breakout": ("ppo_atari", 8_000, ("atari_environment.game = 'breakout'", _SHORT_GAMES)),
    "dqn3_breakout": (
        "dqn3_atari",
        1_500,
        ("deepmind_atari_environment.game = 'breakout'", *_SMALL_REPLAY),
    ),
}


def digest(name: str, folder: pathlib.Path) -> str:
    """Trains a run and returns the digest of its weights."""
    config, num_env_steps, bindings = RUNS[name]
    bindings = (f"train.num_env_steps = {num_env_steps}", "train.num_final_episodes = 1", *bindings)
    flags = [f"--gin_bindings={binding}" for binding in (*bindings, "train.eval_interval = 0")]
    command = [sys.executable, "-m", "pipeline.train", f"--root_dir={folder}"]
    command += [f"--gin_file={config}", *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads((folder / "result.json").read_text())["weights_sha256"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        for run in sys.argv[1:] or RUNS:
            print(f"{run:<14} {digest(run, pathlib.Path(root, run))[:16]}", flush=True)
