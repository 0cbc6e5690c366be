"""Tests that the programs of docs/asynchronous.md do what the page says.

Run as a script, it measures the times that the page shows.
"""

import pathlib
import re
import runpy
import tempfile
import threading
import time

import numpy as np
import tensorflow as tf

PAGE = pathlib.Path(__file__).parents[2] / "docs/asynchronous.md"


def run_page(folder):
    program = folder / "page.py"  # a file, because TensorFlow reads the source of loops
    program.write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)))
    return runpy.run_path(str(program))


def test_actors_lose_no_update_and_learn_as_the_batch_does(tmp_path):
    page = run_page(tmp_path)
    weights, actors, updates = page["shared"], page["actors"], page["updates"]
    assert int(updates) == 4 * 100
    assert_learnt(weights)

    reset(page)
    for update in range(400):
        page["train"](tf.constant(update))
    assert int(updates) == 400
    assert_learnt(weights)
    assert page["train"].experimental_get_tracing_count() == 1

    # An actor's first update equals that of one batch of its rollouts.
    reset(page)
    actors[2].run(tf.constant(1))
    alone = [v.numpy() for v in weights]
    reset(page)
    rollouts = [page["experience"](2, step) for step in range(5)]
    inputs, targets = (np.concatenate(parts) for parts in zip(*rollouts, strict=True))
    gradients = [-2 * inputs.T @ targets / 80, -2 * targets.mean(0)]
    page["apply"]([tf.constant(g) for g in gradients])
    for first, second in zip(alone, weights, strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-5)


def assert_learnt(weights):
    np.testing.assert_allclose(weights[0], [[1], [-2]], atol=0.05)
    np.testing.assert_allclose(weights[1], [0.5], atol=0.05)


def reset(page):
    for variable in (*page["shared"], *page["squares"], *page["momenta"], page["updates"]):
        variable.assign(tf.zeros_like(variable))


def print_times():
    with tempfile.TemporaryDirectory() as folder:
        page = run_page(pathlib.Path(folder))  # traces the actors and runs them once
    page["train"](tf.constant(0))
    for _ in range(3):
        calls = [(actor.run, tf.constant(100)) for actor in page["actors"]]
        threads = [threading.Thread(target=run, args=[count]) for run, count in calls]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ended = time.perf_counter()
        for update in range(100):
            page["train"](tf.constant(update))
        batched = time.perf_counter() - ended
        print(f"actors {1000 * (ended - began):.0f} ms, batched {1000 * batched:.0f} ms")


if __name__ == "__main__":
    print_times()
