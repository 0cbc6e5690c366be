"""Tests that shipped configs learn what their first lines claim. Slow: `make test-learning`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# config: (environment steps, mean return of 100 greedy episodes to reach, seeds, number of seeds
# that must reach it)
CLAIMS = {
    "dqn_cartpole": (50_000, 475.0, (1, 2, 3, 4, 5), 4),
    "ppo_cartpole": (100_000, 475.0, (1, 2, 3, 4, 5), 4),
    "trpo_cartpole": (100_000, 475.0, (1, 2, 3, 4, 5), 4),
    "a2c_cartpole": (500_000, 475.0, (1, 2, 3, 4, 5), 4),
    "impala_cartpole": (500_000, 475.0, (1, 2, 3, 4, 5), 4),
    "nstep_q_cartpole": (500_000, 475.0, (1, 2, 3, 4, 5), 4),
    "a3c_cartpole": (500_000, 475.0, (1, 2, 3, 4, 5), 4),
    "async_nstep_q_cartpole": (500_000, 475.0, (1, 2, 3, 4, 5), 4),
    "sac_pendulum": (20_000, -200.0, (1, 2, 3, 4, 5), 4),
    "dqn_acrobot": (100_000, -76.6, (1, 2, 3, 4, 5), 4),
    "ppo_lunarlander": (1_000_000, 200.0, (1, 2, 3), 2),
}


def final_return(config: str, num_env_steps: int, seed: int, folder: Path) -> float:
    """Trains with the command of the README and returns the mean return in result.json."""
    command = [
        sys.executable, "-m", "pipeline.train", f"--root_dir={folder}", f"--gin_file={config}",
        f"--seed={seed}", "--restart_behavior=fail",  # a kept run may be of an earlier source
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    result = json.loads((folder / "result.json").read_text())
    evaluation = result["evaluation"]
    assert len(evaluation["returns"]) == 100
    # An iteration may exceed the last environment step by less than one collect phase.
    assert num_env_steps <= result["env_steps"] < num_env_steps * 1.02
    print(json.dumps({"config": config, "seed": seed, "return_mean": evaluation["return_mean"],
                      "wall_seconds": result["wall_seconds"]}), flush=True)  # fmt: skip
    return evaluation["return_mean"]


@pytest.mark.learning
@pytest.mark.parametrize("config", CLAIMS)
def test_learns(config: str, tmp_path: Path) -> None:
    num_env_steps, threshold, seeds, enough = CLAIMS[config]
    # Folder that keeps the runs, for instance to draw their curves.
    root = Path(os.environ.get("LEARNING_RUNS", tmp_path))
    returns = [
        final_return(config, num_env_steps, seed, root / f"{config}_seed{seed}") for seed in seeds
    ]
    assert sum(x >= threshold for x in returns) >= enough, returns
