"""Tests of the revision and the digest of the source that runs."""

import importlib
import pathlib
import subprocess

import pytest

from pipeline.runs import source_revision


def git(folder: pathlib.Path, *arguments: str) -> str:
    names = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org"]
    command = ["git", "-C", str(folder), *names, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Creates a repository without commits and returns its package, as if that were running."""
    package, configs = tmp_path / "checkout" / "package", tmp_path / "checkout" / "gin_configs"
    for folder in (package, configs):
        folder.mkdir(parents=True)
    (package / "__init__.py").write_text("1")
    git(tmp_path / "checkout", "init", "--quiet")
    monkeypatch.setattr(source_revision, "_PACKAGE", package)
    monkeypatch.setattr(source_revision, "shipped_folder", lambda: configs)
    return package


@pytest.mark.parametrize(
    "changed", ["package/__init__.py", "package/new.py", "gin_configs/new.gin"]
)
def test_a_revision_is_marked_if_the_source_was_changed_since(
    checkout: pathlib.Path, changed: str
) -> None:
    git(checkout, "add", ".")
    git(checkout, "commit", "--quiet", "-m", "first")
    head = git(checkout, "rev-parse", "HEAD")
    assert source_revision.git_revision() == head
    (checkout.parent / "my_search.gin").write_text("of the user, who works in the checkout")
    assert source_revision.git_revision() == head
    (checkout.parent / changed).write_text("2")
    assert source_revision.git_revision() == f"{head}+"


def test_a_package_that_is_merely_inside_another_s_checkout_has_no_revision(
    checkout: pathlib.Path,
) -> None:
    (checkout.parent / "README.md").write_text("of something else")
    git(checkout.parent, "add", "README.md")
    git(checkout.parent, "commit", "--quiet", "-m", "first")
    assert source_revision.git_revision() is None


def test_the_source_is_told_apart_by_its_text(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_revision, "_PACKAGE", tmp_path)
    monkeypatch.setattr(source_revision, "shipped_folder", lambda: tmp_path / "gin_configs")
    digests = set()
    names = ("a.py", "a.py", "folder/b.py", "peers.txt", "gin_configs/agents/a.gin", "c.csv")
    for number, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(str(number))
        digests.add(source_revision.source_sha256())
    (tmp_path / ".#a.py").symlink_to("me@here.1")  # by an editor with unsaved changes
    digests.add(source_revision.source_sha256())
    assert len(digests) == len(names) - 2  # text and data files do not count


def test_own_modules_are_those_that_are_neither_installed_nor_of_this_package(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "maze_of_mine.py"
    path.write_text("SIZE = 1")
    importlib.import_module("maze_of_mine")
    before = source_revision.own_modules()
    path.write_text("SIZE = 2")
    after = source_revision.own_modules()
    assert before.pop("maze_of_mine") != after.pop("maze_of_mine")
    assert before == after
    assert "source_revision_test" in after
    names = {name.partition(".")[0] for name in after}
    assert names.isdisjoint({"pipeline", "json", "numpy", "gymnasium", "tensorflow"})
