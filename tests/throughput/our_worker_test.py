"""Tests of this pipeline as a worker of the throughput measurement."""

import contextlib
import json
import os
import subprocess
import sys
import time

import pytest
import tensorflow as tf
from conftest import ROOT
from tiny_runs import Walk, assert_same, build_components, noting_runner, variables

from benchmarks import machine_stages, our_worker, peer_environment
from benchmarks.workers.workloads import WORKLOADS
from pipeline import configuration
from pipeline.benchmarks import throughput
from pipeline.training.train_loop import train
from pipeline.utils.errors import UserError
from pipeline.utils.shutdown import StopSignal

pytestmark = pytest.mark.usefixtures("any_config")


@pytest.fixture
def opened():
    """Yields the context of stages, which closes their environments."""
    with contextlib.ExitStack() as stack:
        yield stack


def built_for(name, *bindings, num_envs=2, variant=""):
    """Builds the components of a workload."""
    workload = WORKLOADS[name]
    lines = [*our_worker.gin_bindings(workload, num_envs, variant), *bindings]
    configuration.load(our_worker.gin_files(workload, variant), lines)
    return throughput.build_components()


@pytest.mark.parametrize(
    ("name", "num_envs"),
    [
        pytest.param(name, n, marks=[pytest.mark.crash] * (name not in ("dqn_pong", "ppo_pong")))
        for name, workload in WORKLOADS.items()
        for n in ((8,) if workload.uses_rollouts else (1, 8))
    ],
)
def test_a_workload_is_what_is_trained(name, num_envs):
    workload = WORKLOADS[name]
    bindings = our_worker.gin_bindings(workload, num_envs, "bfloat16")
    # Nothing is measured here, so the memory for a million frames is saved. A warm-up fits.
    small = [b.replace("1000000", "20000") for b in bindings]
    small.append("evaluation/atari_environment.num_envs = 1")  # each loads a game
    configuration.load(our_worker.gin_files(workload), small)
    built, runner = noting_runner()
    train(None, 1, "fail", StopSignal(), dry_run=True, runner=runner)
    _, _, unread = configuration.explain().partition("not used in this run:\n")
    for binding in bindings:
        assert binding.partition(" = ")[0] not in unread
    (parts,) = built
    assert parts.environment.batch_size == num_envs
    steps, updates = parts.experience.collect_steps, parts.experience.num_batches
    assert updates * workload.vector_steps(num_envs) == workload.updates(num_envs) * steps
    layers = [x for network in parts.agent.trained.values() for x in network.submodules]
    computed = {x.compute_dtype for x in layers if isinstance(x, tf.keras.layers.Conv2D)}
    assert computed == ({"bfloat16"} if workload.is_atari else set())
    weights = [v for x in parts.agent.trained.values() for v in x.trainable_variables]
    assert {v.dtype for v in weights} == {tf.float32}


@pytest.mark.parametrize(
    ("variant", "scheduler"), [("asynchronous", "threads"), ("in_turns", "deterministic")]
)
def test_a_variant_runs_as_many_actors_as_the_workload_has_environments(variant, scheduler):
    parts = built_for("a2c_cartpole", num_envs=3, variant=variant)
    assert parts.runner.description == {"scheduler": scheduler, "num_actors": 3}
    parts.runner.close()


