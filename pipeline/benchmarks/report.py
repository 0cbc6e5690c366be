"""Writes the report of a benchmark as Markdown, and as an HTML page that is rendered from it.

The report is made from the records of all suites in a folder, from their plans
(`<suite>.plan.json`), and from the shipped suites and published scores. The same files always
result in the same bytes.
"""

from __future__ import annotations

import pathlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from pipeline.benchmarks import (
    figures,
    formatting,
    page,
    records,
    report_tables,
    results,
    suite_folder,
)
from pipeline.benchmarks.figures import Figure
from pipeline.benchmarks.markdown import details, escaped, listing, notice
from pipeline.benchmarks.records import Record
from pipeline.benchmarks.results import Group, Pair
from pipeline.benchmarks.suite_folder import Plan
from pipeline.utils.errors import UserError

_HTML, _MARKDOWN = "report.html", "report.md"

_READING = (
    "Scores are interquartile means (IQM, the mean of the middle half) over runs of different "
    "seeds, with 95 % percentile intervals of a bootstrap that is stratified by environment, as "
    "Agarwal et al. (NeurIPS 2021) recommend: `IQM [low, high] (runs)`. A single run has no "
    "interval, nor has a number over environments of which one has a single run, and the interval "
    "of fewer than five runs is too narrow to be trusted. Published "
    "scores are means, with `± standard deviation (runs)` where it is known. They are shown only "
    "under the same protocol, and compared with our mean only if they are of the same agent after "
    "as many environment steps. They are rounded, so ours are rounded too for the comparison."
)
_SCORES = {
    "evaluation": "The score of a run is the mean return of the episodes on which its final "
    "weights were evaluated.",
    "training": "The score of a run is the mean return of its last 100 training episodes at the "
    "end of the budget.",
    "iteration": "The score of a run is the mean return of the training episodes that ended in the "
    "last 250,000 environment steps (a million frames) of the budget, as Dopamine reports it.",
}
_CURVES = (
    "Mean returns of the last 100 training episodes, with the exploration of training. A thin line "
    "is a run. A thick line is the interquartile mean of the runs at the same number of "
    "environment steps, and the shade is its 95 % interval at each point. Diamonds, with "
    "intervals, are the scores that count, where the lines do not show them: final evaluations, or "
    "means of iterations, which are over other episodes than the lines. Hollow markers are "
    "published scores of the same protocol, with the standard deviation over runs where it is "
    "known; they compare with the diamonds, if there are any."
)
_SPEED = (
    "Wall-clock time includes evaluations and checkpoints; steps per second are of training alone. "
    "Runs that were made at the same time shared the machine."
)
_NORMALIZED = (
    "Scores are normalized by the usual random and human scores of 57 games: 0 is a random player, "
    "1 is a human. Every game has the same weight, however many runs it has. The median is over "
    "the mean scores of games. The optimality gap is by how much runs fall short of human scores "
    "on average."
)
_PROFILES = (
    "The fraction of the runs of an agent that score above each τ, with 95 % intervals. There is "
    "no profile over all environments, because no reference scores are established for these "
    "environments that would bring them onto one scale."
)
_IMPROVEMENT = (
    "The probability that a run of the first agent scores more than a run of the second, where a "
    "tie counts half (Mann-Whitney), each agent after its own budget."
)
_ATARI5 = (
    "After Aitchison et al. (ICML 2023): the logarithm of the median is a weighted sum of the "
    "logarithms of five games' mean scores. The weights are fitted anew to the authors' data, with "
    "an error of about 9 % on average over the same data, which the interval does not include."
)


