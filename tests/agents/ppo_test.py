"""Tests of PPO against plain NumPy, and against TF-Agents' agent where that is right."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conftest import combinations
from gymnasium.spaces import Box, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_references import (
    FIRST,
    FOUR_ACTIONS,
    GO_ON,
    LAST,
    LOSE_LIFE,
    MID,
    TERMINATE,
    THREE_NUMBERS,
    TRUNCATE,
    TWO_MOTORS,
    Array,
    VecNormalize,
    as_float32,
    as_float64,
    assert_close,
    assert_same,
    bound,
    check_steps,
    check_train_applies_gradients,
    dense_layers,
    each_action_spec,
    env_steps,
    float64,
    random_events,
    random_rollout,
    random_sequences,
    randomize,
    specs,
    tensors,
    values_of,
)
from scripted_environments import ScriptedEnv, environment
from tf_agents.agents.ppo import ppo_agent as stock_ppo
from tf_agents.agents.ppo import ppo_clip_agent, ppo_utils
from tf_agents.networks import network
from tf_agents.trajectories import TimeStep, Trajectory, restart

from pipeline.acting.collect_driver import CollectDriver, initial_carry
from pipeline.agents.ppo import (
    PPOAgent,
    clipped_surrogate_loss,
    create_ppo_agent,
    standardize,
    value_loss,
)
from pipeline.networks.actor_critic import ActorCritic, OnPolicyInfo
from pipeline.ops.normalizers import RunningMoments
from pipeline.ops.randomness import stateless_seed
from pipeline.ops.schedules import linear_schedule
from pipeline.replay.rollout import Rollout

GAMMA, LAMBDA = 0.9, 0.8
ROWS = 48
SGD = tf.keras.optimizers.legacy.SGD


@pytest.fixture(autouse=True)
def small_networks() -> Iterator[None]:
    with bound({"mlp_encoder.units": (5,)}):
        yield


def create(action_spec=FOUR_ACTIONS, observation_spec=THREE_NUMBERS, **kwargs: Any) -> PPOAgent:
    settings = {
        "discount": GAMMA,
        "gae_lambda": LAMBDA,
        "num_envs": 1,
        "seed": 0,
        "env_steps": env_steps(),
    } | kwargs
    agent = create_ppo_agent(specs(observation_spec), action_spec, **settings)
    randomize(np.random.default_rng(7), agent.actor_critic.trainable_variables)
    return agent


def random_rows(
    rng: np.random.Generator, agent: PPOAgent, action_spec, events: Array, starts: Array
) -> Trajectory:
    """Returns training rows [B, T] that another policy might have collected."""
    rows = random_sequences(rng, action_spec, events, starts)
    observations = tf.constant(rows.observation.reshape(-1, 3))
    distribution, value = agent.actor_critic(observations)
    actions = rows.action.reshape(-1, *action_spec.shape)

    def near(values: tf.Tensor, scale: float) -> Array:
        noise = rng.normal(scale=scale, size=events.shape)
        return as_float32(values.numpy().reshape(events.shape) + noise)

    info = OnPolicyInfo(
        log_probability=near(distribution.log_prob(actions), 0.3),
        value=near(value, 0.5),
        advantage=as_float32(rng.normal(1.0, 2.0, events.shape)),
        value_target=near(value, 1.0),
    )
    return rows.replace(policy_info=info)


def batch_of_transitions(agent: PPOAgent, action_spec, seed: int = 0) -> Trajectory:
    rng = np.random.default_rng(seed)
    return random_rows(rng, agent, action_spec, np.full((ROWS, 1), GO_ON), np.full(ROWS, MID))


class StockNetwork(network.Network):
    """TF-Agents network that returns one of the two outputs of an actor-critic."""

    def __init__(self, actor_critic: ActorCritic, output: int):
        super().__init__(THREE_NUMBERS, (), f"output_{output}")
        self._actor_critic = actor_critic
        self._output = output

    def call(self, observation, step_type=None, network_state=(), training=False):
        return self._actor_critic(observation)[self._output], network_state


def stock_agent(agent: PPOAgent, action_spec, **kwargs: Any) -> ppo_clip_agent.PPOClipAgent:
    return ppo_clip_agent.PPOClipAgent(
        specs(),
        action_spec,
        optimizer=SGD(),
        actor_net=StockNetwork(agent.actor_critic, 0),
        value_net=StockNetwork(agent.actor_critic, 1),
        normalize_observations=False,
        normalize_rewards=False,
        **kwargs,
    )


def stock_loss(stock: ppo_clip_agent.PPOClipAgent, batch: Trajectory) -> Any:
    rows = tensors(tf.nest.map_structure(lambda x: x[:, 0], batch))
    info = rows.policy_info
    advantages = stock_ppo._normalize_advantages(info.advantage[tf.newaxis])[0]
    return stock.get_loss(
        TimeStep(rows.step_type, rows.reward, rows.discount, rows.observation),
        rows.action,
        info.log_probability,
        info.value_target,
        advantages,
        action_distribution_parameters={},
        weights=tf.ones(ROWS),
        train_step=stock.train_step_counter,
        debug_summaries=False,
        old_value_predictions=info.value,
    )


@pytest.mark.parametrize(
    ("action_spec", "value_clip"),
    combinations(
        (FOUR_ACTIONS, TWO_MOTORS), (None, 0.3), often=[(FOUR_ACTIONS, None), (TWO_MOTORS, 0.3)]
    ),
)
def test_loss_terms_equal_stock_ones(action_spec, value_clip: float | None) -> None:
    agent = create(
        action_spec, value_coefficient=0.7, entropy_coefficient=0.05, value_clip=value_clip
    )
    stock = stock_agent(
        agent,
        action_spec,
        importance_ratio_clipping=0.2,
        value_pred_loss_coef=0.7,
        entropy_regularization=0.05,
        value_clipping=value_clip or 0.0,
    )
    batch = batch_of_transitions(agent, action_spec)
    variables = agent.actor_critic.trainable_variables
    gradients, ours = agent.gradients(tensors(batch), tf.ones(ROWS))
    with tf.GradientTape() as tape:
        theirs = stock_loss(stock, batch)
    extra = theirs.extra
    assert_close(ours.extra["policy_loss"], extra.policy_gradient_loss)
    assert_close(0.7 * ours.extra["value_loss"], extra.value_estimation_loss)
    assert_close(-0.05 * ours.extra["entropy"], extra.entropy_regularization_loss)
    assert_close(ours.extra["clip_fraction"], extra.clip_fraction)
    assert 0.1 < extra.clip_fraction < 0.9
    distribution, _ = agent.actor_critic(batch.observation[:, 0])
    log_prob = distribution.log_prob(batch.action[:, 0])
    divergence = np.mean(batch.policy_info.log_probability[:, 0] - log_prob)
    assert_close(ours.extra["approximate_kl"], divergence, 1e-4)
    assert_close(ours.loss, theirs.loss)
    assert_close(gradients, tape.gradient(theirs.loss, variables), 1e-4)
    assert set(agent.loss_names) <= ours.extra.keys()


def test_clipped_surrogate_by_hand() -> None:
    ratios = np.array([0.5, 0.9, 1.0, 1.5, 0.5, 1.5])
    advantages = np.array([1.0, 1.0, 1.0, 1.0, -1.0, -1.0])
    loss, clipped = clipped_surrogate_loss(
        tf.constant(np.log(ratios)), tf.zeros(6, tf.float64), tf.constant(advantages), 0.2
    )
    assert_close(loss, np.array([-0.5, -0.9, -1.0, -1.2, 0.8, 1.5]))
    assert_same(clipped, as_float32([1, 0, 0, 1, 1, 1]))


def test_value_loss_by_hand() -> None:
    value, old = tf.constant([0.0, 1.0, 3.0, 3.0]), tf.constant([0.0, 0.9, 0.0, 0.0])
    target = tf.constant([2.0, 2.0, 4.0, 0.0])
    assert_close(value_loss(value, old, target, None), [4.0, 1.0, 1.0, 9.0])
    # Changes beyond 0.5 are clipped to 0.5, and the larger error counts.
    assert_close(value_loss(value, old, target, 0.5), [4.0, 1.0, 3.5**2, 9.0])


def test_clip_ratio_follows_environment_steps() -> None:
    steps = env_steps()
    schedule = linear_schedule(0.4, 0.0, num_steps=10)
    agent = create(env_steps=steps, clip_ratio=schedule, normalize_advantages=None)
    batch = batch_of_transitions(agent, FOUR_ACTIONS)
    distribution, _ = agent.actor_critic(tf.constant(batch.observation[:, 0]))
    log_prob = distribution.log_prob(batch.action[:, 0])
    train = tf.function(agent.gradients, autograph=False)
    for count, clip in ((0, 0.4), (5, 0.2), (9, 0.04)):
        steps.assign(count)
        ratio = np.exp(log_prob - batch.policy_info.log_probability[:, 0])
        expected = np.mean(np.abs(ratio - 1) > clip)
        assert_close(train(tensors(batch), tf.ones(ROWS))[1].extra["clip_fraction"], expected)


def boundary_batch(agent: PPOAgent, action_spec, seed: int) -> tuple[Trajectory, Array]:
    """Returns rows, some of which are boundary rows, and a mask of those."""
    rng = np.random.default_rng(seed)
    starts = rng.choice([FIRST, MID, LAST], ROWS)
    starts[0] = MID
    batch = random_rows(rng, agent, action_spec, random_events(rng, (ROWS, 1)), starts)
    return batch, starts == LAST


@each_action_spec
@pytest.mark.parametrize("seed", combinations(range(3), often=[(0,)]))
def test_boundary_rows_never_enter(action_spec, seed: int) -> None:
    """Checks that leaving them out changes nothing, also with standardised advantages."""
    agent = create(action_spec, entropy_coefficient=0.1)
    batch, boundary = boundary_batch(agent, action_spec, seed)
    assert boundary.any()
    info = batch.policy_info
    garbage = info._replace(
        advantage=np.where(boundary[:, None], 50.0, info.advantage),
        value_target=np.where(boundary[:, None], -50.0, info.value_target),
        log_probability=np.where(boundary[:, None], -5.0, info.log_probability),
    )
    batch = batch.replace(policy_info=tf.nest.map_structure(np.float32, garbage))
    kept = tf.nest.map_structure(lambda x: x[~boundary], batch)
    with_them = agent.gradients(tensors(batch), tf.ones(ROWS))
    without = agent.gradients(tensors(kept), tf.ones(int((~boundary).sum())))
    assert_close(with_them[0], without[0], 1e-4)
    for name in agent.loss_names:
        assert_close(with_them[1].extra[name], without[1].extra[name], 1e-4)


def test_stock_advantages_are_standardised_over_boundary_rows() -> None:
    values, weights = as_float32([1.0, 2.0, 3.0, 50.0]), as_float32([1, 1, 1, 0])
    ours = standardize(tf.constant(values), tf.constant(weights)).numpy()
    expected = (values[:3] - 2.0) / np.sqrt(2 / 3)
    assert_close(ours[:3], expected)
    stock = stock_ppo._normalize_advantages(tf.constant(values[None])).numpy()[0]
    assert abs(stock[:3] - expected).max() > 0.5


def test_a_single_advantage_stays_as_it_is() -> None:
    for values, weights in (([3.0], [1.0]), ([3.0, 50.0], [1.0, 0.0])):
        assert standardize(tf.constant(values), tf.constant(weights))[0] == 3.0


def test_stock_mask_drops_a_transition_without_reward() -> None:
    agent = create(normalize_advantages=None)
    batch = batch_of_transitions(agent, FOUR_ACTIONS)
    zeros = np.zeros((ROWS, 1), np.float32)
    batch = batch.replace(
        policy_info=batch.policy_info._replace(advantage=zeros, value_target=zeros)
    )
    _, loss_info = agent.gradients(tensors(batch), tf.ones(ROWS))
    _, value = agent.actor_critic(tf.constant(batch.observation[:, 0]))
    assert_close(loss_info.extra["value_loss"], np.mean(value**2))
    as_stock = batch.replace(policy_info={"return": zeros, "advantage": zeros})
    assert not np.any(ppo_utils.make_trajectory_mask(tensors(as_stock)))


def reference_advantages(rows: Trajectory, final_value: float, rewards: Array) -> Array:
    """Returns the advantages [T] of one environment, as sums over each transition's future."""
    values, num_rows = np.append(as_float64(rows.policy_info.value), final_value), len(rewards)
    advantages = np.zeros(num_rows)
    for start in range(num_rows):
        if rows.step_type[start] == LAST:
            continue
        t, weight = start, 1.0
        while True:
            over = rows.discount[t] == 0.0
            future = 0.0 if over else GAMMA * values[t + 1]
            advantages[start] += weight * (rewards[t] + future - values[t])
            weight *= GAMMA * LAMBDA
            t += 1
            if over or t == num_rows or rows.step_type[t] == LAST:
                break
    return advantages


