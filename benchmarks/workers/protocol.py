"""What a worker of `throughput` says and hears: one JSON object on a line.

A worker builds and warms up everything and then says

    {"ready": true, "stages": ["environment", "collect", ...], ...facts}

with "takes_rounds": false if its stages can be measured once only.

From then on it answers each line of standard input,

    {"stage": "training", "seconds": 10}

by measuring that stage for at least so long:

    {"stage": "training", "seconds": 10.03, "count": 3521, "unit": "environment steps", ...facts}

It ends with its input. Imports the standard library alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

Answer = dict[str, Any]
Stage = Callable[[float], Answer]  # of the seconds that it is to take at least
STAGES = ("environment", "collect", "sample", "update", "training")  # of a training, in this order


class Channel:
    """Standard output, kept for the protocol: what anything else prints goes to standard error."""

    def __init__(self) -> None:
        self._output: TextIO = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(self, message: Mapping[str, Any]) -> None:
        print(json.dumps(message), file=self._output, flush=True)

    def serve(self, facts: Mapping[str, Any], stages: Mapping[str, Stage]) -> None:
        """Says that the worker is ready, and answers until standard input ends."""
        self.say({"ready": True, "stages": list(stages), **facts})
        for line in sys.stdin:
            request = json.loads(line)
            if request.get("quit"):
                return
            name = request["stage"]
            self.say({"stage": name, **stages[name](request["seconds"])})


def repeat(act: Callable[[], int | None], seconds: float, unit: str) -> Answer:
    """Calls `act` for at least so long; it may return how many units it did."""
    count, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        count += act() or 0
    return {"seconds": elapsed, "count": count, "unit": unit}


def arguments() -> argparse.Namespace:
    """`work` and `output_dir` from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", required=True, help="as in dqn_pong_8")
    parser.add_argument("--output_dir", required=True, help="folder for whatever is written")
    return parser.parse_args()
