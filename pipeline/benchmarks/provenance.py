"""How each number was made: command, configuration, revision, versions and machine of every run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline import progress
from pipeline.benchmarks import wording
from pipeline.benchmarks.document import Column, Details, Table
from pipeline.benchmarks.records import FINISHED, Record
from pipeline.benchmarks.results import Group, score_of

_OF_THE_MACHINE = ("cpu_model", "cpu_count", "threads", "onednn", "versions")


def details(group: Group) -> Details:
    """Tables of all runs and of what they ran on, folded away."""
    records = [record for pair in group.pairs for record in pair.records]
    machines = list(dict.fromkeys(map(_machine, records)))
    summary = f"{wording.count(len(records), 'run')}: commands, hashes, versions and machines"
    return Details(summary, (_machines(machines), _runs(records, machines)))


def differences(records: Sequence[Record]) -> Iterator[str]:
    """In what finished runs that should be alike were not made alike."""
    if len({record["config_sha256"] for record in records}) > 1:
        yield "made with different configurations"
    if len({revision for record in records for revision in _revisions(record)}) > 1:
        yield "made by different revisions"
    if len({_machine(record) for record in records}) > 1:
        yield "made on different machines or with different versions"
    if inexact := [record["seed"] for record in records if record["inexact_resumes"]]:
        yield f"not resumed bit for bit: {wording.seeds(inexact)}"


def _revisions(record: Record) -> list[str]:
    """Of the processes that made a run, those of earlier ones first."""
    of_run = [*record["earlier_revisions"], record["git_revision"]]
    return [revision or "unknown" for revision in of_run]


def _machine(record: Record) -> str:
    """Equal for runs on equal machines with equal software."""
    return json.dumps([record[name] for name in _OF_THE_MACHINE], sort_keys=True)


def _machines(machines: Sequence[str]) -> Table:
    columns = (
        *(Column("machine", "text"), Column("CPU", "text"), Column("usable cores")),
        *(Column("threads (0: as many as cores)", "text"), Column("oneDNN", "text")),
        Column("versions", "text"),
    )
    rows = []
    for index, machine in enumerate(machines, start=1):
        model, count, threads, onednn, versions = json.loads(machine)
        shown = (model or "unknown", str(count), _items(threads), str(onednn), _items(versions))
        rows.append((str(index), *shown))
    return Table("Machines and software", columns, tuple(rows))


def _items(values: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name} {value}" for name, value in (values or {}).items()) or "unknown"


def _runs(records: Sequence[Record], machines: Sequence[str]) -> Table:
    columns = (
        *(Column("environment", "text"), Column("agent", "text"), Column("seed")),
        *(Column("status", "text"), Column("score"), Column("environment steps")),
        *(Column("updates"), Column("episodes"), Column("wall-clock"), Column("machine")),
        *(Column("inexact resumes"), Column("git revision", "code")),
        Column("SHA-256 of the configuration", "code"),
        *(Column("SHA-256 of the weights", "code"), Column("command", "code")),
    )
    rows = [_run(record, machines.index(_machine(record)) + 1) for record in records]
    return Table("Runs", columns, tuple(rows))


def _run(record: Record, machine: int) -> tuple[str, ...]:
    score, seconds = score_of(record), record["wall_seconds"]
    counts = [record[name] for name in ("env_steps", "updates", "episodes")]
    hashes = [record[name] for name in ("config_sha256", "weights_sha256")]
    return (
        record["environment"],
        wording.agent(record["algorithm"]),
        str(record["seed"]),
        record["status"],
        "" if score is None else wording.number(score),
        *("" if count is None else f"{count:,}" for count in counts),
        "" if seconds is None else progress.duration(seconds),
        str(machine),
        "" if record["inexact_resumes"] is None else str(record["inexact_resumes"]),
        ", ".join(_revisions(record)) if record["status"] == FINISHED else "",
        *(text or "" for text in hashes),
        record["command"],
    )