def collected_rows(rng: np.random.Generator, agent: PPOAgent, num_steps: int, num_envs: int):
    """Returns rows [T, N] as the driver collects them, and the time step after them."""
    rows = random_rollout(rng, FOUR_ACTIONS, num_steps, num_envs)
    log_probability = as_float32(rng.normal(size=(num_steps, num_envs)))
    value = agent.actor_critic.value(tf.constant(rows.observation.reshape(-1, 3)))
    info = OnPolicyInfo(log_probability, value.numpy().reshape(num_steps, num_envs))
    final = restart(tf.constant(as_float32(rng.normal(size=(num_envs, 3)))), num_envs)
    return rows.replace(policy_info=info), final


def value_by_hand(agent: PPOAgent, observation: Array) -> Array:
    actor_critic = agent.actor_critic
    variables = [*actor_critic.value_encoder.variables, *actor_critic.value_head.variables]
    return dense_layers(as_float64(observation), float64(variables))[..., 0]


def test_prepare_computes_advantages_over_all_that_can_happen() -> None:
    agent, seen = create(), set()
    for seed in range(20):
        rng = np.random.default_rng(seed)
        rows, final = collected_rows(rng, agent, 9, 3)
        prepared = agent.prepare(tensors(rows), final)
        final_value = value_by_hand(agent, final.observation.numpy())
        assert_close(rows.policy_info.value, value_by_hand(agent, rows.observation))
        for env in range(3):
            one = tf.nest.map_structure(lambda x, env=env: x[:, env], rows)
            expected = reference_advantages(one, final_value[env], one.reward)
            assert_close(prepared.policy_info.advantage[:, env], expected)
            target = expected + one.policy_info.value
            assert_close(prepared.policy_info.value_target[:, env], target)
        seen |= set(
            zip(rows.step_type.flat, rows.next_step_type.flat, rows.discount.flat, strict=True)
        )
        assert_same(prepared.policy_info.log_probability, rows.policy_info.log_probability)
        assert_same(prepared.observation, rows.observation)
    assert {(MID, LAST, 0.0), (MID, LAST, 1.0), (MID, MID, 0.0), (LAST, FIRST, 1.0)} <= seen