def measured(workload, output_dir):
    """Returns the worker's message when it is ready, and its answer for every stage."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TF_")}
    command = [sys.executable, "-m", "benchmarks.our_worker", f"--workload={workload}"]
    worker = subprocess.Popen(
        [*command, f"--output_dir={output_dir}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert worker.stdin is not None and worker.stdout is not None
    ready = json.loads(worker.stdout.readline())
    assert ready["stages"] == ["environment", "collect", "sample", "update", "training"]
    answers = {}
    for stage in ready["stages"]:
        worker.stdin.write(json.dumps({"stage": stage, "seconds": 0.2}) + "\n")
        worker.stdin.flush()
        answers[stage] = json.loads(worker.stdout.readline())
    worker.stdin.close()
    assert worker.wait(timeout=60) == 0
    for stage, answer in answers.items():
        assert answer["stage"] == stage
        assert answer["seconds"] >= 0.2 and answer["count"] > 0
    return ready, answers


@pytest.mark.skipif(
    not (ROOT / peer_environment.FOLDER).exists(), reason="a worker takes long: make test-peers"
)
def test_stages_are_counted_in_their_units(tmp_path):
    ready, answers = measured("dqn_cartpole_8", tmp_path)
    assert ready["onednn"] == "0"
    assert ready["threads"] == {"intra_op": 1, "inter_op": 1}
    assert ready["num_parameters"] == 4 * 64 + 64 + 64 * 64 + 64 + 64 * 2 + 2
    training = answers["training"]
    assert training["count"] == pytest.approx(4 * training["updates"], rel=0.1)
    # Multiply-adds of a batch of 64, two operations each: two networks forward, and one backward
    # without the gradient of its input.
    layers = [4 * 64, 64 * 64, 64 * 2]
    expected = 2 * 64 * (2 * sum(layers) + sum(layers) + sum(layers[1:]))
    assert answers["update"]["flops_per_count"] == pytest.approx(expected, rel=0.02)


def test_an_update_of_trpo_is_all_that_it_learns_from_a_rollout(tmp_path):
    parts, workload = built_for("trpo_cartpole"), WORKLOADS["trpo_cartpole"]
    training = throughput.Training(parts, 0, tmp_path, 1 + workload.value_steps(2))
    answer = training(0.2)
    # A rollout has 2 * 512 rows; those between episodes are not environment steps.
    assert answer["count"] == pytest.approx(1024 * answer["updates"], rel=0.1)


def test_an_update_may_use_the_gradients_of_several_batches(opened):
    parts = built_for("ppo_cartpole", "create_ppo_agent.accumulate_updates = 4")
    answer = throughput.Stages(parts, opened).update()(0.0)
    assert answer["count"] == 0.25  # of a batch


def test_flops_of_products_and_convolutions():
    @tf.function
    def compute(a, b, image, kernel):
        return a @ b, tf.nn.conv2d(image, kernel, 2, "VALID")

    shapes = [(2, 3), (3, 5), (1, 8, 8, 3), (2, 2, 3, 7)]
    arguments = [tf.TensorSpec(shape, tf.float32) for shape in shapes]
    graph = compute.get_concrete_function(*arguments).graph
    expected = 2 * 2 * 3 * 5 + 2 * (4 * 4 * 7) * (2 * 2 * 3)
    assert throughput.count_flops(graph) == expected


def test_flops_of_a_loop_are_not_known():
    @tf.function
    def power(a, times):
        return throughput.repeated(lambda product: product @ a, a, times)

    arguments = [tf.TensorSpec((3, 3), tf.float32), tf.TensorSpec((), tf.int64)]
    assert throughput.count_flops(power.get_concrete_function(*arguments).graph) is None


def test_a_stage_runs_at_least_once_and_as_long_as_it_is_told():
    times = []

    def repeat(n):
        times.append(int(n))
        time.sleep(0.001 * int(n))
        return 3 * int(n)

    stage = throughput.timed(repeat, "steps", fact=1)
    assert times == [1]
    answer = stage(0.05)
    assert answer["seconds"] >= 0.05
    assert answer["count"] == 3 * sum(times[1:])
    assert (answer["unit"], answer["fact"]) == ("steps", 1)


def test_what_a_loop_computes_is_not_optimised_away():
    total = tf.Variable(0.0)

    @tf.function
    def repeat(times):
        def body(state):
            return state + throughput._digest([total.assign_add(1.0), tf.ones([2, 3])])

        return throughput.repeated(body, tf.zeros([]), times)

    assert float(repeat(tf.constant(4, tf.int64))) == 1 + 2 + 3 + 4 + 4 * 1
    assert float(total) == 4


def test_the_machine_peak_is_a_rate_of_operations(tmp_path):
    _, of_machine = machine_stages.prepare("machine", tmp_path)
    answer = of_machine["matmul_float32"](0.05)
    products = answer["count"] * 1e9 / (2 * 1024**3)
    assert products == pytest.approx(round(products)) and products >= 1
    assert answer["unit"] == "GFLOP"


@pytest.mark.parametrize("name", ["graph_call", "python_call"])
def test_calls_are_counted_where_they_arrive(tmp_path, name):
    _, of_machine = machine_stages.prepare("machine", tmp_path)
    answer = of_machine[name](0.2)
    assert answer["count"] >= 2 and answer["seconds"] >= 0.2
    assert answer["unit"] == "calls"


def test_only_the_machine_is_measured_in_rounds(tmp_path):
    assert machine_stages.prepare("machine", tmp_path)[0]["takes_rounds"]
    assert not machine_stages.prepare("start_pong", tmp_path)[0]["takes_rounds"]


def test_an_environment_that_fails_while_it_is_timed_is_named_and_closed(tmp_path, monkeypatch):
    closed: list[Walk] = []
    monkeypatch.setattr(Walk, "close", lambda self: closed.append(self))
    parts = build_components("dqn", tmp_path)
    raised = pytest.raises(UserError, match=r"Walk-v0 raised KeyError.*no such room")
    with raised, contextlib.ExitStack() as opened:
        stages = throughput.Stages(parts, opened)
        (tmp_path / "fail").touch()
        stages.environment()
    assert len(closed) == 2


def test_environments_that_refuse_forbidden_actions_are_timed(opened):
    """Checks that all stages act by the mask of the newest observation."""
    parts = build_components(
        "dqn",
        gymnasium_environment__name="scripted_environments:MaskedGame-v0",
        gymnasium_environment__kwargs={},
    )
    stages = throughput.Stages(parts, opened)
    environment, collect = stages.environment(), stages.collect()
    for _ in range(2):
        assert environment(0.05)["count"] > 0
        assert collect(0.05)["count"] > 0


def test_timing_updates_leaves_the_agent_as_it_was(opened):
    parts = built_for("dqn_cartpole")
    timed = throughput.Stages(parts, opened)
    collect, update = timed.collect(), timed.update()
    collect(0.01)
    before = variables(parts.agent)  # with the optimizer's moments
    assert update(0.05)["count"] > 0
    assert_same(variables(parts.agent), before)


def test_stages_count_environment_steps_and_batches(monkeypatch, opened):
    parts = built_for("dqn_cartpole")
    monkeypatch.setattr(throughput, "timed", lambda repeat, unit, **_: repeat)
    monkeypatch.setattr(throughput, "_DRAWN", 10)
    stages, times = throughput.Stages(parts, opened), tf.constant(2, tf.int64)
    # An episode of CartPole has 8 steps at least, so none ends here.
    assert stages.collect()(times) == 2 * parts.experience.collect_steps * 2 <= 16
    assert stages.sample()(times) == 2
    assert stages.environment()(times) == 4


def test_the_training_s_episodes_are_whole_whatever_is_timed_between_them(tmp_path, opened):
    no_learning = "create_a2c_agent.learning_rate = 0.0"  # so returns are -200
    parts = built_for("a2c_cartpole", "gymnasium_environment.name = 'MountainCar-v0'", no_learning)
    training = throughput.Training(parts, 0, tmp_path)
    environment = throughput.Stages(parts, opened).environment()
    returns: list[float] = []
    while len(returns) < 4:
        environment(0.01)
        returns += [x for x in [training(0.1)["return_mean"]] if x is not None]
    assert returns == [-200] * 4


def test_an_unknown_workload_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no workload 'dqn_pang'.*replay_pong"):
        machine_stages.prepare("dqn_pang", tmp_path)


def test_resident_memory_is_that_of_this_process():
    before = machine_stages.resident_gib()
    block = bytearray(b"x") * (200 * 2**20)
    assert 0.15 < machine_stages.resident_gib() - before < 0.25
    assert machine_stages.resident_gib("VmHWM") >= before
    del block
