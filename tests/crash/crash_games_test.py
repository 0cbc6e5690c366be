"""Tests that every Atari game of the benchmarks continues from wherever it was saved."""

import hashlib
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from scripted_environments import OPENAI, drawn_actions

from pipeline.benchmarks import published_scores
from pipeline.environments import atari
from pipeline.environments.atari import atari_environment
from pipeline.environments.deepmind_atari import deepmind_atari_environment
from pipeline.environments.vector_environment import VectorEnvironment

MAX_STEPS = 30_000  # vector steps
NATURAL_ENDS = 2
AFTER = 60  # vector steps compared after a restore
RESTORES = 2  # at random moments, and one more at the end of the first episode


class Protocol(NamedTuple):
    """Protocol by which games are played; short anchor intervals seed them anew often."""

    create: Callable[..., VectorEnvironment]
    settings: Mapping[str, Any] = {}
    anchor_interval: int = 500  # vector steps


PROTOCOLS = {
    "sticky": Protocol(atari_environment, {}, atari.ANCHOR_INTERVAL),
    "openai": Protocol(atari_environment, OPENAI),
    "deepmind": Protocol(deepmind_atari_environment),
}


class Played(NamedTuple):
    """Actions of a game, and a digest of the rows of every step."""

    actions: np.ndarray
    digests: list[str]
    ends: list[int]  # steps at which an episode ended by the game's own rules
    saved: list[int]  # steps at which the state was saved


def digest(time_step) -> str:
    return hashlib.sha256(b"".join(np.asarray(row).tobytes() for row in time_step)).hexdigest()


def play(env, folder, generator) -> Played:
    """Plays random actions, saving ever less often, and also where the first episode ends.

    Saves are spread evenly over the logarithm of time, because the end is not known.
    """
    env.reset()
    actions = drawn_actions(env, MAX_STEPS + AFTER, generator.integers(2**31))
    played = Played(actions, [], [], [])
    moment, stop = int(generator.integers(1, 50)), MAX_STEPS
    for step, action in enumerate(actions, start=1):
        row = env.step(tf.constant(action))
        played.digests.append(digest(row))
        ended = int(np.sum(row.is_last() & (row.discount == 0)))
        if step == moment or ended and not played.ends and step < stop:
            (folder / str(step)).mkdir()
            env.save(folder / str(step))
            played.saved.append(step)
            moment = max(moment, step + 1 + int(generator.integers(max(step // 2, 50))))
        played.ends.extend([step] * ended)
        if len(played.ends) >= NATURAL_ENDS or step >= MAX_STEPS:
            stop = min(stop, step)
        if step == stop + AFTER:
            break
    return played


def moments(played: Played, generator) -> list[int]:
    """Draws saved moments that enough steps follow, including the end of the first episode."""
    known = [step for step in played.saved if step + AFTER <= len(played.digests)]
    drawn = generator.choice(known, min(RESTORES, len(known)), replace=False).tolist()
    return sorted({*drawn, *(set(played.ends[:1]) & set(known))})


def is_same_after(env, folder, played: Played, moment: int) -> bool:
    env.reset()
    env.restore(folder / str(moment))
    if env.divergence or digest(env.current_time_step()) != played.digests[moment - 1]:
        return False
    following = played.actions[moment : moment + AFTER]
    digests = [digest(env.step(tf.constant(action))) for action in following]
    return digests == played.digests[moment : moment + AFTER]


@pytest.mark.crash
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("game", sorted(published_scores.atari_games()))
def test_a_game_goes_on_from_wherever_it_was_saved(tmp_path, monkeypatch, capsys, game, protocol):
    generator = np.random.default_rng(zlib.crc32(f"{game}, {protocol}".encode()))
    create_environment, settings, interval = PROTOCOLS[protocol]
    monkeypatch.setattr(f"{create_environment.__module__}.ANCHOR_INTERVAL", interval)

    def create():
        seed = int(generator.integers(2**31))
        return create_environment(seed, game=game, num_envs=2, **settings)

    played = play(create(), tmp_path, generator)
    restored = moments(played, generator)
    bad = [m for m in restored if not is_same_after(create(), tmp_path, played, m)]
    with capsys.disabled():
        print(
            f"\n{game}, {protocol}: {len(played.digests):,} vector steps, {len(played.ends)} ends,"
            f" restored after {restored}: {f'NOT THE SAME after {bad}' if bad else 'the same'}",
            end=" ",
        )
    assert len(restored) >= 2
    assert not bad
