"""Writes the report of a search as Markdown and HTML, and its best configuration as a gin file."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence

from pipeline import configuration
from pipeline.benchmarks import formatting, page, records, report_tables
from pipeline.benchmarks.figures import SERIES, Figure, inline, inline_svg, panel
from pipeline.benchmarks.markdown import code, details, escaped, listing, notice, table
from pipeline.benchmarks.planned_runs import expanded, plan
from pipeline.configuration.statements import shipped_folder
from pipeline.runs.run_folder import RunFolder
from pipeline.tuning.halving import (
    FINISHED,
    NOT_CONTINUED,
    Trial,
    best_first,
    best_trial,
    bracket,
    ready_jobs,
    trained_steps,
    trial_states,
)
from pipeline.tuning.search import Search, Told, short_name
from pipeline.tuning.search_folder import read_search, read_settings, read_trials
from pipeline.utils.errors import UserError, last_line
from pipeline.utils.progress import score_text

_HTML, _MARKDOWN, _BEST = "report.html", "report.md", "best.gin"
_FEWEST = 4  # trials with values; fewer say nothing about importance
_IMPORTANCE = (
    "How much of the differences between the best trials and the others a parameter explains, over "
    "the distributions of the search (PED-ANOVA, Watanabe et al. 2023). It says nothing about "
    "values outside of the search, and little after few trials."
)
_SELECTION = (
    "The best value of many trials is too high on average, because it was selected. Train the "
    "best configuration with new seeds before you quote a number."
)


def write(output_dir: pathlib.Path) -> list[pathlib.Path]:
    """Writes report.html, report.md and best.gin from the records of a search.

    Returns:
      The files that were written.

    Raises:
      UserError: If no trial has a value yet, a file is damaged, or the disk is not writable.
    """
    search, trials = read_search(output_dir), read_trials(output_dir)
    best = best_trial(trials)
    if best is None:
        failed = [trial for trial in trials.values() if trial.error is not None]
        if failed and len(failed) == len(trials):
            raise UserError(
                f"all {len(failed)} trials failed. The last one ended with: "
                f"{last_line(failed[-1].error or '')}\nTheir output is in "
                f"{output_dir / search.name}/trial-*/seed-*.log."
            )
        raise UserError(
            f"no trial in {output_dir} has been evaluated yet. Run the search until a trial "
            "reaches its first rung."
        )
    figures = list(_figures(search, trials))
    unlike = list(_differences(search, output_dir))
    texts = {
        _MARKDOWN: _text(search, trials, best, unlike, ""),
        _HTML: page.render(_text(search, trials, best, unlike, inline(figures))),
        _BEST: _best_gin(search, best, _count(trials), output_dir),
    }
    return page.write_files(output_dir, texts)


def _count(trials: Mapping[int, Trial]) -> str:
    """Returns the number of trials that have a value or have failed: "11 trials"."""
    known = [trial for trial in trials.values() if trial.returns or trial.error is not None]
    return formatting.count(len(known), "trial")


def _best_gin(search: Search, best: Trial, of: str, folder: pathlib.Path) -> str:
    """Returns the configuration of the best trial as a gin file to be written into `folder`."""
    try:
        path = configuration.find_config(search.config)
        bindings = [line for text in search.bindings for line in expanded(text)]
    except UserError as error:
        raise UserError(
            f"{error} Run the command in the folder of the search's command."
        ) from error
    shipped = shipped_folder()
    is_shipped = path.is_relative_to(shipped)
    from_folder = os.path.relpath(path.resolve(), folder.resolve())
    config = str(path.relative_to(shipped)) if is_shipped else from_folder
    return "\n".join(
        [
            f"# Trial {best.number} of the search {search.name}, the best of {of}.",
            "#",
            f"# Its mean return was {score_text(best.value(-1))} over {_seeds(search)}, after "
            f"{search.ends[len(best.returns) - 1]:,} environment steps.",
            "",
            f"include {config!r}",
            "",
            f"train.num_env_steps = {search.num_env_steps:_}",
            *bindings,
            *_changes(search, folder),
            *(f"{name} = {value!r}" for name, value in best.parameters.items()),
            "",
        ]
    )


def _changes(search: Search, folder: pathlib.Path) -> Iterator[str]:
    """Yields lines that undo what has changed in the gin files since the search began."""
    (run, *_) = plan(search.suite(0, {}), folder, (), ["--allow_gin_imports"])
    of_trials = {*map(short_name, search.parameters)}
    then, now = (
        {name: value for name, value in settings.items() if name not in of_trials}
        for settings in (read_settings(folder), run.settings)
    )
    if changed := {name: value for name, value in then.items() if now.get(name) != value}:
        yield "# Gin files have changed since the search, which began with these values."
        yield from (f"{name} = {value}" for name, value in changed.items())
    if then and (new := now.keys() - then.keys()):
        yield f"# When the search began, the gin files did not bind {', '.join(sorted(new))}."


def _differences(search: Search, folder: pathlib.Path) -> Iterator[str]:
    """Yields descriptions of how the programs and machines of the search's runs differ."""
    runs = sorted((folder / search.name).glob("trial-*/seed-*/run.json"))
    starts = [RunFolder(path.parent).read_json(path.name) for path in runs]
    yield from report_tables.differences_of_programs(
        [{**start, "earlier_revisions": records.earlier_revisions(start)} for start in starts]
    )


