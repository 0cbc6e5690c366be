import importlib
import sys

import gin
import gymnasium
import numpy as np
import pytest
import tensorflow as tf
from gymnasium.envs.classic_control import CartPoleEnv
from numpy_references import assert_same
from scripted_environments import drawn_actions, run

from pipeline.configuration.explanation import explain_call_error
from pipeline.environments.gymnasium_envs import gymnasium_environment
from pipeline.utils.errors import UserError

MODULE = """
import gymnasium
from pipeline.utils.errors import UserError

class Wrap(gymnasium.Wrapper):
    def __init__(self, env, error=None):
        raise error or KeyError("door")

gymnasium.register("Corridor-v3", entry_point="corridor:Corridor", max_episode_steps=5)

def forgetful(env):
    gymnasium.Wrapper(env)

class Marked(gymnasium.Wrapper):
    def __init__(self, env, marks):
        super().__init__(env)
        marks.append(1)
        env.get_wrapper_attr("marks").extend(marks)

class Corridor(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 9, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, package=None, render_mode=None, marks=(), leaks=False):
        self.marks, self.leaks = marks, leaks
        if package == "exit":
            raise SystemExit
        if package == "none":
            raise LookupError("no such floor")
        if package == "type":
            len(3)
        if package == "module":
            import a_package_that_is_not_there
        if package == "user":
            raise UserError("no corridor on this floor.")
        if package:
            raise gymnasium.error.DependencyNotInstalled(f"run `pip install {package}`")
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        return self.observation_space.low, {}

    def step(self, action):
        return self.observation_space.low, 0.0, False, False, {}

    def close(self):
        if self.leaks:
            raise RuntimeError("a leak")
"""


