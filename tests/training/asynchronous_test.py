"""Tests of asynchronous actors, in threads and in turns."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import gin
import gymnasium
import numpy as np
import pytest
import tensorflow as tf
from host_loops import PLAN, Chunks, Run, actor_threads
from tf_agents.trajectories import StepType
from tiny_runs import Walk, assert_same, bindings, build_components, gin_files

from pipeline import configuration
from pipeline.acting import collect_driver
from pipeline.acting.episode_statistics import initial_statistics, merge_statistics
from pipeline.checkpointing.exactness import Exactness
from pipeline.environments.gymnasium_envs import gymnasium_environment
from pipeline.ops.randomness import stream_key
from pipeline.training import asynchronous_actors
from pipeline.training.asynchronous import actor_epsilon, asynchronous_runner
from pipeline.training.asynchronous_actors import split_state
from pipeline.training.train_loop import train
from pipeline.utils.errors import UserError
from pipeline.utils.shutdown import Stopped

pytestmark = pytest.mark.usefixtures("collect_loops")

THREADS: dict = {"asynchronous_runner__scheduler": "threads"}
ONE: dict = {"asynchronous_runner__num_actors": 1}


class Training(Chunks):
    """Chunks of actors whose graphs are traced."""

    def __init__(self, algorithm="a3c", **overrides):
        super().__init__(algorithm, **overrides)
        self.train(0, 0)


class Alone(NamedTuple):
    """Trainings of one actor for 150 environment steps, which tests share.

    Tests may train `turns` on, but no more than that: only graphs and snapshots are compared.

    Attributes:
      turns: Training without threads and locks, in chunks of one iteration.
      locked: Training in a thread with a lock, in one chunk; its environment is closed.
      snapshots: What each of them held after 150 environment steps.
      lengths: Environment steps of each iteration of `turns`.
    """

    turns: Training
    locked: Training
    snapshots: Sequence[dict]
    lengths: Sequence[int]


@pytest.fixture(scope="module")
def alone():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collect_driver, "_MAX_UNROLLED_STEPS", 8)  # as in training
        trained = train_alone()
    yield trained
    trained.turns.runner.close()


def train_alone():
    turns = Training(**ONE)
    locked = Training(**ONE, **THREADS, asynchronous_runner__use_locking=True)
    counts = [turns.env_steps]
    while counts[-1] < 150:
        turns.train(1, 150)
        counts.append(turns.env_steps)
    locked.train(10**6, 150)
    snapshots = [turns.snapshot(), locked.snapshot()]
    locked.runner.close()  # other tests count threads
    return Alone(turns, locked, snapshots, np.diff(counts).tolist())


def test_one_actor_learns_the_same_bits_in_turns_and_in_a_thread_with_a_lock(alone):
    assert_same(*alone.snapshots)
    assert int(alone.turns.parts.agent.train_step_counter) > 5


def test_a_rollout_ends_with_the_episode(alone):
    # Episodes have 7 and 11 steps, rollouts 5 rows.
    assert alone.lengths[:8] == [5, 2, 5, 5, 1, 5, 2, 5]


def test_a_lock_is_held_until_all_weights_are_copied_and_all_are_updated(alone):
    training = alone.locked
    nodes = nodes_of_iteration(training)
    releases = [name for name, node in nodes.items() if node.op == "ConsumeMutexLock"]
    waited = [Counter(nodes[x].op for x in ancestors(nodes, name)) for name in releases]
    num_weights = len(tf.nest.flatten(training.parts.agent.gradient_variables()))
    copied, updated = sorted(waited, key=len)
    assert copied["AssignVariableOp"] >= num_weights + 1
    assert updated["ResourceApplyRMSProp"] == num_weights


def test_no_step_of_an_environment_begins_before_the_weights_are_copied_and_counted(alone):
    training = alone.turns
    nodes = nodes_of_iteration(training)
    # A step is conditional, because it is left out once the episode has ended.
    steps = [name for name, node in nodes.items() if node.op == "If"]
    assert len(steps) > training.runner.collect_steps
    num_copies = len(tf.nest.flatten(training.parts.agent.gradient_variables())) + 1
    for name in steps:
        assigned = [x for x in ancestors(nodes, name) if nodes[x].op == "AssignVariableOp"]
        assert len(assigned) >= num_copies, name


def nodes_of_iteration(training):
    """Returns the nodes of the only actor's iteration, by name."""
    (actor,) = training.runner.actors
    (concrete,) = actor.train._list_all_concrete_functions()
    bodies = concrete.graph.as_graph_def().library.function
    return max(({node.name: node for node in body.node_def} for body in bodies), key=len)


