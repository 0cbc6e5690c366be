"""Reads what Linux reports about the processors of this machine."""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any

from pipeline.utils.tensorflow_import import ONEDNN

_VECTOR_INSTRUCTIONS = re.compile(r"sse4\w*|avx\w*|fma|f16c|amx\w*")
_BFLOAT16 = {"avx512_bf16", "amx_bf16"}


def machine() -> dict[str, Any]:
    """Returns this machine's `cpu_model` and the `cpu_count` available to this process.

    The model is None if Linux does not report it.
    """
    return {"cpu_model": _cpu_info("model name"), "cpu_count": len(os.sched_getaffinity(0))}


def tensorflow_threads(kind: str, count: int) -> int:
    """Returns the number of threads that TensorFlow creates.

    Args:
      kind: "intra_op" or "inter_op".
      count: Number that the program chooses. If it is 0, TensorFlow chooses: the value of its
        environment variable, or one for each processor that is available to this process.
    """
    chosen = os.environ.get(f"TF_NUM_{kind.replace('_', '').upper()}_THREADS", "")
    return count or (int(chosen) if chosen.isdecimal() else 0) or machine()["cpu_count"]


def vector_instructions() -> list[str]:
    """Returns the names of the processor's vector instructions, sorted."""
    flags = (_cpu_info("flags") or "").split()
    return sorted({flag for flag in flags if _VECTOR_INSTRUCTIONS.fullmatch(flag)})


def has_bfloat16() -> bool:
    """Returns True if TensorFlow uses oneDNN and the processor's bfloat16 instructions."""
    # On these processors, TensorFlow uses oneDNN unless the environment variable forbids it.
    return os.environ.get(ONEDNN) != "0" and not _BFLOAT16.isdisjoint(vector_instructions())


def _cpu_info(name: str) -> str | None:
    """Returns what Linux reports under `name` for the first core, or None."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith(name)), None)