def write(output_dir: pathlib.Path) -> list[pathlib.Path]:
    """Writes report.html and report.md from every `<suite>.jsonl` in a folder.

    Returns:
      The files that were written.

    Raises:
      UserError: If there are no records, if a line is not a record, or if the disk is not writable.
    """
    suites = [
        _SuiteRecords(
            name,
            records.read(output_dir / f"{name}.jsonl"),
            suite_folder.read_plan(output_dir, name),
        )
        for name in suite_folder.suites_in(output_dir)
    ]
    if not any(suite.records for suite in suites):
        if (output_dir / suite_folder.SEARCH_FILE).exists():
            raise UserError(f"{output_dir} is the folder of a search: use pipeline.tune --report.")
        raise UserError(
            f"there are no records of runs in {output_dir}; run a suite first: --suite=smoke "
            f"--output_dir={output_dir}"
        )
    blocks = list(_blocks(suites))
    texts = {
        _MARKDOWN: _joined(blocks, _in_words),
        _HTML: page.render(_joined(blocks, figures.inline)),
    }
    return page.write_files(output_dir, texts)


class _SuiteRecords(NamedTuple):
    """Records of one suite in a folder, with the seeds and experiments that were requested.

    Attributes:
      name: Name of the suite.
      records: The records.
      plan: Seeds and experiments that were requested.
    """

    name: str
    records: Sequence[Record]
    plan: Plan

    @property
    def not_begun(self) -> dict[str, int]:
        """Returns the requested numbers of seeds of the experiments without any record, by name."""
        names = results.not_begun(self.name, self.records, self.plan)
        most = results.most_seeds(self.records)
        return {x: self.plan[x].num_seeds if x in self.plan else most for x in names}


#: Markdown, or figures, which each format shows in its own way.
Block = str | Sequence[Figure]


def _joined(blocks: Sequence[Block], show: Callable[[Sequence[Figure]], str]) -> str:
    return "\n".join(x if isinstance(x, str) else show(x) for x in blocks if x)


def _in_words(drawn: Sequence[Figure]) -> str:
    lines = [f"- {escaped(f'{figure.title}. {figure.description}')}" for figure in drawn]
    return "\n".join([f"Drawn in [{_HTML}]({_HTML}):", "", *lines, ""])


def _blocks(suites: Sequence[_SuiteRecords]) -> Iterator[Block]:
    groups = [x for suite in suites for x in results.groups(suite.records, suite.plan)]
    points = list(_missing(suites, groups))
    yield "# Benchmark report\n"
    yield _completeness(suites, groups, bool(points))
    for group in groups:
        yield from _results(group, groups)
    if points:
        yield "## What is missing\n\n" + notice("These have no scores.", points)
    yield from _failures(groups)


def _completeness(
    suites: Sequence[_SuiteRecords], groups: Sequence[Group], is_incomplete: bool
) -> str:
    pairs = [pair for group in groups for pair in group.pairs]
    num_runs = sum(pair.seeds for pair in pairs)
    num_runs += sum(sum(suite.not_begun.values()) for suite in suites)
    done = sum(len(pair.finished) for pair in pairs)
    runs = formatting.count(num_runs, "run")
    if is_incomplete:
        return notice(f"Incomplete: {done} of {runs} have finished; see What is missing, below.")
    return f"All runs that were asked for have finished ({runs}).\n"


def _missing(suites: Sequence[_SuiteRecords], groups: Sequence[Group]) -> Iterator[str]:
    """Yields descriptions of the runs and scores that were requested and are missing."""
    not_begun = [
        (suite.name, "no run has ended", name) for suite in suites for name in suite.not_begun
    ]
    pairs = [(group, pair) for group in groups for pair in group.pairs]
    missing = [
        (group.suite, f"no record of {formatting.seeds(pair.missing)}", pair.name)
        for group, pair in pairs
        if pair.missing
    ]
    yield from _grouped(not_begun, [])  # they have no lines
    yield from _grouped(missing, groups)
    for group, pair in pairs:
        yield from (f"{escaped(group.suite)}, {point}" for point in _unscored(pair))