def ancestors(nodes, name):
    """Returns the names of the nodes of a function's body that must run before this one."""
    found, queue = set(), [name]
    while queue:
        for source in nodes[queue.pop()].input:
            source = source.removeprefix("^").partition(":")[0]
            if source in nodes and source not in found:
                found.add(source)
                queue.append(source)
    return found


@pytest.mark.crash
def test_turns_do_not_depend_on_how_chunks_are_cut_and_each_graph_is_traced_once(
    monkeypatch,
):
    whole, cut = Training("async_nstep_q"), Training("async_nstep_q")
    whole.train(10**6, 150)
    monkeypatch.setattr(asynchronous_actors, "Carry", None)  # states are split and joined by graphs
    while cut.env_steps < 150:
        cut.train(1, 150)
    assert_same(whole.snapshot(), cut.snapshot())
    for actor in (*whole.runner.actors, *cut.runner.actors):
        assert actor.train.experimental_get_tracing_count() == 1


@pytest.fixture(scope="module")
def two():
    """Returns a training of A3C's actors in turns, with which a single test may train."""
    training = Training()
    yield training
    training.parts.close()


def order_in_round(number):
    """Returns the order in which two actors take their turns in a round."""
    return np.random.default_rng(stream_key(1, "turns", number)).permutation(2)


def test_actors_act_with_copies_of_the_weights(two):
    shared, copies = two.parts.agent, [x.agent for x in two.runner.actors]
    before = weights_of(shared)
    two.train(1, 10**6)
    assert not all(map(np.array_equal, before, weights_of(shared)))
    # The first actor to move began with the earlier weights, and still has them.
    has_earlier = [all(map(np.array_equal, before, weights_of(copy))) for copy in copies]
    first, _ = order_in_round(0)
    assert [number for number, earlier in enumerate(has_earlier) if earlier] == [first]
    assert int(shared.train_step_counter) == 2
    assert [int(agent.train_step_counter) for agent in copies] == [0, 0]


def weights_of(agent):
    return [v.numpy() for v in agent.gradient_variables()]


@pytest.mark.parametrize(
    ("algorithm", "accumulate", "use_locking"),
    [pytest.param("a3c", 1, True, marks=pytest.mark.crash), ("async_nstep_q", 5, False)],
)
def test_threads_lose_no_environment_step_and_no_update(
    algorithm, accumulate, use_locking, monkeypatch
):
    taken, lock, step = [0], threading.Lock(), Walk.step

    def counted(self, action):
        with lock:
            taken[0] += 1
        return step(self, action)

    monkeypatch.setattr(Walk, "step", counted)
    chosen = {"num_actors": 2, "use_locking": use_locking, "scheduler": "threads"}
    training = Training(algorithm, **{f"asynchronous_runner__{k}": v for k, v in chosen.items()})
    for until in (300, 700, 1_500):
        training.train(10**6, until)
        assert training.env_steps == taken[0] == int(training.parts.env_steps)
        assert until <= training.env_steps < until + 2 * 5
    updates = int(training.parts.agent.train_step_counter)
    counts = training.runner.measurements()["staleness_counts"]
    assert sum(counts) == updates
    rollouts_waiting = int(training.state.loss_count) - updates * accumulate
    assert 0 <= rollouts_waiting <= 2 * (accumulate - 1)
    for actor in training.runner.actors:
        assert actor.train.experimental_get_tracing_count() == 1
    training.runner.close()


