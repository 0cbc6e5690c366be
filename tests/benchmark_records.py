"""Made-up records of runs, plausible and the same every time."""

import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.benchmarks.records import Record

CLASSIC = "classic control, deterministic evaluation"
DOPAMINE = "atari, sticky 0.25, minimal actions, training returns (Dopamine)"
OPENAI = "atari, no sticky, life loss, training returns (OpenAI v4)"


def make_record(
    algorithm: str = "dqn",
    environment: str = "CartPole-v1",
    seed: int = 1,
    *,
    returns: tuple[float, float] = (20.0, 480.0),
    noise: float = 8.0,
    points: int = 60,
    **fields: Any,
) -> Record:
    """Returns a finished run whose noisy returns rise from the first to the second of `returns`."""
    budget = fields.get("num_env_steps", 50_000)
    name = f"{algorithm}-{environment}-{seed}"
    generator = np.random.default_rng(list(name.encode()))
    low, high = np.array(returns) + generator.normal(0, noise, 2)
    steps = np.linspace(budget / points, budget, points).astype(int)
    risen = 1 / (1 + np.exp(-(steps / budget * 10 - generator.uniform(3, 5))))
    curve = low + (high - low) * risen + generator.normal(0, noise / 4, points)
    seconds = float(budget / 2000 * generator.uniform(0.9, 1.1))
    return {
        "suite": "trial",
        "algorithm": algorithm,
        "environment": environment,
        "config": f"{algorithm}_{environment.partition('-')[0].lower()}",
        "seed": seed,
        "status": "finished",
        "error": None,
        "protocol": CLASSIC,
        "score": "evaluation",
        "budgets": [],
        "num_seeds": 3,
        "num_env_steps": budget,
        "env_steps": budget + 7,
        "updates": budget // 4,
        "episodes": 812,
        "wall_seconds": seconds,
        "env_steps_per_second": budget / seconds,
        "workers": 1,
        "evaluation_returns": (high + generator.normal(0, noise, 20)).round(1).tolist(),
        "evaluation_policy": "greedy",
        "curve": [[int(x), round(float(y), 2)] for x, y in zip(steps, curve, strict=True)],
        "iterations": [],
        "evaluations": [],
        "source_sha256": "ab",
        "own_modules": {"my_envs": "cd"},
        "device": "CPU",
        "encoder_precision": "float32",
        "weights_sha256": _digest(f"weights {name}"),
        "config_sha256": _digest(f"config {algorithm} {environment}"),
        "command": f"python -m pipeline.train --root_dir=runs/{name} --seed={seed}",
        "git_revision": "268cb32e9e2f15e0969a444221462eeb687de0c5",
        "earlier_revisions": [],
        "inexact_resumes": 0,
        "versions": {"python": "3.13.0", "tensorflow": "2.21.0", "tf-agents": "0.19.0"},
        "threads": {"intra_op": 0, "inter_op": 0},
        "onednn": "1",
        "cpu_model": "A Processor",
        "cpu_count": 2,
        **fields,
    }


def make_failed(algorithm: str, environment: str, seed: int, error: str, **fields: Any) -> Record:
    """Returns the record of a run that ended with `error`, a text of several lines."""
    unknown = ["env_steps", "updates", "episodes", "wall_seconds", "env_steps_per_second"]
    unknown += ["workers", "evaluation_policy", "weights_sha256", "config_sha256"]
    unknown += ["git_revision", "versions", "threads", "onednn", "inexact_resumes"]
    return {
        **make_record(algorithm, environment, seed, **fields),
        **dict.fromkeys(unknown),
        "status": "failed",
        "error": error,
        **{name: [] for name in ("evaluation_returns", "curve", "iterations", "evaluations")},
    }


def make_games(
    algorithm: str, ends: dict[str, float], seeds: Sequence[int] = (1, 2, 3), **fields: Any
) -> list[Record]:
    """Returns runs of an Atari suite on games whose curves end near the given scores."""
    return [
        make_record(
            algorithm,
            game,
            seed,
            **{
                "returns": (0.0, end),
                "noise": abs(end) / 20,
                "num_env_steps": 2_500_000,
                "score": "training",
                "protocol": DOPAMINE,
                "budgets": [250_000, 2_500_000],
                **fields,
            },
        )
        for game, end in ends.items()
        for seed in seeds
    ]


def write_records(path: pathlib.Path, records: Sequence[Record]) -> pathlib.Path:
    """Writes the records and returns their folder, for which a report can be written."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path.parent


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