def _unscored(pair: Pair) -> Iterator[str]:
    for record in pair.failed:
        words = escaped(records.last_words(record))
        yield f"{escaped(pair.name)}: seed {record['seed']} failed: {words}"
    if pair.unscored:
        seeds = formatting.seeds([record["seed"] for record in pair.unscored])
        yield f"{escaped(pair.name)}: {seeds} finished without a score."


def _grouped(said: Iterable[tuple[str, str, str]], groups: Sequence[Group]) -> Iterator[str]:
    """Yields a sentence for each suite and fact, with the names that the fact is about."""
    names: dict[tuple[str, str], list[str]] = {}
    for suite, what, name in said:
        names.setdefault((suite, what), []).append(name)
    lines = Counter(group.suite for group in groups for _ in group.pairs)
    for (suite, what), of in names.items():
        everywhere = 1 < lines[suite] == len(of)
        yield f"{escaped(suite)}, {what}: {'every line' if everywhere else escaped('; '.join(of))}."


def _failures(groups: Sequence[Group]) -> Iterator[str]:
    failed = [record for group in groups for pair in group.pairs for record in pair.failed]
    if failed:
        texts = [
            f"{escaped(record['suite'])}, {report_tables.agent(record['algorithm'])} on "
            f"{escaped(record['environment'])}, seed {record['seed']}:\n\n"
            f"{listing(record['error'])}"
            for record in failed
        ]
        yield details("The last output of the failed runs", "\n".join(texts))


def _results(group: Group, groups: Sequence[Group]) -> Iterator[Block]:
    def of_each(draw: Callable[[Group, str], Figure | None]) -> list[Figure]:
        return [x for name in group.environments if (x := draw(group, name))]

    of_suite = [other for other in groups if other.suite == group.suite]
    agents = formatting.listed([report_tables.agent(algorithm) for algorithm in group.algorithms])
    suite = escaped(group.suite)
    yield f"## {suite if len(of_suite) == 1 else f'{suite}: {agents}'}\n"
    yield report_tables.best(group)
    yield f"Protocol: {escaped(group.protocol)}. {_SCORES[group.score]}\n"
    yield report_tables.overview(group)
    yield f"{_READING}\n"
    if curves := of_each(figures.learning_curves):
        yield f"### Learning curves\n\n{_CURVES}\n"
        yield curves
    yield "### Scores\n"
    yield report_tables.budgets(group)
    for name in group.environments:
        yield report_tables.environment(group, name)
        count, table = report_tables.elsewhere(group, name)
        if count:
            scores = formatting.count(count, "score")
            yield details(
                f"{name}: {scores} published under other protocols, not comparable", table
            )
    if group.is_atari:
        yield f"### Human-normalized scores\n\n{_NORMALIZED}\n"
        yield report_tables.aggregates(group)
        yield [x for draw in (figures.profiles, figures.normalized_curves) if (x := draw(group))]
        yield report_tables.normalized(group)
        if table := report_tables.atari5(group):
            yield f"{_ATARI5}\n\n{table}"
    elif profiles := of_each(figures.environment_profiles):
        yield f"### Performance profiles\n\n{_PROFILES}\n"
        yield profiles
    if table := report_tables.improvement(group):
        yield f"### Probability of improvement\n\n{_IMPROVEMENT}\n\n{table}"
    yield f"### Wall-clock and speed\n\n{_SPEED}\n\n{report_tables.speeds(group)}"
    yield from _how_it_was_made(group, groups)


def _how_it_was_made(group: Group, groups: Sequence[Group]) -> Iterator[str]:
    yield "### How each number was made\n"
    unlike = (
        (group.suite, what, pair.name)
        for pair in group.pairs
        for what in report_tables.differences(pair.finished)
    )
    if points := list(_grouped(unlike, groups)):
        yield notice("Not all runs of a line were made alike.", points)
    yield report_tables.what_was_run(group)
    count, tables = report_tables.provenance(group)
    runs = formatting.count(count, "run")
    yield details(f"{runs}: commands, hashes, versions and machines", tables)