def test_staleness_counts_the_updates_of_others_since_the_copy(alone, monkeypatch):
    agent, runner = alone.turns.parts.agent, alone.turns.runner
    runner.actors[0].staleness.assign(tf.zeros_like(runner.actors[0].staleness))
    zeros = [tf.zeros_like(v) for v in agent.gradient_variables()]
    vector = runner.environments[0].episodes.vector
    step, by_others = vector.step, list[list[tf.Tensor]]()

    def step_beside_others(*arguments):
        while by_others:
            agent.apply(by_others.pop())
        return step(*arguments)

    monkeypatch.setattr(vector, "step", step_beside_others)
    for number in (0, 3, 3, 100):
        by_others += [zeros] * number
        alone.turns.train(1, 10**6)
    measured = runner.measurements()
    assert len(measured["staleness_counts"]) == 64
    assert {i: n for i, n in enumerate(measured["staleness_counts"]) if n} == {0: 1, 3: 2, 63: 1}
    assert measured["staleness_mean"] == (0 + 3 + 3 + 63) / 4


class Pendular(gymnasium.Env):
    """Environment for `simulated` with two features and two actions; its state ends episodes."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._place, self._time = self.np_random.normal(size=2), 0
        return np.float32(self._place), {}

    def step(self, action):
        turn = (
            np.array([[0.9, -0.3], [0.3, 0.9]]) if action else np.array([[0.8, 0.5], [-0.5, 0.8]])
        )
        self._place, self._time = turn @ self._place, self._time + 1
        reward = float(self._place[0])
        return np.float32(self._place), reward, abs(reward) > 1.5, self._time == 9, {}


gymnasium.register("Pendular-v0", entry_point="asynchronous_test:Pendular")

LINEAR = {
    "gymnasium_environment__name": "Pendular-v0",
    "gymnasium_environment__kwargs": {},
    "mlp_encoder__units": (),
    "create_nstep_q_agent__epsilon": 0.0,
    "create_nstep_q_agent__gradient_clip_norm": None,
    "rate/linear_schedule__initial": 0.02,
    "rate/linear_schedule__final": 0.0,
    "rate/linear_schedule__num_steps": 400,
    "create_nstep_q_agent__target_update_env_steps": 23,
}


class Linear:
    """Linear Q-function, w x + b, with RMSProp in float64."""

    def __init__(self, weights):
        self.weights = [np.float64(w) for w in weights]
        self.squares = [np.zeros_like(w) for w in self.weights]

    @staticmethod
    def values(weights, x):
        return x @ weights[0] + weights[1]

    def apply(self, gradients, rate, rho=0.99, epsilon=1e-5):
        for weight, square, gradient in zip(self.weights, self.squares, gradients, strict=True):
            square *= rho
            square += (1 - rho) * gradient**2
            weight -= rate * gradient / np.sqrt(square + epsilon)


class LonelyActor:
    """Actor that acts greedily for 5 rows or to an episode's end, and returns its transitions."""

    def __init__(self, environment):
        self.environment = environment
        self.now = environment.reset()

    def step(self, action):
        self.now = self.environment.step(
            tf.constant([action], self.environment.action_spec().dtype)
        )

    def rollout(self, weights):
        if self.now.is_last():
            self.step(0)  # the reset
        rows: list = []
        while len(rows) < 5 and not self.now.is_last():
            x = self.now.observation.numpy()[0]
            action = int(np.argmax(Linear.values(weights, x)))
            self.step(action)
            rows.append((x, action, float(self.now.reward[0]), 0.99 * float(self.now.discount[0])))
        return rows, self.now.observation.numpy()[0]


