"""Runs small enough to test: an environment with switches, and all that trains in it.

Importing this module registers `Walk-v0`, which other processes find as `tiny_runs:Walk-v0`.
"""

import json
import pathlib
import tempfile
import time
from collections.abc import Callable, Collection
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

EPISODES = ((7, True), (11, False))  # (length, whether it terminates), in turn


class Walk(gymnasium.Env):
    """Environment with `EPISODES` in turn and observations (episode, step, a random number).

    The reward is 3 per step. Files in `switches` act on every step: `slow` makes it take 4 ms and
    `stuck` a minute, which the file `is_stuck` then shows; `fail` makes it raise, `nan` makes its
    reward NaN; `fail_reset` makes `reset` raise; `drift` changes its random numbers.
    """

    def __init__(self, switches: str = "", continuous: bool = False, dtype: str = "float32"):
        bounds = {"f": (-np.inf, np.inf), "b": (0, 1)}.get(np.dtype(dtype).kind, (0, 100))
        self.observation_space = Box(*bounds, (3,), np.dtype(dtype).type)
        self.action_space = Box(-1, 1, (1,), np.float32) if continuous else Discrete(3)
        self._switches = pathlib.Path(switches) if switches else None
        self._episode = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self._is_on("fail_reset"):
            raise RuntimeError("no way back")
        self._episode = 0 if seed is not None else self._episode + 1
        self._time = 0
        return self._observe(), {}

    def step(self, action):
        if self._is_on("slow"):
            time.sleep(0.004)
        if self._switches is not None and self._is_on("stuck"):
            (self._switches / "is_stuck").touch()
            time.sleep(60)
        if self._is_on("fail"):
            raise KeyError("no such room")
        self._time += 1
        length, terminates = EPISODES[self._episode % len(EPISODES)]
        over = self._time == length
        reward = np.nan if self._is_on("nan") else 3.0
        return self._observe(), reward, over and terminates, over and not terminates, {}

    def _observe(self):
        number = self.np_random.random() + self._is_on("drift")
        return np.array([self._episode, self._time, number]).astype(self.observation_space.dtype)

    def _is_on(self, switch):
        return self._switches is not None and (self._switches / switch).exists()


gymnasium.register("Walk-v0", entry_point="tiny_runs:Walk")

_BINDINGS = {
    "dqn": """
        create_dqn_agent.n_step = 2
        create_dqn_agent.target_update_period = 3
        create_dqn_agent.learning_rate = @rate/linear_schedule()
        rate/linear_schedule.initial = 1e-3
        rate/linear_schedule.final = 1e-4
        rate/linear_schedule.num_steps = 500
        epsilon/linear_schedule.num_steps = 700
        ReplayBuffer.capacity = 300
        ReplayBuffer.batch_size = 8
        mlp_encoder.units = (8,)
    """,
    "ppo": """
        create_ppo_agent.normalize_returns = True
        ActorCritic.normalize_observations = True
        Rollout.num_steps = 16  # taken in a loop; a graph of single steps takes longer to build
        Rollout.minibatch_size = 8
        Rollout.num_epochs = 2
        mlp_encoder.units = (8,)
    """,
    "a2c": """
        create_a2c_agent.normalize_returns = True
        create_a2c_agent.accumulate_updates = 5
        ActorCritic.normalize_observations = True
        mlp_encoder.units = (8,)
    """,
    "impala": """
        create_impala_agent.accumulate_updates = 5
        ActorCritic.normalize_observations = True
        Rollout.num_steps = 4
        mlp_encoder.units = (8,)
    """,
    "trpo": """
        create_trpo_agent.value_epochs = 2
        create_trpo_agent.value_minibatch_size = 8
        Rollout.num_steps = 16
        mlp_encoder.units = (8,)
    """,
    "nstep_q": """
        create_nstep_q_agent.target_update_env_steps = 70
        create_nstep_q_agent.accumulate_updates = 5
        epsilon/linear_schedule.num_steps = 700
        mlp_encoder.units = (8,)
    """,
    "a3c": """
        asynchronous_runner.num_actors = 2
        asynchronous_runner.scheduler = "deterministic"
        mlp_encoder.units = (8,)
    """,
    "async_nstep_q": """
        asynchronous_runner.num_actors = 2
        asynchronous_runner.scheduler = "deterministic"
        create_nstep_q_agent.target_update_env_steps = 70
        create_nstep_q_agent.accumulate_updates = 5
        epsilon/linear_schedule.num_steps = 700
        mlp_encoder.units = (8,)
    """,
    "sac": """
        create_sac_agent.actor_units = (8,)
        create_sac_agent.critic_units = (8,)
        ReplayBuffer.capacity = 300
        ReplayBuffer.batch_size = 8
        ReplayBuffer.env_steps_per_update = 2
        gymnasium_environment.kwargs = {"continuous": True, "switches": "%(switches)s"}
    """,
}
_COMMON = """
    gymnasium_environment.name = "tiny_runs:Walk-v0"
    gymnasium_environment.num_envs = 2
    gymnasium_environment.kwargs = {"switches": "%(switches)s"}
    configure_tensorflow.intra_op = 1
    train.num_env_steps = 600
    train.log_interval = 50
    train.eval_interval = 200
    train.checkpoint_interval = 100
    train.num_eval_episodes = 4
    train.num_final_episodes = 6
"""
WARM_UP = {"dqn": 100, "sac": 100}  # environment steps