@pytest.fixture
def corridor(tmp_path, monkeypatch):
    """Yields the id of an environment that an outside module registers when it is imported."""
    (tmp_path / "corridor.py").write_text(MODULE)
    (tmp_path / "needy.py").write_text("import a_package_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    yield "corridor:Corridor-v3"
    gymnasium.registry.pop("Corridor-v3", None)
    sys.modules.pop("corridor", None)


def test_equal_seeds_give_equal_rows_and_others_do_not():
    def rows(seed):
        env = gymnasium_environment(seed, name="CartPole-v1", num_envs=3)
        return run(env, drawn_actions(env, 60))

    assert_same(rows(1), rows(1))
    assert not np.array_equal(rows(1)[-1], rows(2)[-1])


def test_windows_are_refused():
    with pytest.raises(UserError, match="pipeline.evaluate --video"):
        gymnasium_environment(1, name="CartPole-v1", num_envs=1, kwargs={"render_mode": "human"})


def test_rows_are_independent():
    env, other_env = (gymnasium_environment(1, name="CartPole-v1", num_envs=3) for _ in range(2))
    given, others = drawn_actions(env, 60), drawn_actions(env, 60, seed=1)
    others[:, 0] = given[:, 0]
    rows, beside_others = run(env, given), run(other_env, others)
    alone = run(gymnasium_environment(1, name="CartPole-v1", num_envs=1), given[:, :1])
    assert_same([row[:, :1] for row in rows], alone)
    assert_same([row[:, :1] for row in beside_others], alone)
    assert not np.array_equal(rows[-1][:, 1], rows[-1][:, 0])


def test_an_async_environment_whose_process_has_died_unnoticed_can_be_closed():
    environment = gymnasium_environment(
        1, name="CartPole-v1", num_envs=2, vectorization_mode="async"
    )
    environment.reset()
    process = environment.episodes.vector.processes[1]
    process.kill()
    process.join()
    environment.close()
    assert not any(process.is_alive() for process in environment.episodes.vector.processes)


def test_environments_do_not_share_the_objects_of_a_binding(corridor):
    marks = [[0], [7]]
    environment = gymnasium_environment(
        1,
        name=corridor,
        num_envs=3,
        kwargs={"marks": marks},
        wrappers=(("corridor:Marked", {"marks": []}),),
        own_thread=False,
    )
    environment.reset()
    found = [env.env.get_wrapper_attr("marks") for env in environment.episodes.vector.envs]
    assert found == [[[0], [7], 1]] * 3
    assert marks == [[0], [7]]
    found[0][0].append(5)
    assert found[1] == [[0], [7], 1]


def test_environments_share_a_large_object_without_a_copy(corridor):
    class Prices:
        def __deepcopy__(self, memo):
            raise AssertionError("gigabytes are copied")

    prices = Prices()
    environment = gymnasium_environment(1, name=corridor, num_envs=2, kwargs={"marks": prices})
    environment.reset()
    envs = environment.episodes.vector.vector.envs
    assert all(env.env.get_wrapper_attr("marks") is prices for env in envs)
    environment.close()


def test_a_wrapper_that_returns_nothing_is_named(corridor):
    with pytest.raises(UserError, match="'corridor:forgetful' returned None, but it must return"):
        gymnasium_environment(1, name=corridor, wrappers=("corridor:forgetful",))


def without_spaces(env):
    wrapped = gymnasium.Wrapper(env)
    wrapped.observation_space = 3  # type: ignore[assignment]
    return wrapped


@pytest.mark.parametrize(
    ("wrapper", "said"),
    [
        (lambda env: None, "must return the wrapped"),
        (lambda env: env.no_such_attribute, "raised AttributeError"),
        ("gymnasium.wrappers:NormalizeObservation", "has statistics that no checkpoint"),
        (without_spaces, "not a gymnasium.Space"),
    ],
)
def test_an_environment_that_is_refused_is_closed(monkeypatch, wrapper, said):
    closed: list[gymnasium.Env] = []
    monkeypatch.setattr(CartPoleEnv, "close", lambda self: closed.append(self))
    with pytest.raises(UserError, match=said):
        gymnasium_environment(1, name="CartPole-v1", num_envs=1, wrappers=(wrapper,))
    assert len(closed) == 1


@pytest.mark.parametrize(
    ("metadata", "fps"),
    [(None, 30), ({}, 30), *(({"render_fps": x}, 7) for x in (7, np.int64(7), np.float32(7)))],
)
def test_the_frame_rate_is_a_number_in_the_metadata_or_30(metadata, fps):
    def with_metadata(env):
        env.unwrapped.metadata = metadata
        return env

    env = gymnasium_environment(1, name="CartPole-v1", num_envs=1, wrappers=(with_metadata,))
    assert env.render_fps == fps


def test_async_gives_what_sync_gives():
    environments = [
        gymnasium_environment(1, name="CartPole-v1", num_envs=2, vectorization_mode=mode)
        for mode in ("sync", "async")
    ]
    try:
        assert_same(*[run(env, drawn_actions(env, 40)) for env in environments])
    finally:
        for env in environments:
            env.close()


def test_continuous_actions():
    env = gymnasium_environment(1, name="Pendulum-v1", num_envs=2, kwargs={"g": 9.81})
    assert env.action_spec().dtype == tf.float32
    env.reset()
    time_step = env.step(tf.constant([[2.0], [-2.0]]))
    assert time_step.observation.shape == (2, 3)
    assert (time_step.reward.numpy() < 0).all()


@pytest.mark.parametrize(("limit", "last"), [(None, 5), (3, 3), (-1, None)])
def test_max_episode_steps_truncates(corridor, limit, last):
    env = gymnasium_environment(1, name=corridor, max_episode_steps=limit)
    step_type, _, discount, _ = run(env, tf.zeros([8, 1], tf.int32))
    (ends,) = np.where(step_type[:, 0] == 2)
    assert ends.tolist() == ([] if last is None else list(range(last, 9, last + 1)))
    assert (discount == 1).all()


@pytest.mark.parametrize(
    "wrapper",
    [
        gymnasium.wrappers.FlattenObservation,
        "gymnasium.wrappers:FlattenObservation",
        ("gymnasium.wrappers:FlattenObservation", {}),
    ],
)
def test_wrappers(wrapper):
    env = gymnasium_environment(1, name="FrozenLake-v1", wrappers=[wrapper])
    assert env.observation_spec().shape == (16,)


def test_wrappers_with_arguments_apply_in_order():
    limit = "gymnasium.wrappers:TimeLimit"
    wrappers = [("gymnasium.wrappers:RescaleAction", {"min_action": -1, "max_action": 1})]
    wrappers.append((limit, {"max_episode_steps": 2}))
    env = gymnasium_environment(1, name="Pendulum-v1", wrappers=wrappers)
    assert env.action_spec().maximum == 1
    assert run(env, tf.zeros([3, 1, 1]))[0][:, 0].tolist() == [0, 1, 2, 0]


def test_ale_ids_work():
    env = gymnasium_environment(1, name="ALE/Pong-v5")
    assert env.observation_spec().shape == (210, 160, 3)
    assert env.reset().observation.dtype == tf.uint8


def message(**kwargs):
    with pytest.raises(UserError) as error:
        gymnasium_environment(1, **kwargs)
    return explain_call_error(error.value)


def test_messages_about_names(corridor):
    assert "gymnasium_environment.name is not bound" in message()
    assert "CartPole-v1" in message(name="cartpol-v1")
    assert "Please use `Acrobot-v1`" in message(name="Acrobot-v0")
    assert "CartPole-v1" in message(name="CartPole-v7")
    assert "Nearest: Corridor-v3" in message(name="corridor:corridr-v3")
    registration = "gymnasium.register('Marked-v0', entry_point='corridor:Marked')"
    assert registration in message(name="corridor:Marked")
    assert "'no_such_module'" in message(name="no_such_module:Room-v0")
    assert "'a_package_that_is_not_there'" in message(name="needy:Room-v0")
    assert "more than one ':'" in message(name="a:b:c")


def test_messages_about_the_other_arguments(corridor):
    assert "run `pip install maze`" in message(name=corridor, kwargs={"package": "maze"})
    assert "'speed'" in message(name=corridor, kwargs={"speed": 1})
    assert "num_envs = 0" in message(name=corridor, num_envs=0)
    assert "max_episode_steps = 0" in message(name=corridor, max_episode_steps=0)
    assert "'vector_entry_point'" in message(
        name="CartPole-v1", vectorization_mode="vector_entry_point"
    )
    assert "'nowhere:Wrap'" in message(name=corridor, wrappers=["nowhere:Wrap"])


@pytest.mark.parametrize(
    "wrappers",
    [
        "gymnasium.wrappers:FlattenObservation",
        ("gymnasium.wrappers:RescaleObservation", {"min_obs": -1.0, "max_obs": 1.0}),
        (("gymnasium.wrappers:FlattenObservation",),),
        3,
    ],
    ids=str,
)
def test_wrappers_that_are_none_are_refused(wrappers):
    assert f"wrappers = {wrappers!r}: must be a tuple" in message(
        name="FrozenLake-v1", wrappers=wrappers
    )


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_environment_that_raises_while_it_is_built_is_named(corridor, mode):
    def told(package):
        return message(name=corridor, kwargs={"package": package}, vectorization_mode=mode)

    start = f"gymnasium_environment.name = {corridor!r} raised "
    lookup, type_error = told("none"), told("type")
    assert lookup.startswith(start + "LookupError: no such floor (")
    assert "corridor.py:" in lookup and lookup.endswith(", in __init__)")
    # gymnasium itself rephrases this error.
    assert type_error.startswith(start + "TypeError: object of type 'int' has no len()")
    assert "corridor.py:" in type_error and type_error.endswith(", in __init__)")
    assert told("user") == "no corridor on this floor."
    assert "needs the module 'a_package_that_is_not_there'" in told("module")
    assert "the constructor of the environment called sys.exit()" in told("exit")


@gin.configurable
class Lobby(gymnasium.Env):
    """Environment that gin configures, and that cannot be built."""

    def __init__(self, needs):
        importlib.import_module(needs)
        sum(3)  # type: ignore[arg-type, call-overload]


gymnasium.register("Lobby-v0", f"{__name__}:Lobby")


def test_an_environment_that_gin_configures_is_named_with_its_own_error():
    told = message(name="Lobby-v0", kwargs={"needs": "no_package"})
    assert "needs the module 'no_package', which is not installed" in told
    told = message(name="Lobby-v0", kwargs={"needs": "sys"})
    assert "raised TypeError: 'int' object is not iterable (" in told and __file__ in told
    assert "does not accept one of its arguments" in message(name="Lobby-v0", kwargs={"sise": 3})


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_environment_that_raises_when_closed_is_used(corridor, mode, capsys):
    environment = gymnasium_environment(
        1, name=corridor, kwargs={"leaks": True}, vectorization_mode=mode
    )
    environment.reset()
    environment.close()
    assert f"warning: {corridor} raised when closed: RuntimeError" in capsys.readouterr().err


def test_a_wrapper_that_raises_while_it_is_built_is_named(corridor, tmp_path):
    told = message(name="Pendulum-v1", wrappers=("gymnasium.wrappers:RescaleAction",))
    start = "gymnasium_environment.wrappers: 'gymnasium.wrappers:RescaleAction' raised TypeError: "
    assert told.startswith(start) and "'min_action' and 'max_action'" in told
    told = message(name=corridor, wrappers=["corridor:Wrap"])
    assert "'corridor:Wrap' raised KeyError: 'door' (" in told and "corridor.py:" in told
    error = UserError("mind the step.")
    told = message(name=corridor, wrappers=[("corridor:Wrap", {"error": error})])
    assert told == "mind the step."
    (tmp_path / "torn.py").write_text("raise RuntimeError('torn')")
    told = message(name=corridor, wrappers=["torn:Paper"])
    assert told.startswith("gymnasium_environment.wrappers: 'torn:Paper' raised RuntimeError: torn")
    assert "torn.py:1" in told
    (tmp_path / "script.py").write_text("import sys\nsys.exit()")
    told = message(name=corridor, wrappers=["script:Paper"])
    assert told.startswith("gymnasium_environment.wrappers: 'script:Paper' raised SystemExit")


def test_rendering_gives_frames_and_leaves_the_rows_as_they_are():
    env = gymnasium_environment(1, name="CartPole-v1", num_envs=3, render=True)
    plain = gymnasium_environment(1, name="CartPole-v1", num_envs=1)
    given = drawn_actions(plain, 20)
    assert_same(run(env, given), run(plain, given))
    frame = env.render()
    assert (frame.shape, frame.dtype) == ((400, 600, 3), np.uint8)
    assert frame.std() > 0
    assert env.render_fps == 50


def test_rendering_is_refused_where_an_environment_draws_nothing(corridor):
    env = gymnasium_environment(1, name=corridor, render=True)
    env.reset()
    with pytest.raises(UserError, match="cannot render"):
        env.render()


def test_environments_of_others_have_a_thread_of_their_own(corridor):
    def has_thread(**kwargs):
        environment = gymnasium_environment(1, **kwargs)
        environment.close()
        return environment.episodes.vector.thread != 0

    assert has_thread(name=corridor)
    assert not has_thread(name=corridor, own_thread=False)
    assert not has_thread(name="CartPole-v1")
    assert has_thread(name="CartPole-v1", own_thread=True)
    assert has_thread(name="CartPole-v1", render=True)
    assert has_thread(name="FrozenLake-v1", wrappers=["gymnasium.wrappers:FlattenObservation"])


@gin.configurable
class ScaledReward(gymnasium.RewardWrapper):
    """Wrapper with a parameter that gin binds."""

    def __init__(self, env, scale=1.0):
        super().__init__(env)
        self.scale = scale

    def reward(self, reward):
        return self.scale * float(reward)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_gin_knows_what_wrappers_read_wherever_they_are_built(mode):
    gin.bind_parameter("ScaledReward.scale", 3.0)
    environment = gymnasium_environment(
        1, name="CartPole-v1", wrappers=[ScaledReward], vectorization_mode=mode
    )
    environment.reset()
    assert environment.step([1]).reward.numpy().tolist() == [3.0]
    assert "ScaledReward.scale = 3.0" in gin.operative_config_str()
    assert any("ScaledReward" in note for note in environment.notes)
    environment.close()