def simulated(learner, actors, num_rounds, one_step, accumulate):
    """Simulates Algorithms 1 and S2 in turns, with the squared loss averaged over an update."""
    target, copied_at, env_steps = [w.copy() for w in learner.weights], 0, 0
    waiting: list = [[] for _ in actors]
    for number in range(num_rounds):
        for index in order_in_round(number):
            copy = [w.copy() for w in learner.weights]
            if not waiting[index] and env_steps // 23 > copied_at // 23:
                target, copied_at = [w.copy() for w in learner.weights], env_steps
            rows, last = actors[index].rollout(copy)
            waiting[index].append((len(rows), summed(copy, target, rows, last, one_step)))
            if len(waiting[index]) == accumulate:
                counts, gradients = zip(*waiting[index], strict=True)
                means = [sum(parts) / sum(counts) for parts in zip(*gradients, strict=True)]
                learner.apply(means, rate=0.02 * (1 - env_steps / 400))
                waiting[index] = []
            env_steps += len(rows)
    return env_steps


def summed(weights, target, rows, after, one_step):
    """Returns the sum of the gradients of half the squared errors of a rollout."""
    gradients, value = [np.zeros_like(w) for w in weights], None
    for x, action, reward, discount in reversed(rows):
        if value is None or one_step:
            value = np.max(Linear.values(target, after))
        value = reward + discount * value
        error = Linear.values(weights, x)[action] - value
        gradients[0][:, action] += error * x
        gradients[1][action] += error
        after = x
    return gradients


@pytest.mark.parametrize(
    ("one_step", "accumulate"),
    [(True, 1), (False, 3), pytest.param(False, 1, marks=pytest.mark.crash)],
)
def test_turns_equal_a_simulation_in_numpy_with_one_target_network(one_step, accumulate):
    training = Training(
        "async_nstep_q",
        **LINEAR,
        create_nstep_q_agent__one_step=one_step,
        create_nstep_q_agent__accumulate_updates=accumulate,
    )
    weights = training.parts.agent.q_network.trainable_variables
    before = [w.numpy() for w in weights]
    learner = Linear([w.copy() for w in before])
    keys = [stream_key(1, "actor", number) for number in range(2)]
    actors = [
        LonelyActor(gymnasium_environment(stream_key(key, "training"), num_envs=1)) for key in keys
    ]
    target = training.parts.agent.target_q_network
    assert all(actor.agent.target_q_network is target for actor in training.runner.actors)
    at_start = target.get_weights()
    training.train(2, 10**6)  # copied every 23 steps
    assert 10 < training.env_steps < 23
    assert all(map(np.array_equal, at_start, target.get_weights()))
    training.train(29, 10**6)
    assert not all(map(np.array_equal, at_start, target.get_weights()))
    env_steps = simulated(learner, actors, 31, one_step, accumulate)
    assert env_steps == training.env_steps > 200
    for ours, reference in zip(weights, learner.weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), reference, rtol=2e-4, atol=2e-5)
    assert all(np.abs(w - b).max() > 0.01 for w, b in zip(learner.weights, before, strict=True))


@pytest.mark.parametrize(
    "scheduler", ["threads", pytest.param("deterministic", marks=pytest.mark.crash)]
)
def test_an_actor_that_raises_ends_the_run_with_its_message(tmp_path, monkeypatch, scheduler):
    chosen = {"asynchronous_runner__scheduler": scheduler}
    # Threads may leave all steps of a short run to the other actor.
    run = Run(tmp_path / "run", PLAN._replace(num_env_steps=10**6), "a3c", **chosen)
    failing, _ = run.parts.runner.environments
    failed_at = []

    def fail(*arguments):
        failed_at.append(int(run.parts.env_steps))
        no_such_room()

    run.at(130, lambda: setattr(failing.episodes.vector, "step", fail))
    with pytest.raises(UserError) as error:
        run.train()
    newest = run.checkpoints[-1]
    assert "tiny_runs:Walk-v0 raised KeyError" in str(error.value)
    assert f"{newest} is intact" in str(error.value)
    # What the other actor did since is not saved.
    assert int(newest.removeprefix("step-")) <= failed_at[0]
    run.close()
    assert not actor_threads()

    resumed = Run(tmp_path / "run", PLAN, "a3c", **chosen)
    assert resumed.loop.restore()
    assert resumed.loop.env_steps == int(newest.removeprefix("step-"))
    result = resumed.loop.train()
    assert result["env_steps"] >= PLAN.num_env_steps
    assert result["scheduler"] == scheduler
    assert result["num_actors"] == 2
    assert resumed.metrics
    for record in resumed.metrics:
        assert sum(record["staleness_counts"]) == record["updates"]
    resumed.close()
    assert not actor_threads()


