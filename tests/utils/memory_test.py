import pytest

from pipeline.utils import memory


def test_free_memory_is_a_part_of_the_available_memory():
    assert 0 < memory.free_memory() < memory.available_memory()


@pytest.mark.parametrize(
    ("group", "folder", "names"),
    [
        ("0::/box/task", "box", ("memory.max", "memory.current")),
        ("5:memory:/box", "memory/box", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ],
)
def test_the_limit_of_a_container_counts(tmp_path, monkeypatch, group, folder, names):
    process = tmp_path / "cgroup"
    process.write_text(f"{group}\n1:cpu:/\n")
    (tmp_path / folder).mkdir(parents=True)
    for name, value in zip(names, ("5000", "3000"), strict=True):
        (tmp_path / folder / name).write_text(value)
    (tmp_path / names[0]).write_text("max")
    monkeypatch.setattr(memory, "_CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(memory, "_PROCESS", process)
    assert (memory.available_memory(), memory.free_memory()) == (5_000, 2_000)
    # The system drops cached files when it needs memory.
    cache = (
        "inactive_file 500\ntotal_inactive_file 500" if "usage" in names[1] else "inactive_file 500"
    )
    (tmp_path / folder / "memory.stat").write_text(f"anon 2500\n{cache}\n")
    assert (memory.available_memory(), memory.free_memory()) == (5_000, 2_500)