def _seeds(search: Search) -> str:
    return formatting.count(search.num_seeds, "seed")


def _text(
    search: Search,
    trials: Mapping[int, Trial],
    best: Trial,
    unlike: Sequence[str],
    figures: str,
) -> str:
    states = _states(search, trials)
    blocks = [
        f"# Search {escaped(search.name)}\n",
        *_best(search, trials, best),
        notice("Not all runs were made alike.", unlike) if unlike else "",
        *_savings(search, trials, states),
        *_importances(search, trials),
        f"## Values of the parameters\n\n{figures}" if figures else "",
        "## All trials\n",
        _all_trials(search, trials, states),
        *_failures(trials),
    ]
    return "\n".join(block for block in blocks if block)


def _best(search: Search, trials: Mapping[int, Trial], best: Trial) -> Iterator[str]:
    returns = best.returns[-1]
    after = f"{search.ends[len(best.returns) - 1]:,} environment steps"
    yield notice(
        f"The best of {_count(trials)} is trial {best.number}: mean return "
        f"{score_text(best.value(-1))} over {_seeds(search)} after {after}.",
        [f"{code(f'{name} = {value!r}')}" for name, value in best.parameters.items()],
    )
    if len(returns) > 1:
        of_seeds = ", ".join(score_text(x) for x in returns)
        yield f"Returns of seeds 1 to {len(returns)}: {of_seeds}.\n"
    yield f"[{_BEST}]({_BEST}) is this configuration: `--gin_file={_BEST}`. {_SELECTION}\n"


def _savings(
    search: Search, trials: Mapping[int, Trial], states: Mapping[int, str]
) -> Iterator[str]:
    """Yields what pausing trials has saved."""
    if not search.rungs:
        return
    rungs = " and ".join(f"{rung:,}" for rung in search.rungs)
    text = (
        f"Trials were compared after {rungs} environment steps, and 1 of every "
        f"{search.reduction} continued."
    )
    ended = {n: x for n, x in trials.items() if states[n] in (FINISHED, NOT_CONTINUED)}
    if ended:
        trained = trained_steps(search, ended)
        whole = search.num_env_steps * search.num_seeds * len(ended)
        text += (
            f" {formatting.count(len(ended), 'trial')} ended without a failure and took about "
            f"{trained:,} environment steps; training all of them to the end would have taken "
            f"{whole:,}, so {1 - trained / whole:.0%} were saved."
        )
    yield f"{text}\n"