def no_such_room(*arguments) -> NoReturn:
    raise KeyError("no such room")


def test_where_one_environment_cannot_go_on_all_begin_new_episodes(tmp_path, monkeypatch):
    run = Run(tmp_path / "run", PLAN, "a3c")
    run.train_until(130)
    first, second = run.parts.runner.environments
    cross = first.episodes.cross

    def cross_without_steps(call, *args):
        steps = getattr(call, "__name__", "") == "step"
        return cross(no_such_room if steps else call, *args)

    with monkeypatch.context() as patch:
        patch.setattr(first.episodes, "cross", cross_without_steps)
        run.loop.restore()
    resets = first.episodes.resets, second.episodes.resets
    carry = run.loop.state.carry
    assert (carry.time_step.step_type.numpy() == StepType.LAST).all()
    run.go_on()
    assert (first.episodes.resets, second.episodes.resets) == (resets[0] + 1, resets[1] + 1)
    lengths = run.loop.state.carry.statistics.last_lengths.numpy()
    assert set(lengths[lengths > 0]) == {7, 11}
    run.close()


def test_a_stop_takes_less_than_two_seconds_and_nan_of_one_environment_afterwards_is_named(
    tmp_path,
):
    plan = PLAN._replace(num_env_steps=10**6)
    run = Run(tmp_path / "run", plan, "async_nstep_q", **THREADS)
    asked = []

    def ask():
        run.stop.requested = True
        asked.append(time.monotonic())

    timer = threading.Timer(1.5, ask)

    def start():
        if not timer.ident:
            timer.start()

    run.at(40, start)
    with pytest.raises(Stopped):
        run.train()
    assert time.monotonic() - asked[0] < 2
    assert actor_threads()

    # NaN reaches the other actor too, by the weights that it has broken.
    _, environment = run.parts.runner.environments
    step = environment.episodes.vector.step

    def with_nan(*arguments):
        outcome = step(*arguments)
        return outcome._replace(reward=outcome.reward * np.nan)

    environment.episodes.vector.step = with_nan
    with pytest.raises(UserError, match="NaN or infinite after .* updates: reward of"):
        run.go_on()
    run.close()
    assert not actor_threads()


def test_an_actor_s_final_epsilon_is_drawn_from_its_own_seed_with_the_paper_s_probabilities():
    late = tf.constant(10**9, tf.int64)
    parts = build_components("async_nstep_q", asynchronous_runner__num_actors=8)
    final = [float(actor.agent.schedules["epsilon"](late)) for actor in parts.runner.actors]
    keys = [stream_key(stream_key(1, "actor", number), "epsilon") for number in range(8)]
    drawn = [np.random.default_rng(key).choice([0.1, 0.01, 0.5], p=[0.4, 0.3, 0.3]) for key in keys]
    assert set(drawn) == {0.1, 0.01, 0.5}
    assert final == pytest.approx(drawn)
    assert float(parts.agent.schedules["epsilon"](late)) == pytest.approx(np.mean(drawn))


def test_the_mean_epsilon_is_that_of_no_actor():
    assert actor_epsilon() == pytest.approx(0.4 * 0.1 + 0.3 * 0.01 + 0.3 * 0.5)
    assert actor_epsilon((0.3,) * 3, (0.3333333,) * 3) == pytest.approx(0.3)
    for wrong in ((0.5, 0.4, 0.3), (1.5, -0.5, 0.0), (0.5, 0.5)):
        with pytest.raises(UserError, match="actor_epsilon.*must be in"):
            actor_epsilon(probabilities=wrong)
    with pytest.raises(UserError, match="must be in"):
        actor_epsilon(values=(0.1, 0.2, 3.0))


