import json
import os
import pathlib
import re
from typing import Any

import pytest
from conftest import ROOT

from pipeline import configuration
from pipeline.checkpointing import exactness as exactness_module
from pipeline.checkpointing.exactness import Circumstances, Exactness, configured_otherwise
from pipeline.configuration import registry
from pipeline.utils.errors import RetryableError, UserError

ANY = Exactness(allow_inexact=True)
CONFIG = """
atari_environment.num_threads = {threads}
evaluation/atari_environment.num_threads = {threads}
atari_environment.num_envs = {envs}
Evaluator.max_episode_steps = {limit}
train.num_final_episodes = {games}
train.num_env_steps = {steps}
train.log_interval = {interval}
train.checkpoint_interval = {interval}
"""


def circumstances(
    monkeypatch: pytest.MonkeyPatch,
    schedule: str = "",
    seed: int = 1,
    exactness: Exactness = ANY,
    settings: dict[str, Any] | None = None,
    **given: Any,
):
    values = {"threads": 1, "envs": 8, "steps": 100, "interval": 50, "limit": 100, "games": 9}
    values |= given
    text = CONFIG.format(**values) + schedule
    monkeypatch.setattr(configuration, "operative_config", lambda: text)
    usual = {"threads": {"intra_op": 1}, "execution": "graph", "onednn": "1", "device": "CPU"}
    return Circumstances(usual | (settings or {}), seed, pathlib.Path("runs/mine"), exactness)


SPREAD = "linear_schedule.num_steps = @whole_run()\n"


@pytest.mark.parametrize(
    "now, schedule, differ",
    [
        ({"threads": 2}, "", []),  # emulator threads in training and evaluation
        ({"interval": 70}, "", []),
        ({"envs": 4}, "", ["atari_environment.num_envs: 8 in the checkpoint, 4 here"]),
        ({"steps": 200}, "", []),
        ({"limit": 50}, "", []),
        ({"games": 5}, "", []),
        ({"steps": 200}, SPREAD, ["train.num_env_steps: 100 in the checkpoint, 200 here"]),
    ],
)
def test_only_what_moves_bits_is_compared(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    now: dict[str, Any],
    schedule: str,
    differ: list[str],
) -> None:
    circumstances(monkeypatch, schedule).save(tmp_path)
    resumed = circumstances(monkeypatch, schedule, **now)
    assert resumed.differences == []  # nothing is restored yet
    resumed.restore(tmp_path)
    assert resumed.differences == differ


def changeable() -> list[str]:
    """Returns the parameters that may change according to the documentation."""
    page = (ROOT / "docs/reliability.md").read_text()
    paragraph = page.partition("These values may change:")[2].partition("Bindings of")[0]
    assert paragraph
    return re.findall(r"`([\w.]+)`", paragraph)


@pytest.mark.parametrize("name", changeable())
def test_values_that_may_change_by_the_documentation_are_not_compared(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    selector, _, parameter = name.partition(".")
    assert parameter in registry.parameters(registry.need_registered(selector, "the page"))
    differences = []
    for kept, value in ((name, 3), (f"another.{parameter}", 4)):
        circumstances(monkeypatch, f"{kept} = 2\n").save(tmp_path)
        resumed = circumstances(monkeypatch, f"{kept} = {value}\n")
        resumed.restore(tmp_path)
        differences.append(resumed.differences)
    assert differences == [[], [f"another.{parameter}: 2 in the checkpoint, 4 here"]]


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("versions", {"numpy": "9"}, "version of numpy: .* in the checkpoint, 9 here"),
        (
            "vector_instructions",
            ["avx9"],
            "processor's instructions: .* in the checkpoint, avx9 here",
        ),
        (
            "platform.libc_ver",
            ("glibc", "9.9"),
            "version of C library: .* in the checkpoint, glibc 9.9 here",
        ),
    ],
)
def test_another_machine_is_told(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object, said: str
) -> None:
    circumstances(monkeypatch).save(tmp_path)
    monkeypatch.setattr(f"{exactness_module.__name__}.{name}", lambda: value)
    resumed = circumstances(monkeypatch)
    resumed.restore(tmp_path)
    assert any(re.fullmatch(said, line) for line in resumed.differences)
    with pytest.raises(RetryableError):
        circumstances(monkeypatch, exactness=Exactness()).restore(tmp_path)


@pytest.mark.parametrize(
    "setting, now, said",
    [
        ("threads", {"intra_op": 0}, "threads.intra_op: 1 in the checkpoint, 3 here"),
        ("execution", "eager", "execution (--eager, --exact_graph): graph in the checkpoint, "),
        ("onednn", "0", "oneDNN: 1 in the checkpoint, 0 here"),
        ("device", "NVIDIA H100", "device: CPU in the checkpoint, NVIDIA H100 here"),
    ],
)
def test_other_settings_of_tensorflow_are_told(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, setting: str, now: object, said: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2, 5})
    circumstances(monkeypatch).save(tmp_path)
    resumed = circumstances(monkeypatch, settings={setting: now})
    resumed.restore(tmp_path)
    (line,) = resumed.differences
    assert line.startswith(said)