def _importances(search: Search, trials: Mapping[int, Trial]) -> Iterator[str]:
    # Trials of one rung are comparable: these are the values at the first.
    told = [
        Told(trial.parameters, [trial.value(0)], is_complete=True)
        for trial in trials.values()
        if trial.returns
    ]
    if len(told) < _FEWEST or len(search.parameters) < 2:
        return
    if len({trial.returns[0] for trial in told if trial.returns}) == 1:  # nothing to explain
        return
    import optuna

    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    of = optuna.importance.get_param_importances(search.study(told), evaluator=evaluator)
    rows = [(code(name), f"{share:.2f}") for name, share in of.items()]
    after = f"after {search.ends[0]:,} steps"
    yield f"## Importance\n\n{_IMPORTANCE}\n"
    yield table(f"Importance for the return {after}", ["parameter", "share"], rows)


def _all_trials(search: Search, trials: Mapping[int, Trial], states: Mapping[int, str]) -> str:
    returns = [f"return after {end:,} steps" for end in search.ends]
    columns = ["trial", "state", *(code(name) for name in search.parameters), *returns]
    rows = [
        [
            str(trial.number),
            states[trial.number],
            *(escaped(repr(trial.parameters[name])) for name in search.parameters),
            *(score_text(trial.value(rung)) for rung in range(len(trial.returns))),
            *[""] * (len(search.ends) - len(trial.returns)),
        ]
        for trial in best_first(trials)
    ]
    return table(f"All trials, best first; means over {_seeds(search)}", columns, rows)


def _states(search: Search, trials: Mapping[int, Trial]) -> dict[int, str]:
    """Returns the state of each trial in words, by number."""
    num_trials = len(trials)
    if any(ready_jobs(search, trials, num_trials)):
        # The search goes on, and may add trials to the last bracket.
        num_trials = bracket(search, num_trials, sys.maxsize).stop
    return trial_states(search, trials, num_trials)


def _failures(trials: Mapping[int, Trial]) -> Iterator[str]:
    failed = [trial for trial in trials.values() if trial.error is not None]
    if failed:
        texts = [
            f"Trial {trial.number} ({escaped(trial.in_words)}): {escaped(last_line(trial.error))}"
            f"\n\n{listing(trial.error)}"
            for trial in failed
            if trial.error is not None
        ]
        count = formatting.count(len(failed), "trial")
        yield details(f"The last output of {count} that failed", "\n".join(texts))


def _figures(search: Search, trials: Mapping[int, Trial]) -> Iterator[Figure]:
    known = [trial for _, trial in sorted(trials.items()) if trial.returns]
    yield _figure(search, known, "trial", "Return of each trial", "the trial's number")
    for name in search.parameters:
        yield _figure(search, known, name, name, f"the value of {name}")


def _figure(search: Search, known: Sequence[Trial], x: str, title: str, what: str) -> Figure:
    """Draws the last returns over a parameter, or over "trial", with a colour for each rung."""
    kind, *choices = search.parameters.get(x, ("int",))
    with panel() as (canvas, axes):
        if kind == "choice":
            axes.set_xticks(range(len(choices)), [repr(choice) for choice in choices])
        elif kind.startswith("log"):
            axes.set_xscale("log")
        for rung, end in enumerate(search.ends):
            of_rung = [trial for trial in known if len(trial.returns) == rung + 1]
            values = [trial.parameters.get(x, trial.number) for trial in of_rung]
            if of_rung:
                axes.plot(
                    [choices.index(value) for value in values] if kind == "choice" else values,
                    [trial.value(-1) for trial in of_rung],
                    "o",
                    markersize=5,
                    color=SERIES[rung % len(SERIES)],
                    label=f"after {formatting.short(end)} steps",
                )
        axes.set_xlabel(x)
        axes.set_ylabel("return")
        svg = inline_svg(canvas)
    return Figure(title, f"Return at the last rung over {what}.", svg)