def run_bound(**kwargs):
    bound = gin.get_bindings(train)
    creators = [bound[f"create_{name}"] for name in ("environment", "agent", "experience")]
    return asynchronous_runner(1, *creators, **kwargs)


@pytest.mark.parametrize("algorithm", ["ppo", "dqn", "trpo"])
def test_other_agents_are_refused(algorithm):
    configuration.load(gin_files(algorithm), bindings(algorithm))
    with pytest.raises(UserError, match="learn from the gradients of whole rollouts"):
        run_bound()


def test_threads_are_refused_where_gradients_would_pass_through_python(monkeypatch):
    configuration.load(gin_files("a3c"), bindings("a3c"))
    monkeypatch.setattr(tf.config, "functions_run_eagerly", lambda: True)
    with pytest.raises(UserError, match="cannot run with --eager: leave it out, or bind"):
        run_bound(scheduler="threads")


def test_another_number_of_actors_is_told(tmp_path, alone, two):
    alone.turns.parts.experience.save(tmp_path)
    with pytest.raises(ValueError, match="saved with 1 actors, this run has 2"):
        two.parts.experience.restore(tmp_path)


def test_threads_are_refused_where_an_exact_resume_is_required(alone):
    exactness = Exactness(require_exact=True)
    exactness.check_runner(alone.turns.runner.is_repeatable)
    with pytest.raises(UserError, match="actors in threads.* cannot be resumed exactly"):
        exactness.check_runner(alone.locked.runner.is_repeatable)


def test_the_window_takes_the_newest_episodes_of_each_actor_after_earlier_ones():
    def played(*lengths):
        statistics = initial_statistics(1)
        padded = [0] * (100 - len(lengths)) + list(lengths)
        return statistics._replace(
            last_lengths=tf.constant(padded, tf.int64),
            last_returns=tf.constant(padded, tf.float32) * 2,
            return_sum=tf.constant(2.0 * sum(lengths), tf.float64),
        )

    before = played(*range(101, 201))
    merged = merge_statistics([played(1, 2, 3), played(), played(10, 20)], before)
    assert float(merged.return_sum) == 2 * 36
    window = merged.last_lengths.numpy()
    assert window.tolist() == [*range(106, 201), 1, 2, 10, 3, 20]
    np.testing.assert_array_equal(merged.last_returns, 2.0 * window)
    assert merge_statistics([played(7)], played()).last_lengths.numpy().tolist() == [0] * 99 + [7]


@pytest.mark.parametrize(
    ("algorithm", "overrides", "message"),
    [
        ("a3c", {"asynchronous_runner__scheduler": "fast"}, "scheduler = 'fast'"),
        ("a3c", {"asynchronous_runner__num_actors": 0}, "num_actors = 0"),
        ("a3c", {"ActorCritic__normalize_observations": True}, "share weights but not statistics"),
        ("a3c", {"create_a2c_agent__normalize_returns": True}, "share weights but not statistics"),
        ("a3c", {"Rollout__num_epochs": 2}, "one update of a whole rollout"),
    ],
)
def test_messages(algorithm, overrides, message):
    with pytest.raises(UserError, match=message):
        build_components(algorithm, **overrides)


def test_what_is_split_is_what_the_actors_go_on_from(two):
    def numbered(tensor):
        numbers = tf.reshape(tf.range(1, tf.size(tensor) + 1), tf.shape(tensor))
        return tf.cast(numbers, tensor.dtype)

    state = tf.nest.map_structure(numbered, two.runner.initial_state())
    carry = state.carry
    for number, own in enumerate(split_state(state)):
        assert own.carry.vector_steps == carry.vector_steps[number]
        assert own.carry.statistics.episode_return == carry.statistics.episode_return[number]
        np.testing.assert_array_equal(
            own.carry.time_step.observation[0], carry.time_step.observation[number]
        )
        counted = (own.carry.statistics.env_steps, own.loss_count, own.collect_seconds)
        assert all(float(x) == 0 for x in counted)
