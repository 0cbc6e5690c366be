"""The report: what the records of all suites come to, as an HTML page and as Markdown.

It reads records, what was asked for (`<suite>.plan.json`), and the suites and published scores
that are shipped; the same files give the same bytes.
"""

from __future__ import annotations

import pathlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from pipeline.benchmarks import (
    atari_tables,
    document,
    figures,
    ledger,
    page,
    provenance,
    records,
    results,
    tables,
    wording,
)
from pipeline.benchmarks.document import (
    Block,
    Details,
    Figure,
    Figures,
    Heading,
    Listing,
    Notice,
    Paragraph,
)
from pipeline.benchmarks.ledger import Asked
from pipeline.benchmarks.records import Record
from pipeline.benchmarks.results import Group, Pair
from pipeline.durable import write_text
from pipeline.errors import UserError

_HTML, _MARKDOWN = "report.html", "report.md"

_READING = (
    "Scores are interquartile means over the runs of different seeds (IQM: the mean of the middle "
    "half) with 95 % percentile intervals of a bootstrap stratified by environment, as Agarwal et "
    "al. (NeurIPS 2021) advise: `IQM [low, high] (runs)`. A single run has no interval, and with "
    "fewer than five the interval is too narrow to say that a score lies in it. Published scores "
    "are means, with `± standard deviation (runs)` where known. They stand beside ours under the "
    "same protocol only, and are compared, with our mean and its interval, only if they are of the "
    "same agent after as many environment steps. They are rounded, so ours are too when compared."
)
_SCORES = {
    "evaluation": "A run's score is the mean return of the episodes that its final weights were "
    "evaluated on.",
    "training": "A run's score is the mean return of its last 100 training episodes when the "
    "budget ends.",
    "iteration": "A run's score is the mean return of the training episodes that ended in the last "
    "250,000 environment steps (a million frames) of the budget, as Dopamine reports.",
}
_CURVES = (
    "Mean returns of the last 100 training episodes, with the exploration that training has: a "
    "thin line a run, a thick one for their interquartile mean at the same number of environment "
    "steps, shaded its 95 % interval at each point. Diamonds, with intervals, are the scores that "
    "count, if the line does not show them: final evaluations, or means of iterations, which are "
    "over other episodes than the line's. Hollow markers are published scores of the same "
    "protocol, with the standard deviation over runs where it is known; they compare with the "
    "diamonds, if there are any."
)
_SPEED = (
    "Wall-clock counts evaluations and checkpoints; steps per second are of training alone. Where "
    "several runs were made at once, they shared the machine."
)
_NORMALISED = (
    "Normalised by the random and human scores that are usual for 57 games: 0 is a random player, "
    "1 is a human. The median is over games, of a game's mean; the optimality gap is by how much "
    "runs fall short of human scores on average."
)
_PROFILES = (
    "Which fraction of an agent's runs scores above each τ, with 95 % intervals. There is no "
    "profile and no aggregate over all environments: they need scores on one scale, and for these "
    "environments no reference scores are established as they are for Atari."
)
_IMPROVEMENT = (
    "How probably a run of the first agent scores more than one of the second, a tie counting half "
    "(Mann-Whitney), each agent after its own budget."
)
_ATARI5 = (
    "After Aitchison et al. (ICML 2023): the logarithm of the median is a weighted sum of those of "
    "five games' mean scores. The weights are fitted anew to the authors' data, and off by about "
    "9 % on average over the same data; the interval leaves that out."
)


def write(output_dir: pathlib.Path) -> list[pathlib.Path]:
    """Writes report.html and report.md from every `<suite>.jsonl` in a folder.

    Returns:
        The files that it wrote.

    Raises:
        UserError: there are no records, a line is not a record, or the disk is not writable.
    """
    suites = [
        SuiteRecords(
            name, records.read(output_dir / f"{name}.jsonl"), ledger.asked(output_dir, name)
        )
        for name in ledger.suites_in(output_dir)
    ]
    if not any(suite.records for suite in suites):
        raise UserError(
            f"no records of runs in {output_dir}; run a suite first: --suite=smoke "
            f"--output_dir={output_dir}"
        )
    blocks = _blocks(suites)
    written = {_HTML: page.render(blocks), _MARKDOWN: document.to_markdown(blocks, _HTML)}
    for name, text in written.items():
        write_text(output_dir / name, text)
    return [output_dir / name for name in written]


class SuiteRecords(NamedTuple):
    """What a folder has of one suite."""

    name: str
    records: Sequence[Record]
    asked: Asked

    @property
    def groups(self) -> list[Group]:
        """Of the records."""
        return results.groups(self.records, self.asked.num_seeds) if self.records else []

    @property
    def num_seeds(self) -> int:
        """The most that were asked for, of every experiment."""
        return results.most_seeds(self.records, self.asked.num_seeds)

    @property
    def not_begun(self) -> list[str]:
        """Names of experiments without any record."""
        return results.not_begun(self.name, self.records, self.asked.experiments)


def _blocks(suites: Sequence[SuiteRecords]) -> list[Block]:
    groups = [group for suite in suites for group in suite.groups]
    return [
        Heading("Benchmark report", level=1),
        *_completeness(suites, groups),
        *_unlike(groups),
        Paragraph(_READING),
        *(block for group in groups for block in _group_blocks(group, groups)),
    ]


