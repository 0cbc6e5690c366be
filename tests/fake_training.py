"""Replaces `pipeline.train` in tests of benchmarks and searches: takes its flags, writes its files.

Bindings `fake.x = value` choose what it does; see `main`.
"""

import json
import math
import os
import pathlib
import re
import signal
import sys
import time


def main(root_dir: pathlib.Path, seed: int, budget: int, fake: dict[str, str]) -> int:
    """Ends when `together` runs have begun; the seeds in `failing` fail while `broken` exists.

    With `patience`, it takes half of its steps and waits for SIGTERM, then takes so many seconds to
    write a checkpoint; started again, it finishes. `quality` is the mean return of the evaluation
    after half of the steps and of the final one, for seed 1; above 1, it is killed once. With NaN,
    no episode ends in the evaluations.
    """
    print("started", seed, flush=True)
    with (root_dir.parent / "times.jsonl").open("a") as times:
        times.write(f'["{root_dir.name}", 1, {time.monotonic()}]\n')
    root_dir.mkdir(exist_ok=True)
    checkpoint = root_dir / "checkpoint"
    write_json(root_dir / "run.json", description(root_dir))
    (root_dir / "operative_config.gin").write_text("Evaluator.greedy = True\n")
    log(root_dir, budget // 2)
    if "quality" in fake:
        quality = float(fake["quality"]) * seed
        if quality > 1 and not (root_dir / "killed").exists():
            (root_dir / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if (root_dir / "eval.jsonl").exists():  # what a killed run has done is not lost
            checkpoint.touch()
        with (root_dir / "eval.jsonl").open("w") as file:
            file.write(json.dumps({"env_steps": budget // 2, "return_mean": known(quality)}) + "\n")
    if str(seed) in fake.get("failing", "") and pathlib.Path(fake["broken"]).exists():
        print("a line\nerror: the loss is NaN", file=sys.stderr)
        return 2
    if "patience" in fake and not checkpoint.exists():
        return wait_for_signal(root_dir, checkpoint, float(fake["patience"]))
    deadline = time.monotonic() + 20
    while num_begun(root_dir) < int(fake.get("together", 0)) and time.monotonic() < deadline:
        time.sleep(0.02)
    log(root_dir, budget)
    finish(root_dir, seed, budget, float(fake.get("quality", 1.5)) * seed)
    with (root_dir.parent / "times.jsonl").open("a") as times:
        times.write(f'["{root_dir.name}", -1, {time.monotonic()}]\n')
    return int(fake.get("exit_code", 0))


def num_begun(root_dir: pathlib.Path) -> int:
    """Returns how many runs of the suite have begun so far."""
    texts = [path.read_text() for path in root_dir.parent.parent.glob("*/times.jsonl")]
    return "".join(texts).count(", 1, ")


def known(return_mean: float) -> float | None:
    return None if math.isnan(return_mean) else return_mean


def description(root_dir: pathlib.Path) -> dict:
    return {
        "command": f"python -m pipeline.train --root_dir={root_dir}",
        "git_revision": "abc",
        "versions": {"python": "3.11"},
        "threads": {"intra_op": 1, "inter_op": 1},
        "onednn": "1",
        "device": "CPU",
        "cpu_model": "A Processor",
        "cpu_count": 2,
        "earlier_starts": [],
        "inexact_resumes": [],
    }


def log(root_dir: pathlib.Path, env_steps: int) -> None:
    record = {
        "env_steps": env_steps,
        "wall_seconds": env_steps / 100,
        "env_steps_per_second": 100.0,
        "return_mean_100": float(env_steps),
    }
    with (root_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def finish(root_dir: pathlib.Path, seed: int, budget: int, return_mean: float) -> None:
    returns = [1.0 * seed, 2.0 * seed]
    result = {
        "evaluation": {
            "returns": [] if math.isnan(return_mean) else returns,
            "return_mean": known(return_mean),
            "return_std": 0.5 * seed,
        },
        "env_steps": budget + 3,
        "updates": budget // 2,
        "episodes": 4,
        "wall_seconds": budget / 100,
        "weights_sha256": "f" * 64,
    }
    write_json(root_dir / "result.json", result)


def write_json(path: pathlib.Path, value: dict) -> None:
    """Replaces a file in one step, because the tested programs read it meanwhile."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)


def wait_for_signal(root_dir: pathlib.Path, checkpoint: pathlib.Path, seconds: float) -> int:
    """Writes its process id, so that tests can follow the process, and waits for SIGTERM."""
    stopping = root_dir / "stopping"

    def stop(number: int, frame: object) -> None:
        if stopping.exists():
            os._exit(1)  # a second signal prevents the checkpoint
        stopping.touch()
        time.sleep(seconds)
        checkpoint.touch()
        stopping.unlink()
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    (root_dir / "process_id").write_text(str(os.getpid()))
    time.sleep(60)
    return 1


if __name__ == "__main__":
    values = dict(re.findall(r"--(root_dir|seed)=(.*)", "\n".join(sys.argv)))
    bindings = re.findall(r"--gin_bindings=fake\.(\w+) = '?(.*?)'?$", "\n".join(sys.argv), re.M)
    steps = re.findall(r"train\.num_env_steps = ([\d_]+)", "\n".join(sys.argv))[-1]
    sys.exit(
        main(pathlib.Path(values["root_dir"]), int(values["seed"]), int(steps), dict(bindings))
    )