def bindings(algorithm: str, switches: object = "", **overrides: object) -> list[str]:
    """Returns gin statements; `overrides` are named as in `train__num_env_steps=1`."""
    text = (_COMMON + _BINDINGS[algorithm]) % {"switches": switches}
    lines = statements(text)
    if algorithm in WARM_UP:
        lines.append(f"initialize_replay_buffer.num_env_steps = {WARM_UP[algorithm]}")
    return lines + [f"{name.replace('__', '.')} = {value!r}" for name, value in overrides.items()]


def statements(text: str) -> list[str]:
    """Returns the lines of a text that are not empty."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def gin_files(algorithm: str) -> list[str]:
    return [f"agents/{algorithm}", "environments/gymnasium"]


def build_components(
    algorithm: str, switches: object = "", seed: int = 1, files: Any = (), **overrides: Any
):
    """Builds the components of such a run in this process; leaves gin's config loaded.

    Args:
      files: Further gin files, such as that of a runner.
    """
    from pipeline import configuration
    from pipeline.training.train_loop import build_bound

    lines = bindings(algorithm, switches, **overrides)
    configuration.load([*gin_files(algorithm), *files], lines)
    return build_bound(seed)


def noting_runner() -> tuple[list, Callable[..., Any]]:
    """Returns a list and a runner, which appends the components that it builds to it."""
    from pipeline.training import components

    built: list = []

    def runner(*arguments: Any) -> Any:
        built.append(components.build(*arguments))
        return built[-1]

    return built, runner


def variables(trackable: object) -> dict[str, np.ndarray]:
    """Returns every variable by its object path."""
    from pipeline.checkpointing.saveables import Variables

    with tempfile.TemporaryDirectory() as folder:
        Variables(agent=trackable).save(pathlib.Path(folder))
        return read_variables(pathlib.Path(folder))


def read_variables(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns every variable of a saved part `Variables` by its object path."""
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(folder / "variables"))
    names = [x for x in reader.get_variable_to_shape_map() if x.endswith("VARIABLE_VALUE")]
    return {name: np.asarray(reader.get_tensor(name)) for name in names}


def read_files(folder: pathlib.Path) -> dict[str, Any]:
    """Returns arrays, JSON, variables and the bytes of segments in the folder of a saved part."""
    contents: dict[str, Any] = {}
    if (folder / "variables.index").exists():
        contents |= read_variables(folder)
    for path in folder.iterdir():
        if path.is_dir():
            contents |= {f"{path.name}/{key}": x for key, x in read_files(path).items()}
        elif path.name.startswith("variables."):
            continue
        elif path.suffix == ".json":
            contents[path.name] = json.loads(path.read_text())
        elif path.suffix in (".rows", ".z"):
            contents[path.name] = np.fromfile(path, np.uint8)
        else:
            contents |= np.load(path)
    return contents


def saved(part: object) -> dict[str, Any]:
    """Returns the contents of the files that a part saves."""
    with tempfile.TemporaryDirectory() as folder:
        part.save(pathlib.Path(folder))  # type: ignore[attr-defined]
        return read_files(pathlib.Path(folder))


def assert_same(first: dict, second: dict, but_for: Collection[str] = ()) -> None:
    assert first.keys() == second.keys()
    assert first
    for name in first.keys() - set(but_for):
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