@pytest.mark.parametrize(
    "setting, parameter, here",
    [
        ({"threads": {"intra_op": 3}}, "intra_op = 3", {0}),
        ({"device": "CPU"}, "use_gpu = False", {0, 2, 5}),
        ({"onednn": "1"}, "onednn = False", {0, 2, 5}),
    ],
)
def test_a_binding_may_restore_what_another_machine_would_choose(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    setting: dict[str, Any],
    parameter: str,
    here: set[int],
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2, 5})
    begun = circumstances(monkeypatch, settings={"threads": {"intra_op": 0}})
    begun.save(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: here)
    setting = {"threads": {"intra_op": 0}} | setting
    resumed = circumstances(monkeypatch, f"configure_tensorflow.{parameter}\n", settings=setting)
    resumed.restore(tmp_path)
    assert resumed.differences == []


def test_a_checkpoint_may_hold_a_value_that_is_no_longer_compared(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    circumstances(monkeypatch).save(tmp_path)
    file = tmp_path / "circumstances.json"
    saved = json.loads(file.read_text()) | {"evaluation/configure_tensorflow.intra_op": "%CORES"}
    saved["CORES"] = "7"
    file.write_text(json.dumps(saved))
    resumed = circumstances(monkeypatch)
    resumed.restore(tmp_path)
    assert resumed.differences == []


def test_variables_that_choose_the_kernels_are_told(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    circumstances(monkeypatch).save(tmp_path)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_auto_jit=2")
    monkeypatch.setenv("TF_SET_ONEDNN_FPMATH_MODE", "BF16")
    for harmless in (
        *("ONEDNN_VERBOSE", "TF_CPP_MIN_LOG_LEVEL", "TF_FORCE_GPU_ALLOW_GROWTH", "CUDNN_VERSION"),
        *("TF_ENABLE_DEPRECATION_WARNINGS", "XLA_PYTHON_CLIENT_PREALLOCATE", "TF_CUDA_PATHS"),
    ):
        monkeypatch.setenv(harmless, "1")
    resumed = circumstances(monkeypatch)
    resumed.restore(tmp_path)
    assert resumed.differences == [
        "environment variables: ONEDNN_MAX_CPU_ISA=AVX2 in the checkpoint, "
        "TF_SET_ONEDNN_FPMATH_MODE=BF16 TF_XLA_FLAGS=--tf_xla_auto_jit=2 here"
    ]


def test_a_package_that_was_not_installed_does_not_count(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exactness_module, "versions", lambda: {"numpy": "2", "box2d": "1"})
    circumstances(monkeypatch).save(tmp_path)
    now = {"numpy": "2", "box2d": "2", "mujoco": "3"}
    monkeypatch.setattr(exactness_module, "versions", lambda: now)
    resumed = circumstances(monkeypatch)
    resumed.restore(tmp_path)
    assert resumed.differences == ["version of box2d: 1 in the checkpoint, 2 here"]


def test_a_package_that_is_no_longer_installed_counts(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exactness_module, "versions", lambda: {"numpy": "2", "mujoco": "3"})
    circumstances(monkeypatch).save(tmp_path)
    monkeypatch.setattr(exactness_module, "versions", lambda: {"numpy": "2"})
    resumed = circumstances(monkeypatch)
    resumed.restore(tmp_path)
    assert resumed.differences == ["version of mujoco: 3 in the checkpoint, nothing here"]


def test_a_parameter_that_an_earlier_revision_lacked_counts_unless_it_has_its_default(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    circumstances(monkeypatch).save(tmp_path)
    now = "create_dqn_agent.double_q = False\ncreate_dqn_agent.n_step = 3\n"
    resumed = circumstances(monkeypatch, now + "unknown.rate = 1\n")
    resumed.restore(tmp_path)
    assert resumed.differences == [
        "create_dqn_agent.n_step: nothing in the checkpoint, 3 here",
        "unknown.rate: nothing in the checkpoint, 1 here",
    ]


MACROS = """
train.checkpoint_interval = %OFTEN
OFTEN = %BASE
BASE = {base}
atari_environment.noop_max = %NOOPS
NOOPS = {noops}
"""


def test_a_macro_counts_only_where_its_value_does(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    circumstances(monkeypatch, MACROS.format(base=1, noops=30)).save(tmp_path)
    resumed = circumstances(monkeypatch, MACROS.format(base=2, noops=0))
    resumed.restore(tmp_path)
    assert resumed.differences == ["NOOPS: 30 in the checkpoint, 0 here"]


def test_the_threads_are_those_of_the_start(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2, 5})
    chosen = {"threads": {"intra_op": 0}}
    begun = circumstances(monkeypatch, settings=chosen)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    begun.save(tmp_path)
    resumed = circumstances(monkeypatch, settings=chosen)
    resumed.restore(tmp_path)
    assert resumed.differences == ["threads.intra_op: 3 in the checkpoint, 1 here"]


def test_threads_that_the_environment_chooses_are_told(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {"threads": {"intra_op": 0}}
    circumstances(monkeypatch, settings=chosen).save(tmp_path)
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "77")
    resumed = circumstances(monkeypatch, settings=chosen)
    resumed.restore(tmp_path)
    (line,) = resumed.differences
    assert line.startswith("threads.intra_op: ") and line.endswith(" 77 here")


def test_the_processor_s_instructions_are_those_that_linux_names() -> None:
    text = pathlib.Path("/proc/cpuinfo").read_text().split()
    found = exactness_module.traits()["processor's instructions"].split()
    assert "fma" in found or "sse4_1" in found
    assert set(found) <= set(text)


def test_a_run_that_cannot_go_on_exactly_is_refused_unless_that_is_allowed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    circumstances(monkeypatch).save(tmp_path)
    circumstances(monkeypatch, envs=4).restore(tmp_path)
    strict = circumstances(monkeypatch, envs=4, exactness=Exactness())
    said = "^runs/mine cannot be resumed exactly here:\n  atari_environment.num_envs: 8 in"
    with pytest.raises(UserError, match=said) as error:
        strict.restore(tmp_path)
    assert not isinstance(error.value, RetryableError)  # another machine would refuse it, too
    circumstances(monkeypatch, exactness=Exactness()).restore(tmp_path)
    Exactness().check_episodes("the walk drifts")
    with pytest.raises(UserError, match="the walk drifts. .* drop --require_exact_resume"):
        Exactness(require_exact=True).check_episodes("the walk drifts")


def test_another_seed_is_always_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    circumstances(monkeypatch).save(tmp_path)
    with pytest.raises(UserError, match="runs/mine was begun with --seed=1, not 2"):
        circumstances(monkeypatch, seed=2).restore(tmp_path)


def test_a_finished_run_s_configuration_is_compared_with_what_is_bound_now(tmp_path):
    path = tmp_path / "operative_config.gin"
    text = CONFIG.format(threads=1, envs=8, steps=100, interval=50, limit=100, games=9)
    path.write_text(f"{text}rate/linear_schedule.final = 1\n")
    more = "GAMES = 8\nevaluation/atari_environment.num_envs = %GAMES\n"
    more += "gymnasium_environment.kwargs = {'b': 1, 'a': 2}\n"
    path.write_text(path.read_text() + more)
    with configuration.preserved():
        configuration.load([str(path)])
        assert configured_otherwise(path) == []
        harmless = ["evaluation/atari_environment.num_threads = 2", "train.num_env_steps = 50"]
        changed = [
            "atari_environment.num_envs = 4",
            "Evaluator.max_episode_steps = 50",
            "GAMES = 2",
        ]
        changed += ["train.create_agent = @create_dqn_agent"]
        configuration.load([str(path)], [*harmless, *changed])
        path.write_text(path.read_text() + "train.create_agent = @create_sac_agent\n")
        assert configured_otherwise(path) == [
            "atari_environment.num_envs: 8 there, 4 here",
            "Evaluator.max_episode_steps: 100 there, 50 here",
            "train.create_agent: @create_sac_agent there, @create_dqn_agent here",
            "GAMES: 8 there, 2 here",
        ]


def test_a_binding_that_only_one_of_two_runs_has_is_a_difference(tmp_path):
    path = tmp_path / "operative_config.gin"
    path.write_text(
        "create_dqn_agent.n_step = 3\n"
        "create_dqn_agent.discount = 0.99\n"  # the default, which gin writes too
        "target/create_dqn_agent.double_q = True\n"  # also set by the unscoped binding
        "create_dqn_agent.double_q = True\n"
        "create_dqn_agent.optimizer = @Adam\n"  # also the default
        "GAMES = 8\n"
    )
    now = ["import pipeline.agents.dqn", "create_dqn_agent.double_q = True"]
    with configuration.preserved():
        # The file does not contain the loss, because gin omits defaults that are functions.
        configuration.load([], [*now, "create_dqn_agent.td_loss = @squared_loss"])
        assert configured_otherwise(path) == [
            "create_dqn_agent.n_step: 3 there, 1 here",
            "create_dqn_agent.td_loss: @huber_loss there, @squared_loss here",
            "target/create_dqn_agent.td_loss: @huber_loss there, @squared_loss here",
        ]
        configuration.load([], [*now, "create_dqn_agent.td_loss = @huber_loss"])
        assert configured_otherwise(path) == ["create_dqn_agent.n_step: 3 there, 1 here"]