untrained_agent = functools.cache(create)


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), event=st.sampled_from([TERMINATE, LOSE_LIFE, TRUNCATE]))
def test_what_comes_after_an_end_changes_no_advantage_before_it(seed: int, event: int) -> None:
    rng = np.random.default_rng(seed)
    agent = untrained_agent()
    events = np.array([[GO_ON, GO_ON, event, GO_ON, GO_ON, GO_ON]])
    rows = random_sequences(rng, FOUR_ACTIONS, events, np.array([FIRST]))
    rows = tf.nest.map_structure(lambda x: np.swapaxes(x, 0, 1), rows)
    value = as_float32(rng.normal(size=(6, 1)))
    rows = rows.replace(policy_info=OnPolicyInfo(np.zeros_like(value), value))
    advantages = []
    # The final observation of a truncated episode, in row 3, still belongs to the episode.
    first_after = 4 if event == TRUNCATE else 3
    for shift in (0.0, 100.0):
        after = np.arange(6)[:, None] >= first_after
        info = OnPolicyInfo(np.zeros_like(value), as_float32(value + shift * after))
        changed = rows.replace(
            reward=as_float32(rows.reward + shift * (np.arange(6)[:, None] >= 3)), policy_info=info
        )
        final = restart(tf.fill([1, 3], shift), 1)
        advantages.append(agent.prepare(tensors(changed), final).policy_info.advantage[:3])
    assert_same(advantages[0], advantages[1])


