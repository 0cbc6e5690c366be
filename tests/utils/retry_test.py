import pytest

from pipeline.utils import retry
from pipeline.utils.errors import UserError, WriteError
from pipeline.utils.retry import Patience


class Clock:
    """Clock whose time passes only during `sleep`."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Disk:
    def __init__(self):
        self.is_full = False
        self.tries: list[float] = []
        self.clock = Clock()
        self.said: list[str] = []

    def write(self):
        self.tries.append(self.clock.now - 100.0)
        if self.is_full:
            raise WriteError("cannot write to runs/x: No space left on device")


@pytest.fixture
def disk(monkeypatch):
    disk = Disk()
    monkeypatch.setattr(retry, "time", disk.clock)
    return disk


def test_tries_are_further_and_further_apart_until_it_gives_up(disk):
    writer = Patience(disk.said.append, lambda: None, give_up_after=200.0)
    disk.is_full = True
    with pytest.raises(WriteError, match="runs/x: No space left"):
        while True:
            assert not writer.attempt(disk.write)
            disk.clock.sleep(0.5)
    assert disk.tries == [0, 1, 3, 7, 15, 31, 63, 123, 183, 200]
    assert len(disk.said) == 9
    assert "attempt is in 1 s. The run stops if no attempt succeeds within 200 s" in disk.said[0]
    assert "runs/x: No space left" in disk.said[0]


def test_what_did_not_fail_is_not_tried_again(disk):
    writer = Patience(disk.said.append, lambda: None)
    writer.retry(disk.write)
    assert writer.attempt(disk.write)
    writer.retry(disk.write)
    assert disk.tries == [0]
    disk.is_full = True
    writer.attempt(disk.write)
    for _ in range(5):
        disk.clock.sleep(0.5)
        writer.retry(disk.write)
    assert disk.tries == [0, 0, 1]


def test_a_success_is_told_once_and_forgets_the_failure(disk):
    writer = Patience(disk.said.append, lambda: None, give_up_after=10.0)
    for _ in range(3):
        disk.is_full = True
        assert not writer.attempt(disk.write)
        disk.clock.sleep(8.0)
        disk.is_full = False
        assert writer.attempt(disk.write)
        assert writer.attempt(disk.write)
    assert sum("writing works again, after 8 s" in message for message in disk.said) == 3
    assert len(disk.said) == 6


def test_negative_patience_is_refused(disk):
    message = "Patience.give_up_after = -1: must be a number, at least 0"
    with pytest.raises(UserError, match=message):
        Patience(disk.said.append, lambda: None, give_up_after=-1)


def test_no_patience_raises_at_once(disk):
    disk.is_full = True
    with pytest.raises(WriteError):
        Patience(disk.said.append, lambda: None, give_up_after=0.0).attempt(disk.write)
    assert disk.said == []


def test_other_errors_are_not_waited_out(disk):
    def refuse():
        raise UserError("NaN")

    with pytest.raises(UserError, match="NaN"):
        Patience(disk.said.append, lambda: None).attempt(refuse)


def test_insisting_waits_and_can_be_stopped(disk):
    looks = []

    def check_stop():
        looks.append(disk.clock.now)
        disk.is_full = disk.clock.now < 105.0

    disk.is_full = True
    Patience(disk.said.append, check_stop).insist(disk.write)
    assert disk.tries == pytest.approx([0, 1, 3, 7], abs=0.3)
    assert len(looks) > 50

    def interrupt():
        raise KeyboardInterrupt

    disk.is_full = True
    with pytest.raises(KeyboardInterrupt):
        Patience(disk.said.append, interrupt).insist(disk.write)
