"""Tests that a run resumes from the previous checkpoint if any file of the newest is damaged."""

import shutil

import pytest
from damages import DAMAGES
from run_processes import Run, assert_same_end, checkpoint_order

from pipeline.checkpointing.checkpoints import Checkpoints

PARTS = ("agent", "experience", "environment", "loop", "host", "circumstances")
# Cases that are resumed to the end: files and their damage, by algorithm.
RESUMED = {
    "dqn": [("experience/reward_0-0000-000000000.rows", "truncated"), ("manifest.json", "emptied")],
    "ppo": [("agent/variables.data-00000-of-00001", "middle bit flipped"),
            ("loop/tensors.npz", "deleted")],
    "sac": [("environment/actions.npz", "emptied"), ("host/state.json", "first bit flipped")],
}  # fmt: skip


class Unread:
    """Part that is not read; only its files matter."""

    def save(self, folder, earlier=None):
        raise AssertionError

    def restore(self, folder):
        assert any(folder.iterdir())


@pytest.fixture(scope="module", params=RESUMED)
def algorithm(request):
    return request.param


@pytest.fixture(scope="module")
def finished(algorithm, tmp_path_factory):
    """Returns a run that came to its end, with at least two checkpoints."""
    run = Run(tmp_path_factory.mktemp(algorithm), algorithm)
    assert run.finish() == 0, run.output
    return run


def files(folder):
    return sorted(x.relative_to(folder).as_posix() for x in folder.rglob("*") if x.is_file())


@pytest.mark.crash
def test_damage_to_any_file_is_found_and_the_checkpoint_before_restored(tmp_path, finished):
    names = files(finished.newest)
    assert {name.split("/")[0] for name in names} == {*PARTS, "manifest.json"}
    before = finished.checkpoints[-2]
    for number, (name, damage) in enumerate((n, d) for n in names for d in DAMAGES):
        folder = shutil.copytree(finished.path / "checkpoints", tmp_path / str(number))
        DAMAGES[damage](folder / finished.newest.name / name)
        restored = Checkpoints(folder, dict.fromkeys(PARTS, Unread())).restore()
        assert restored is not None and restored.path.name == before.name, (name, damage)
        (warning,) = restored.warnings
        assert warning.startswith(f"{finished.newest.name} is damaged: {name} "), (name, damage)
        shutil.rmtree(folder)


@pytest.mark.crash
@pytest.mark.parametrize("number", range(2))
def test_a_run_goes_on_from_the_checkpoint_before_to_the_same_end(
    tmp_path, finished, algorithm, number
):
    name, damage = RESUMED[algorithm][number]
    run = finished.copied(tmp_path / "run")
    (run.path / "result.json").unlink()
    DAMAGES[damage](run.newest / name)
    newest, before = run.newest.name, checkpoint_order(run.checkpoints[-2])[0]
    assert run.finish() == 0, run.output
    assert f"warning: {newest} is damaged: {name} " in run.output
    assert run.resumed_at == [before]
    assert_same_end(run, finished)