def test_returns_set_the_scale_of_rewards() -> None:
    agent = create(num_envs=2, normalize_returns=True)
    rows, final = collected_rows(np.random.default_rng(0), agent, 30, 2)
    rows = rows.replace(reward=3 * rows.reward)
    scaled = VecNormalize(2, GAMMA).scale(rows.reward, rows.discount, rows.step_type)
    final_value = value_by_hand(agent, final.observation.numpy())
    prepared = agent.prepare(tensors(rows), final)
    for env in range(2):
        one = tf.nest.map_structure(lambda x, env=env: x[:, env], rows)
        expected = reference_advantages(one, final_value[env], np.clip(scaled[:, env], -10, 10))
        assert_close(prepared.policy_info.advantage[:, env], expected, 1e-4)
    assert_same(prepared.reward, rows.reward)


class Loop:
    """Iteration of the train loop on scripted environments, divided into its calls."""

    def __init__(self, action_space: Any):
        episodes = [(3, "terminated"), (7, "truncated")]
        self.environment = environment(*(ScriptedEnv(episodes, action_space) for _ in range(2)))
        self.agent = create(
            self.environment.action_spec(),
            self.environment.time_step_spec().observation,
            num_envs=2,
            optimizer=SGD,
            learning_rate=0.05,
        )
        self.driver = CollectDriver(self.environment, seed=0)
        self.carry = initial_carry(self.environment, self.agent.collect_policy)
        self.rollout = Rollout(
            self.agent.collect_data_spec,
            2,
            training_spec=self.agent.training_data_spec,
            seed=0,
            num_steps=16,
            minibatch_size=8,
            num_epochs=2,
        )

    def collect(self) -> Trajectory:
        self.carry, rows = self.driver.run(self.agent.collect_policy, self.carry, 16)
        self.rollout.add(tf.range(2), rows)
        return rows

    def begin(self) -> None:
        self.rollout.begin(lambda rows: self.agent.prepare(rows, self.carry.time_step))

    def ratio(self) -> Array:
        """Returns pi_new / pi_old for the next minibatch."""
        batch, _, _ = self.rollout.next_batch()
        distribution, _ = self.agent.actor_critic(batch.observation[:, 0])
        log_prob = distribution.log_prob(batch.action[:, 0])
        return np.exp(log_prob - batch.policy_info.log_probability[:, 0])

    @property
    def moments(self) -> RunningMoments:
        normalizer = self.agent.actor_critic.normalizer
        assert normalizer is not None
        (moments,) = normalizer.moments
        assert moments is not None
        return moments


