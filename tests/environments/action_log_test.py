"""The log of actions against a plain list."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.environments.action_log import ActionLog

NUM_ENVS = 2


@given(
    st.lists(st.sampled_from(["steps", "reset 0", "reset 1", "reset both", "states"]), max_size=20),
    st.integers(1, 50),
)
def test_it_keeps_what_a_list_would(tmp_path_factory, events, steps):
    log, oldest = ActionLog(NUM_ENVS), 0
    taken: list[np.ndarray] = []
    anchors = np.zeros(NUM_ENVS, np.int64)
    for event in events:
        if event == "steps":
            for _ in range(steps):
                taken.append(np.full(NUM_ENVS, len(taken)))
                log.append(taken[-1])
            continue
        which = {"reset 0": [True, False], "reset 1": [False, True]}.get(event, [True, True])
        anchors[which] = len(taken)
        if event == "states":
            log.anchor_at([{"x": np.ones(1)}] * NUM_ENVS)
        else:
            log.anchor(np.array(which))
        oldest = min(anchors.tolist())
    folder = tmp_path_factory.mktemp("log")
    log.save(folder)
    restored = ActionLog(NUM_ENVS)
    restored.restore(folder)
    for either in (log, restored):
        assert either.steps == len(taken) and either.length == len(taken) - oldest
        assert either.anchors.tolist() == anchors.tolist()
        replayed = [action.tolist() for action, _, _ in either.replay()]
        assert replayed == [action.tolist() for action in taken[oldest:]]
    restored.append(np.zeros(NUM_ENVS, np.int64))  # It goes on.
    assert restored.length == len(taken) - oldest + 1


def test_an_action_that_changes_later_is_kept_as_it_was():
    log, action = ActionLog(NUM_ENVS), np.zeros(NUM_ENVS)
    log.append(action)
    action += 1
    ((kept, _, _),) = log.replay()
    assert kept.tolist() == [0, 0]
