"""Implements the worker's side of the protocol of `throughput`, with one JSON object per line.

When a worker has built and warmed up everything, it writes

    {"ready": true, "stages": ["environment", "collect", ...], ...facts}

with "takes_rounds": false if its stages can be measured only once.

Then it answers each line of standard input,

    {"stage": "training", "seconds": 10}

by measuring that stage for at least the given number of seconds:

    {"stage": "training", "seconds": 10.03, "count": 3521, "unit": "environment steps", ...facts}

A worker ends at the line {"quit": true}, or when its input ends. This module imports only the
standard library.
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
Stage = Callable[[float], Answer]  # takes the minimum seconds of the measurement
STAGES = ("environment", "collect", "sample", "update", "training")  # of a training, in order


class Channel:
    """Reserves standard output for the protocol; all other output goes to standard error."""

    def __init__(self) -> None:
        self._output: TextIO = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(self, message: Mapping[str, Any]) -> None:
        print(json.dumps(message), file=self._output, flush=True)

    def serve(self, facts: Mapping[str, Any], stages: Mapping[str, Stage]) -> None:
        """Says that the worker is ready, and answers requests until it is told to quit.

        Args:
          facts: Facts about the worker, added to its first message.
          stages: Functions that measure the stages, by name.
        """
        self.say({"ready": True, "stages": list(stages), **facts})
        for line in sys.stdin:
            request = json.loads(line)
            if request.get("quit"):
                return
            name = request["stage"]
            self.say({"stage": name, **stages[name](request["seconds"])})


def repeat(act: Callable[[], int | None], seconds: float, unit: str) -> Answer:
    """Calls `act` repeatedly for at least `seconds`, and returns the answer of the stage.

    Args:
      act: Function to measure. It may return how many units it did.
      seconds: Minimum seconds of the measurement.
      unit: Name of the unit.
    """
    count, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        count += act() or 0
    return {"seconds": elapsed, "count": count, "unit": unit}


def arguments() -> argparse.Namespace:
    """Parses `workload` and `output_dir` from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", required=True, help="for example dqn_pong_8")
    parser.add_argument("--output_dir", required=True, help="folder for whatever is written")
    return parser.parse_args()