@pytest.fixture(
    params=[
        pytest.param(Discrete(2), id="discrete", marks=pytest.mark.crash),
        pytest.param(Box(-1.0, 1.0, (2,), np.float32), id="box"),
    ]
)
def loop(request):
    with bound({"mlp_encoder.units": (5,), "ActorCritic.normalize_observations": True}):
        built = Loop(request.param)
    yield built
    built.environment.close()


def test_statistics_move_in_finish_alone_so_the_ratio_is_one_before_an_update(loop: Loop) -> None:
    seen = np.zeros((0, 2))
    for _ in range(2):
        before = values_of(loop.moments.variables)
        rows = loop.collect()
        loop.begin()
        for _ in range(4):
            assert_close(loop.ratio(), np.ones(8), 2e-6)
        for _ in range(loop.rollout.num_batches - 4):
            batch, weights, _ = loop.rollout.next_batch()
            loop.agent.train(batch, weights)
        assert_same(values_of(loop.moments.variables), before)
        loop.rollout.end(loop.agent.finish)
        transitions = rows.observation.numpy()[rows.step_type.numpy() != LAST]
        seen = np.concatenate([seen, transitions])
        assert_close(loop.moments.mean, seen.mean(0), 1e-9)
        assert_close(loop.moments.variance, seen.var(0), 1e-9)
    # An early update of the statistics would change the ratio.
    rows = loop.collect()
    loop.begin()
    loop.agent.finish(rows)
    assert np.max(abs(loop.ratio() - 1)) > 1e-3


@pytest.mark.parametrize(
    "action_spec", combinations((FOUR_ACTIONS, TWO_MOTORS), often=[(FOUR_ACTIONS,)])
)
def test_gradients_change_nothing_and_train_applies_them(action_spec) -> None:
    first, second = create(action_spec), create(action_spec)
    check_train_applies_gradients(first, second, boundary_batch(first, action_spec, 0)[0])


def test_a_step_follows_the_schedule_and_the_clipped_gradient() -> None:
    check_steps(create, batch_of_transitions(create(), FOUR_ACTIONS))


@each_action_spec
def test_the_policy_is_the_mode_of_what_collects(action_spec) -> None:
    agent = create(action_spec)
    time_step = restart(tf.constant(as_float32(np.random.default_rng(0).normal(size=(9, 3)))), 9)
    step = agent.collect_policy.action(time_step, (), stateless_seed(5, tf.constant(0, tf.int64)))
    distribution, value = agent.actor_critic(time_step.observation)
    assert_same(agent.policy.action(time_step).action, distribution.mode())
    assert_same(step.info.log_probability, distribution.log_prob(step.action))
    assert_same(step.info.value, value)
