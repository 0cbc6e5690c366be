import contextlib
from unittest import mock

import pytest
import tensorflow as tf
from graph_operations import operations, stateful_draws, stateless_draws
from host_loops import Chunks
from tensorflow.python.eager import context
from tf_agents.agents.tf_agent import LossInfo
from tiny_runs import assert_same

from pipeline.training.iteration import clear_losses

# Updates per batch: gradients of 5 batches are accumulated, or a batch is a whole rollout, which
# makes one step of the policy and 2 epochs of 4 minibatches.
ALGORITHMS = {"dqn": 1, "ppo": 1, "sac": 1, "a2c": 1 / 5, "nstep_q": 1 / 5, "trpo": 1 + 2 * 4}


RARELY_CUT = ("sac", "a2c", "nstep_q", "trpo")
NORMALIZED = {
    name: {f"create_{name}_agent__normalize_observations": True}
    for name in ("dqn", "sac", "nstep_q")
}
CONTINUOUS = {"gymnasium_environment__name": "Pendulum-v1", "gymnasium_environment__kwargs": {}}


@contextlib.contextmanager
def repeatable(run):
    """Checks the graphs of the training that runs inside: they give the same bits again.

    No AddN has three or more inputs: the order of such a sum, and with it the bits, depends on the
    timing of other operations. Nothing is drawn from a state, which no checkpoint would hold.
    """
    context.enable_run_metadata()
    try:
        yield
        graphs = context.export_run_metadata().function_graphs
    finally:
        context.disable_run_metadata()
    optimized = [graph.post_optimization_graph for graph in graphs]
    functions = [function for graph in optimized for function in graph.library.function]
    nodes = [node for graph in optimized for node in graph.node]
    nodes += [node for function in functions for node in function.node_def]
    assert "MatMul" in {node.op for node in nodes}
    sums = {node.name: node.attr["N"].i for node in nodes if node.op == "AddN"}
    assert {name: inputs for name, inputs in sums.items() if inputs > 2} == {}
    warm_ups = [run.runner.collect_randomly] * run.parts.experience.keeps_rows
    for chunk in (run.runner.train, *warm_ups):
        (concrete,) = chunk._list_all_concrete_functions()
        assert stateless_draws(concrete.graph) and not stateful_draws(concrete.graph)
        has_updates = any(name.startswith("ResourceApply") for name in operations(concrete.graph))
        assert has_updates == (chunk == run.runner.train)


# The next test checks the others.
@pytest.mark.parametrize(
    ("algorithm", "bound"),
    [(name, NORMALIZED.get(name, {})) for name in RARELY_CUT]
    + [("ppo", CONTINUOUS)]
    + [pytest.param(name, CONTINUOUS, marks=pytest.mark.crash) for name in ("a2c", "trpo")],
)
def test_training_is_repeatable(algorithm, bound):
    run = Chunks(algorithm, **bound)
    if run.parts.experience.keeps_rows:
        run.collect(10**6, 60)
    with repeatable(run):
        run.train(10**6, 100)
    assert run.updates > 0
    if algorithm in NORMALIZED:
        assert float(run.parts.agent.normalizer.moments[0].count) == run.env_steps


@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(name, marks=[pytest.mark.crash] * (name in RARELY_CUT)) for name in ALGORITHMS],
)
def test_chunks_are_cut_anywhere_traced_once_repeatable_and_end_with_a_loss_that_is_not_finite(
    algorithm,
):
    bound = NORMALIZED.get(algorithm, {})
    whole, cut = (Chunks(algorithm, **bound) for _ in range(2))
    if whole.parts.experience.keeps_rows:
        whole.collect(10**6, 60)
        while cut.env_steps < 60:
            cut.collect(1, 60)
    with repeatable(whole):
        whole.train(10**6, 150)
    while cut.env_steps < 150:
        cut.train(1, 150)
    assert_same(whole.snapshot(), cut.snapshot())
    if algorithm in NORMALIZED:
        assert float(whole.parts.agent.normalizer.moments[0].count) == whole.env_steps
    assert whole.updates == round(int(whole.state.loss_count) * ALGORITHMS[algorithm]) >= 3

    # A log in between restarts the sums and traces nothing again.
    whole.state = clear_losses(whole.state)
    whole.train(3, 10**6)
    assert int(whole.state.loss_count) == 3 * whole.parts.experience.num_batches
    for run in (whole, cut):
        assert run.runner.train.experimental_get_tracing_count() == 1
        warm_up_traces = run.runner.collect_randomly.experimental_get_tracing_count()
        assert warm_up_traces == run.parts.experience.keeps_rows

    batches = int(whole.state.loss_count)
    networks = whole.parts.agent.trained.values()
    variable = [v for network in networks for v in network.trainable_variables][-1]
    variable.assign(tf.fill(variable.shape, float("inf")))
    whole.train(1000, 10**6)
    assert int(whole.state.loss_count) == batches + whole.parts.experience.num_batches
    assert not all(tf.math.is_finite(total) for total in whole.state.loss_sums.values())


def test_losses_are_summed(monkeypatch):
    run = Chunks("dqn")
    run.collect(10**6, 60)
    extra = {name: tf.constant(2.0) for name in run.state.loss_sums}
    monkeypatch.setattr(run.parts.agent, "train", lambda *_: LossInfo(tf.constant(2.0), extra))
    run.train(3, 10**6)
    assert int(run.state.loss_count) == 3
    assert {float(total) for total in run.state.loss_sums.values()} == {6.0}


def test_a_chunk_ends_where_it_is_told_and_calls_python_once_a_vector_step():
    """Checks its end: the first iteration that reaches `until`, or after `max_iterations`."""
    run = Chunks("dqn")
    # 4 environment steps per update in 2 environments make iterations of 2 steps.
    steps = run.parts.experience.collect_steps
    assert steps == 2
    run.collect(3, 1000)
    assert int(run.state.carry.vector_steps) == 3 * steps
    run.collect(1000, 41)
    assert 41 <= run.env_steps < 41 + 2 * steps
    before, updates = int(run.state.carry.vector_steps), run.updates
    assert updates == 0
    run.train(0, 1000)
    run.train(1000, run.env_steps)
    assert int(run.state.carry.vector_steps) == before
    run.train(5, 1000)
    assert int(run.state.carry.vector_steps) == before + 5 * steps
    assert run.updates == 5
    assert int(run.parts.env_steps) == run.env_steps

    environment = run.parts.environment
    step = environment.episodes.vector.step = mock.Mock(wraps=environment.episodes.vector.step)
    # Such a small number of steps is unrolled.
    assert python_functions(run.runner.train) == steps
    run.train(20, 10**6)
    assert step.call_count == 20 * steps


def python_functions(function):
    """Returns the number of nodes that call Python in all graphs of a traced `tf.function`."""
    (concrete,) = function._list_all_concrete_functions()
    definition = concrete.graph.as_graph_def()
    nodes = list(definition.node)
    for body in definition.library.function:
        nodes += body.node_def
    # The library may hold a loop's body in several versions (forward, inference).
    return len({node.attr["token"].s for node in nodes if "PyFunc" in node.op})