def _completeness(suites: Sequence[SuiteRecords], groups: Sequence[Group]) -> Iterator[Block]:
    """What was asked for and is not there, before anything else is said."""
    not_begun = [(suite, name) for suite in suites for name in suite.not_begun]
    pairs = [(group, pair) for group in groups for pair in group.pairs]
    missing = (
        (group.suite, f"no record of {wording.seeds(pair.missing)}", pair.name)
        for group, pair in pairs
        if pair.missing
    )
    points = [
        *_grouped(((suite.name, "no run has ended", name) for suite, name in not_begun), groups),
        *_grouped(missing, groups),
        *(f"{group.suite}, {point}" for group, pair in pairs for point in _unscored(pair)),
    ]
    asked = sum(pair.seeds for _, pair in pairs)
    asked += sum(suite.num_seeds for suite, _ in not_begun)
    done = sum(len(pair.finished) for _, pair in pairs)
    if not points:
        yield Paragraph(f"All {wording.count(asked, 'run')} that were asked for have finished.")
        return
    said = (
        f"Incomplete: {done} of {wording.count(asked, 'run')} have finished, and no others count."
    )
    yield Notice(said, tuple(points))
    failed = [record for _, pair in pairs for record in pair.failed]
    if failed:
        yield Details("What the failed runs said last", tuple(_failures(failed)))


def _unscored(pair: Pair) -> Iterator[str]:
    for record in pair.failed:
        yield f"{pair.name}: seed {record['seed']} failed: {records.last_words(record)}"
    if pair.unscored:
        seeds = wording.seeds([record["seed"] for record in pair.unscored])
        yield f"{pair.name}: {seeds} finished without a score."


def _unlike(groups: Sequence[Group]) -> Iterator[Block]:
    """Where the runs of a pair are not of one kind."""
    unlike = (
        (group.suite, what, pair.name)
        for group in groups
        for pair in group.pairs
        for what in provenance.differences(pair.finished)
    )
    points = _grouped(unlike, groups)
    if points:
        yield Notice("Not all of a line was made alike; see how each run was made.", points)


def _grouped(said: Iterable[tuple[str, str, str]], groups: Sequence[Group]) -> tuple[str, ...]:
    """A sentence for each suite and what is said of it, with the names of what it is said of."""
    names: dict[tuple[str, str], list[str]] = {}
    for suite, what, name in said:
        names.setdefault((suite, what), []).append(name)
    lines = Counter(group.suite for group in groups for _ in group.pairs)
    return tuple(
        f"{suite}, {what}: {'every line' if 1 < lines[suite] == len(of) else '; '.join(of)}."
        for (suite, what), of in names.items()
    )


def _failures(failed: Sequence[Record]) -> Iterator[Block]:
    for record in failed:
        agent = wording.agent(record["algorithm"])
        name = f"{agent} on {record['environment']}, seed {record['seed']}"
        yield Paragraph(f"{record['suite']}, {name}:")
        yield Listing(record["error"])


def _group_blocks(group: Group, groups: Sequence[Group]) -> Iterator[Block]:
    of_suite = [other for other in groups if other.suite == group.suite]
    agents = wording.listed([wording.agent(algorithm) for algorithm in group.algorithms])
    yield Heading(group.suite if len(of_suite) == 1 else f"{group.suite}: {agents}")
    yield Paragraph(f"Protocol: {group.protocol}. {_SCORES[group.score]}")
    yield tables.overview(group)
    yield tables.what_was_run(group)
    yield from _of_each_environment("Learning curves", _CURVES, figures.learning_curves, group)
    yield from _environments(group)
    if group.is_atari:
        yield from _atari(group)
    else:
        draw = figures.environment_profiles
        yield from _of_each_environment("Performance profiles", _PROFILES, draw, group)
    yield from _improvement(group)
    yield Heading("Wall-clock and speed", level=3)
    yield Paragraph(_SPEED)
    yield tables.speeds(group)
    yield Heading("How each number was made", level=3)
    yield provenance.details(group)


def _of_each_environment(
    title: str, text: str, draw: Callable[[Group, str], Figure | None], group: Group
) -> Iterator[Block]:
    drawn = [draw(group, name) for name in group.environments]
    if any(drawn):
        yield Heading(title, level=3)
        yield Paragraph(text)
        yield Figures(tuple(figure for figure in drawn if figure))


def _environments(group: Group) -> Iterator[Block]:
    yield Heading("Scores", level=3)
    if table := tables.budgets(group):
        yield table
    for name in group.environments:
        yield tables.environment(group, name)
        if table := tables.elsewhere(group, name):
            count = wording.count(len(table.rows), "score")
            summary = f"{name}: {count} published under other protocols, not comparable"
            yield Details(summary, (table,))


def _atari(group: Group) -> Iterator[Block]:
    yield Heading("Human-normalised scores", level=3)
    yield Paragraph(_NORMALISED)
    yield atari_tables.aggregates(group)
    drawn = [figures.profiles(group), figures.normalised_curves(group)]
    if any(drawn):
        yield Figures(tuple(figure for figure in drawn if figure))
    yield atari_tables.normalised(group)
    if table := atari_tables.atari5(group):
        yield Paragraph(_ATARI5)
        yield table


def _improvement(group: Group) -> Iterator[Block]:
    if table := tables.improvement(group):
        yield Heading("Probability of improvement", level=3)
        yield Paragraph(_IMPROVEMENT)
        yield table
