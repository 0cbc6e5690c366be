"""Finds, reads, checks, binds and explains gin files.

This package imports neither TensorFlow nor anything that does, so that `--list_configs` and most
error messages appear at once.
"""

from pipeline.configuration.explanation import (
    explain,
    explain_call_error,
    ignored,
    missing_file_message,
    operative_config,
    unused,
    warnings,
    without_effect,
)
from pipeline.configuration.loading import (
    applied,
    apply,
    defaults,
    find_config,
    in_force,
    load,
    preserved,
    read,
    uses_onednn,
    warn_of_ignored,
)
from pipeline.configuration.statements import list_configs

__all__ = [
    "applied",
    "apply",
    "defaults",
    "explain",
    "explain_call_error",
    "find_config",
    "ignored",
    "in_force",
    "list_configs",
    "load",
    "missing_file_message",
    "operative_config",
    "preserved",
    "read",
    "unused",
    "uses_onednn",
    "warn_of_ignored",
    "warnings",
    "without_effect",
]
