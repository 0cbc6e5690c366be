import contextlib
import html.parser
import itertools
import json
import math
import pathlib
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import markdown
import pytest
from benchmark_records import (
    CLASSIC,
    DOPAMINE,
    OPENAI,
    make_failed,
    make_games,
    make_record,
    write_records,
)

from pipeline.benchmarks import (
    figures,
    formatting,
    interval_estimates,
    published_scores,
    report,
    suites,
)
from pipeline.benchmarks.records import Record
from pipeline.utils import errors, progress

SEEDS = (1, 2, 3, 4, 5)
NUMBER = r"-?[\d,]+(?:\.\d+)?"
MACHINES = "made on different machines, in different precisions or with different versions"
SCORE, MEAN = "score: IQM [95 % interval] (runs)", "mean [95 % interval]"
BEST = "best published: same agent, protocol and steps"
FEW = {"_RESAMPLES": 1_000, "_RESAMPLES_OF_CURVES": 100}


@pytest.fixture(scope="module", autouse=True)
def few_resamples():
    """Resamples less for intervals, of which these tests only say that they are there."""
    with mock.patch.dict(vars(interval_estimates), FEW):
        yield


class Report:
    """Report of a folder, or one of its sections, parsed from its Markdown."""

    def __init__(self, folder: pathlib.Path, section: str = "") -> None:
        self.text = (folder / "report.md").read_text()
        if section:
            _, heading, rest = self.text.partition(f"\n## {section}\n")
            self.text = heading + rest.partition("\n## ")[0]
        self.html = (folder / "report.html").read_text()
        self.tables: list[tuple[str, list[dict[str, str]]]] = []
        caption = ""
        for is_table, lines in itertools.groupby(
            self.text.splitlines(), lambda line: line.startswith("| ")
        ):
            block = list(lines)
            if is_table:
                titles, _, *rows = [_cells(line) for line in block]
                self.tables.append((caption, [dict(zip(titles, x, strict=True)) for x in rows]))
            else:
                captions = [line for line in block if re.fullmatch(r"\*\*.*\*\*", line)]
                caption = _plain(captions[-1][2:-2]) if captions else ""

    @property
    def notices(self) -> list[str]:
        """Returns the lines in block quotes: headlines and points."""
        lines = [line for line in self.text.splitlines() if line.startswith("> ")]
        return [_plain(line.removeprefix("> ").removeprefix("- ").strip("*")) for line in lines]

    def rows(self, caption: str) -> list[dict[str, str]]:
        """Returns the rows of the one table with this caption, as cells by column."""
        (rows,) = [rows for title, rows in self.tables if title == caption]
        return rows


def _cells(line: str) -> list[str]:
    return [_plain(cell.strip()) for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def _plain(text: str) -> str:
    text = re.sub(r"^`+ ?(.*?) ?`+$", r"\1", text)
    return re.sub(r"\\(.)", r"\1", text)


def write(tmp_path: pathlib.Path, records: Sequence[Record], draws: bool = False) -> Report:
    """Writes a report; without `draws`, figures are made, but empty, which saves half the time."""
    folder = write_records(tmp_path / f"{records[0]['suite']}.jsonl", records)
    empty = mock.patch.object(figures, "inline_svg", lambda canvas: "<svg></svg>")
    with contextlib.nullcontext() if draws else empty:
        paths = report.write(folder)
    assert sorted(path.name for path in paths) == ["report.html", "report.md"]
    return Report(tmp_path)


def cartpole(**fields) -> list[Record]:
    """Returns records of two agents in the same environment."""
    fields = {"num_seeds": 5, **fields}
    dqn = [make_record("dqn", seed=seed, **fields) for seed in SEEDS]
    ppo = {"num_env_steps": 100_000, "returns": (20.0, 490.0), **fields}
    return dqn + [make_record("ppo", seed=seed, **ppo) for seed in SEEDS]


def games() -> list[Record]:
    """Returns records of the five games under two protocols."""
    ends = {
        "battle_zone": 20_000.0,
        "double_dunk": -5.0,
        "name_this_game": 6000.0,
        "phoenix": 5000.0,
        "qbert": 8000.0,
    }
    fields: dict[str, Any] = {
        "suite": "five",
        "num_env_steps": 10_000_000,
        "budgets": [2_500_000, 10_000_000],
    }
    ppo = make_games("ppo", ends, (1, 2), protocol=OPENAI, num_seeds=2, **fields)
    return make_games("dqn", ends, num_seeds=3, **fields) + ppo


@pytest.fixture(scope="module")
def everything(tmp_path_factory) -> pathlib.Path:
    """Writes a report of two suites, one of which has two protocols, and returns its folder."""
    folder = tmp_path_factory.mktemp("everything")
    write_records(folder / "five.jsonl", games())
    write(folder, cartpole(), draws=True)
    return folder


def dqn_games() -> list[Record]:
    return [record for record in games() if record["algorithm"] == "dqn"]


@pytest.fixture
def dqn_report(everything) -> Report:
    return Report(everything, "five: DQN")


@pytest.fixture
def cartpole_report(everything) -> Report:
    return Report(everything, "trial")


def value(text: str) -> float:
    return float(text.replace(",", ""))


def estimate(cell: str) -> tuple[float, float, float, int]:
    """Returns the numbers of "IQM [low, high] (n)"."""
    match = re.fullmatch(rf"({NUMBER}) \[({NUMBER}), ({NUMBER})\] \((\d+)\)", cell)
    assert match, cell
    point, low, high, n = map(value, match.groups())
    return point, low, high, int(n)


def middle_half(values: Sequence[float]) -> float:
    ordered, cut = sorted(values), len(values) // 4
    return statistics.fmean(ordered[cut : len(values) - cut])


def final(records: Sequence[Record], algorithm: str, environment: str) -> list[float]:
    """Returns the final score of each run."""
    own = [r for r in records if (r["algorithm"], r["environment"]) == (algorithm, environment)]
    if own[0]["score"] == "training":
        return [r["curve"][-1][1] for r in own]
    return [statistics.fmean(r["evaluation_returns"]) for r in own]


def test_the_first_table_tells_who_is_best_by_how_much_and_how_sure_that_is(cartpole_report):
    records, written = cartpole(), cartpole_report
    caption, (row,) = written.tables[0]
    assert (caption, row["environment"]) == ("Who is best", "CartPole-v1")
    ours = {name: final(records, name, "CartPole-v1") for name in ("dqn", "ppo")}
    first, second = sorted(ours, key=lambda name: -middle_half(ours[name]))
    assert (row["best agent"], row["next"]) == (first.upper(), second.upper())
    lead = middle_half(ours[first]) - middle_half(ours[second])
    assert value(row["ahead by"]) == pytest.approx(lead, abs=0.051)
    wins = [(x > y) + (x == y) / 2 for x, y in itertools.product(ours[first], ours[second])]
    shown = estimate(row["probability that a run of the best scores more"])
    assert shown[0] == pytest.approx(statistics.fmean(wins), abs=0.0051)
    assert written.text.index("Who is best") < written.text.index("Results")


def test_an_agent_alone_is_the_best(tmp_path):
    ((_, (row,)), *_) = write(tmp_path, [make_record(num_seeds=1)]).tables
    assert (row["best agent"], row["next"], row["ahead by"]) == ("DQN", "", "")


def test_scores_are_those_of_an_independent_computation(cartpole_report):
    records = cartpole()
    rows = cartpole_report.rows("Results")
    assert [row["agent"] for row in rows] == ["DQN", "PPO"]
    for row, algorithm in zip(rows, ("dqn", "ppo"), strict=True):
        values = final(records, algorithm, "CartPole-v1")
        point, low, high, n = estimate(row[SCORE])
        assert n == 5
        assert point == pytest.approx(middle_half(values), abs=0.051)
        expected = interval_estimates.estimate([values])
        assert (low, high) == pytest.approx((expected.low, expected.high), abs=0.051)


def test_published_scores_stand_beside_ours_by_protocol(tmp_path):
    records = cartpole(noise=0.0, returns=(20.0, 499.0))
    written = write(tmp_path, records)
    rows = written.rows(f"CartPole-v1: {CLASSIC}")
    assert [row["by"] for row in rows[:2]] == ["this project", "this project"]
    ours_or_not = {(row["agent"], row["environment steps"]): row for row in rows[2:]}
    published = published_scores.published("CartPole-v1")
    peers = [p for p in published if p.protocol == CLASSIC]
    assert len(ours_or_not) == len(peers)
    for peer in peers:
        row = ours_or_not[peer.algorithm.upper(), f"{peer.env_steps:,}"]
        assert row[SCORE] == f"{peer.score:.1f} ({peer.num_runs})"
        same_budget = {"dqn": 50_000, "ppo": 100_000}.get(peer.algorithm) == peer.env_steps
        assert row["ours at or above?"] == ("no" if same_budget else "")
    elsewhere = written.rows("CartPole-v1: published under other protocols, not comparable")
    others = [p for p in published if p.protocol != CLASSIC]
    assert others
    assert [row["protocol"] for row in elsewhere] == [p.protocol for p in others]
    assert not {row["by"] for row in elsewhere} & {row["by"] for row in rows}


@pytest.mark.parametrize(
    ("returns", "verdict"), [((500.0,), "yes"), ((499.96,), "yes"), ((499.9,), "no")]
)
def test_comparison_is_of_numbers_as_printed(tmp_path, returns, verdict):
    (row,) = write(tmp_path, [make_record(evaluation_returns=list(returns))]).rows("Results")
    assert row[BEST] == "500.0 (1), RL Zoo DQN"
    assert row["mean at or above?"] == verdict


def test_a_failed_seed_counts_in_the_comparison_though_not_in_the_interquartile_mean(tmp_path):
    runs = [500.0, 500.0, 500.0, 500.0, 100.0]
    records = [
        make_record(seed=seed, num_seeds=5, evaluation_returns=[run])
        for seed, run in enumerate(runs, start=1)
    ]
    (row,) = write(tmp_path, records).rows("Results")
    assert row[SCORE].startswith("500.0 ")
    assert row[MEAN].startswith("420.0 [")
    assert row["mean at or above?"].startswith("no")


def test_score_below_but_within_the_interval_says_so(tmp_path):
    runs = [488.0, 492.0, 496.0, 510.0, 511.0]
    records = [
        make_record(seed=seed, num_seeds=5, evaluation_returns=[run])
        for seed, run in enumerate(runs, start=1)
    ]
    (row,) = write(tmp_path, records).rows("Results")
    assert row[MEAN].startswith("499.4 [")
    assert row["mean at or above?"] == "no, but in its interval"
    (row,) = write(tmp_path, records[:4]).rows("Results")  # too few runs for such a claim
    assert row["mean at or above?"] == "no"


@pytest.mark.parametrize(
    "changed", [{"protocol": "by ear"}, {"num_env_steps": 70_000}, {"algorithm": "a3c"}]
)
def test_other_protocol_or_budget_is_not_compared(tmp_path, changed):
    (row,) = write(tmp_path, [make_record() | changed]).rows("Results")
    assert (row[BEST], row["mean at or above?"]) == ("none", "")


def test_another_version_of_the_environment_is_noted(tmp_path):
    record = make_record("ppo", "LunarLander-v3", num_env_steps=1_000_000)
    (row,) = write(tmp_path, [record]).rows("Results")
    assert row[BEST] == "242.1 (1), RL Zoo PPO (v2)"
    assert row["mean at or above?"] == "yes; theirs is v2"


def test_single_runs_have_no_interval(tmp_path):
    written = write(tmp_path, [make_record("dqn", num_seeds=1), make_record("ppo", num_seeds=1)])
    for row in written.rows("Results"):
        assert re.fullmatch(rf"{NUMBER} \(1\)", row[SCORE])
    (row,) = written.rows("Probability of improvement [95 % interval] (runs)")
    assert row["probability"] in {"0.00 (2)", "1.00 (2)"}


def test_a_mean_over_environments_of_which_one_has_a_single_run_has_no_interval(tmp_path):
    records = cartpole()
    records += [make_record(x, "Acrobot-v1", num_seeds=5) for x in ("dqn", "ppo")]
    rows = write(tmp_path, records).rows("Probability of improvement [95 % interval] (runs)")
    shown = {row["environment"]: row["probability"] for row in rows}
    assert "[" in shown["CartPole-v1"]
    assert re.fullmatch(r"0\.\d\d \(12\)", shown["mean of 2 environments"])


def test_agents_that_tie_share_no_interval_and_budgets_are_shown(tmp_path):
    fields: dict[str, Any] = {"evaluation_returns": [500.0], "num_seeds": 3}
    records = [make_record("a2c", seed=s, num_env_steps=500_000, **fields) for s in (1, 2, 3)]
    records += [make_record("dqn", seed=s, num_env_steps=50_000, **fields) for s in (1, 2, 3)]
    records += [make_record("ppo", evaluation_returns=[90.0], num_seeds=1)]
    (row,) = write(tmp_path, records).rows("Who is best")
    assert row["best agent"] == "A2C, DQN"
    assert row[SCORE] == "500.0"
    assert row["environment steps"].startswith("500,000 against 50,000")


def test_agents_whose_scores_look_equal_tie_even_if_one_is_a_round_number(tmp_path):
    scores = {"a2c": 5.004, "dqn": 5.0, "ppo": 4.996, "sac": 1.0}
    records = [
        make_record(name, evaluation_returns=[score], num_seeds=1) for name, score in scores.items()
    ]
    (row,) = write(tmp_path, records).rows("Who is best")
    assert (row["best agent"], row[SCORE]) == ("A2C, DQN, PPO", "5.00")
    assert (row["next"], row["ahead by"]) == ("SAC", "4.00")


def test_scores_are_printed_with_no_more_decimals_than_were_published(tmp_path):
    def published(score, decimals):
        any_score = published_scores.published("pong")[0]
        return any_score._replace(score=score, decimals=decimals, spread=None, num_runs=None)

    def verdict(ours, theirs):
        return formatting.verdict(interval_estimates.estimate([[ours]]), theirs)

    assert formatting.published(published(5.5, 1)) == "5.5"
    assert verdict(5.47, published(5.5, 1)) == "yes"
    assert verdict(5.44, published(5.5, 1)) == "no"
    assert verdict(-4.23, published(-4.2, 1)) == "yes"
    assert formatting.published(published(0.0, 1)) == "0.0"
    assert formatting.published(published(1234.56, 2)) == "1,235"
    with_spread = published(20.0, 2)._replace(spread=0.25)
    assert formatting.published(with_spread) == "20.0 ± 0.2"


def test_no_number_is_minus_zero():
    for value in (-0.0, -0.0004, 0.0):
        assert not progress.score_text(value).startswith("-")
    assert formatting.interval(interval_estimates.Estimate(0.4, -0.3, 1500.0, 5, 5)) == (
        "0 [0, 1,500] (5)"
    )


def test_finished_runs_without_a_score_are_not_called_unfinished(tmp_path):
    (row,) = write(tmp_path, [make_record(evaluation_returns=[])]).rows("Results")
    assert row[SCORE] == "no score"


def test_the_folder_of_a_search_is_named(tmp_path):
    (tmp_path / "search.json").write_text("{}")
    with pytest.raises(errors.UserError, match="is the folder of a search"):
        report.write(tmp_path)


def test_incomplete_suite_says_so_first_and_what_is_missing_last(tmp_path):
    error = "exit code 1\nTraceback:\nValueError: <loss> is | not *finite* & so on"
    records = [
        make_record(seed=1, num_seeds=6),
        make_record(seed=2, num_seeds=6),
        make_record(seed=3, num_seeds=6, evaluation_returns=[]),
        make_failed("dqn", "CartPole-v1", 5, error, num_seeds=6),
        make_failed("sac", "Pendulum-v1", 1, "killed by SIGKILL", num_seeds=3),
        make_record("ppo", "Pendulum-v1", seed=1, num_seeds=1),
    ]
    written = write(tmp_path, records, draws=True)
    assert written.notices[0].startswith("Incomplete: 4 of 10 runs have finished")
    assert written.notices[-5:] == [
        "trial, no record of seeds 4, 6: DQN on CartPole-v1.",
        "trial, no record of seeds 2 to 3: SAC on Pendulum-v1.",
        "trial, DQN on CartPole-v1: seed 5 failed: exit code 1: "
        "ValueError: <loss> is | not *finite* & so on",
        "trial, DQN on CartPole-v1: seed 3 finished without a score.",
        "trial, SAC on Pendulum-v1: seed 1 failed: killed by SIGKILL",
    ]
    assert written.text.index("Incomplete: 4 of 10") < written.text.index("## trial")
    assert error in written.text
    dqn, _, sac = written.rows("What was run")
    assert (dqn["finished"], dqn["failed"], dqn["missing"]) == ("3 of 6", "1", "2")
    assert (sac["finished"], sac["failed"], sac["missing"]) == ("0 of 3", "1", "2")
    dqn, _, sac = written.rows("Results")
    assert dqn[SCORE].endswith("(2 of 6)")
    assert sac[SCORE] == "no finished run"
    statuses = [row["status"] for row in written.rows("Runs")]
    assert statuses == 3 * ["finished"] + ["failed", "finished", "failed"]


@pytest.mark.parametrize(
    ("of_second", "said"),
    [
        ({"config_sha256": "another"}, "made with different configurations"),
        ({"git_revision": "another"}, "made by different revisions"),
        ({"earlier_revisions": ["another"]}, "made by different revisions"),
        ({"source_sha256": "another"}, "made by different source"),
        ({"own_modules": {"my_envs": "another"}}, "made with different modules of your own"),
        ({"cpu_model": "another"}, MACHINES),
        ({"device": "another"}, MACHINES),
        ({"encoder_precision": "mixed_bfloat16"}, MACHINES),
        ({"budgets": [25_000]}, "recorded with different suite.budgets"),
        ({"inexact_resumes": 1}, "not resumed bit for bit: seed 2"),
    ],
)
def test_runs_that_were_not_made_alike_are_noted_below_the_results(tmp_path, of_second, said):
    records = [make_record(seed=1, num_seeds=2), make_record(seed=2, num_seeds=2, **of_second)]
    written = write(tmp_path, records)
    assert written.notices[1:] == [f"trial, {said}: DQN on CartPole-v1."]
    assert written.text.index(said) > written.text.index("Learning curves")
    assert "All runs that were asked for have finished (2 runs)." in written.text


def test_what_a_record_does_not_know_is_no_difference(tmp_path):
    known = make_record(seed=1, num_seeds=3)
    more = make_record(seed=2, num_seeds=3, own_modules={"my_envs": "cd", "my_agents": "ef"})
    newer = "source_sha256", "own_modules", "device", "encoder_precision"
    older = {k: v for k, v in make_record(seed=3, num_seeds=3).items() if k not in newer}
    assert not write(tmp_path, [known, more, older]).notices[1:]


def test_what_is_said_of_every_line_does_not_name_them_all(tmp_path):
    records = [
        make_record(seed=seed, num_seeds=2, algorithm=algorithm, git_revision=f"revision {seed}")
        for algorithm in ("dqn", "ppo")
        for seed in (1, 2)
    ]
    notices = write(tmp_path, records).notices
    assert notices[1:] == ["trial, made by different revisions: every line."]


def test_all_revisions_of_a_run_are_listed(tmp_path):
    records = [make_record(num_seeds=2, earlier_revisions=["ab"], git_revision="cd")]
    records.append(make_failed("dqn", "CartPole-v1", 2, "killed", num_seeds=2))
    first, second = write(tmp_path, records).rows("Runs")
    assert (first["git revision"], first["inexact resumes"]) == ("ab, cd", "0")
    assert (second["git revision"], second["inexact resumes"]) == ("", "")


def test_complete_suite_needs_no_notice_and_what_is_no_file_of_records_is_no_suite(tmp_path):
    written = write(tmp_path, cartpole())
    assert written.notices == []
    assert "All runs that were asked for have finished (10 runs)." in written.text
    (tmp_path / ".tmp-trial.jsonl").write_text((tmp_path / "trial.jsonl").read_text())
    (tmp_path / "lost.jsonl").symlink_to(tmp_path / "nothing")
    (tmp_path / "folder.jsonl").mkdir()
    assert write(tmp_path, cartpole()).text == written.text


def test_pairs_of_a_shipped_suite_without_any_record_are_missed(tmp_path):
    first, *others = suites.load("smoke").experiments
    record = make_record(first.algorithm, first.environment, suite="smoke", num_seeds=1)
    notices = write(tmp_path, [record]).notices
    assert notices[0].startswith(f"Incomplete: 1 of {1 + len(others)} runs have finished")
    names = "; ".join(experiment.name for experiment in others)
    assert notices[-1] == f"smoke, no run has ended: {names}."


def test_lines_without_a_record_are_named_however_many_lines_have_some(tmp_path):
    names = [f"{agent}-{env}" for agent in ("dqn", "ppo") for env in ("A-v1", "B-v1")]
    asked = {name: {"num_seeds": 1, "settings": {}} for name in names}
    (tmp_path / "trial.plan.json").write_text(json.dumps(asked))
    records = [make_record("dqn", env, num_seeds=1) for env in ("A-v1", "B-v1")]
    notices = write(tmp_path, records).notices
    assert notices[-1] == "trial, no run has ended: ppo-A-v1; ppo-B-v1."


def test_games_without_a_record_count_in_what_is_over_all_games(tmp_path):
    asked = {
        f"dqn-{game}": {"num_seeds": 1, "settings": {}} for game in ("pong", "qbert", "amidar")
    }
    (tmp_path / "five.plan.json").write_text(json.dumps(asked))
    record = make_games("dqn", {"pong": 10.0}, (1,), suite="five", num_seeds=1)
    rows = write(tmp_path, record).rows("Human-normalized scores over all games [95 % interval]")
    assert {row["games"] for row in rows} == {"1 of 3"}


def test_what_was_asked_for_and_never_begun_is_missed(tmp_path):
    asked = {"num_seeds": 3, "settings": {}}
    (tmp_path / "trial.plan.json").write_text(
        json.dumps({"dqn-CartPole-v1": asked, "ppo-CartPole-v1": asked})
    )
    (tmp_path / "other.plan.json").write_text(json.dumps({"sac-Pendulum-v1": asked}))
    notices = write(tmp_path, [make_record(num_seeds=1)]).notices
    assert notices[0].startswith("Incomplete: 1 of 9 runs have finished")
    assert sorted(notices[-3:]) == [
        "other, no run has ended: sac-Pendulum-v1.",
        "trial, no record of seeds 2 to 3: DQN on CartPole-v1.",
        "trial, no run has ended: ppo-CartPole-v1.",
    ]


def test_a_suite_of_ones_own_may_have_a_shipped_one_s_name(tmp_path):
    asked = {"dqn-CartPole-v1": {"num_seeds": 1, "settings": {}}}
    (tmp_path / "smoke.plan.json").write_text(json.dumps(asked))
    assert write(tmp_path, [make_record(suite="smoke", num_seeds=1)]).notices == []


def test_probability_over_several_environments_is_their_mean(tmp_path):
    records = cartpole() + [
        make_record(algorithm, "Acrobot-v1", seed, num_seeds=5, returns=(-500.0, -80.0))
        for algorithm in ("dqn", "ppo")
        for seed in SEEDS
    ]
    caption = "Probability of improvement [95 % interval] (runs)"
    *each, overall = write(tmp_path, records).rows(caption)
    points = [estimate(row["probability"])[0] for row in each]
    assert [row["environment"] for row in each] == ["Acrobot-v1", "CartPole-v1"]
    assert each[1]["probability that"] == "DQN scores more than PPO"
    assert each[1]["environment steps"] == "50,000 against 100,000"
    assert overall["environment"] == "mean of 2 environments"
    mean = estimate(overall["probability"])
    assert mean[0] == pytest.approx(statistics.fmean(points), abs=0.0101)
    assert mean[3] == 20


def test_budgets_are_tabled_beside_those_published(tmp_path):
    records = make_games("dqn", {"pong": 1.0}, suite="small")
    rows = write(tmp_path, records).rows("Scores by environment steps")
    ours, theirs, verdicts = rows
    assert (ours["by"], theirs["by"]) == ("this project", "Dopamine (JAX)")
    columns = {250_000: "250,000 (1 M frames)", 2_500_000: "2,500,000 (10 M frames)"}
    for budget, column in columns.items():
        at = [next(y for x, y in r["curve"] if x >= budget) for r in records]
        assert estimate(ours[column])[0] == pytest.approx(middle_half(at), abs=0.051)
        (peer,) = [
            p
            for p in published_scores.published("pong", "dqn")
            if (p.env_steps, p.protocol) == (budget, DOPAMINE)
        ]
        digits = 1 if abs(peer.score) >= 10 else 2
        assert theirs[column] == f"{peer.score:.{digits}f} ± {peer.spread:.{digits}f} (5)"
        above = round(statistics.fmean(at), digits) >= round(peer.score, digits)
        assert verdicts[column].startswith("yes" if above else "no")


def test_no_score_is_given_for_a_budget_beyond_the_end(tmp_path):
    records = make_games("dqn", {"pong": 1.0}, suite="small")
    short = [record | {"num_env_steps": 1_000_000} for record in records]
    ours, *_ = write(tmp_path, short).rows("Scores by environment steps")
    assert ours["250,000 (1 M frames)"] and not ours["2,500,000 (10 M frames)"]


def test_atari_scores_are_normalized_by_random_and_human_ones(dqn_report):
    records = dqn_games()
    normalized = {}
    for row in dqn_report.rows("Human-normalized scores: 0 is random, 1 is human"):
        game = row["game"]
        low, high = published_scores.random_score(game), published_scores.human_score(game)
        shown = value(row["random"]), value(row["human"])
        assert shown == pytest.approx((low, high), abs=0.5)
        normalized[game] = [(x - low) / (high - low) for x in final(records, "dqn", game)]
        cell = estimate(row["human-normalized: IQM [95 % interval] (runs)"])
        assert cell[0] == pytest.approx(middle_half(normalized[game]), abs=0.00051)
    *_, end = dqn_report.rows("Human-normalized scores over all games [95 % interval]")
    runs = [score for of in normalized.values() for score in of]
    expected = {
        "IQM": middle_half(runs),
        "median": statistics.median(map(statistics.fmean, normalized.values())),
        "mean": statistics.fmean(runs),
        "optimality gap": statistics.fmean(1 - min(score, 1) for score in runs),
    }
    assert (end["games"], end["runs"]) == ("5 of 5", "15")
    for column, number in expected.items():
        assert estimate(f"{end[column]} (15)")[0] == pytest.approx(number, abs=0.00051)


def test_atari5_estimates_the_median_over_57_games(dqn_report):
    records = dqn_games()
    ours, *peers = dqn_report.rows(
        "Atari-5: the median human-normalized score over 57 games, estimated from five"
    )
    logarithm = 0.0
    for game, weight in published_scores.ATARI5_WEIGHTS.items():
        low, high = published_scores.random_score(game), published_scores.human_score(game)
        mean = statistics.fmean(final(records, "dqn", game))
        logarithm += weight * math.log10(1 + max(0, 100 * (mean - low) / (high - low)))
    point, low, high, _ = estimate(f"{ours['estimated median [95 % interval], %']} (15)")
    assert point == pytest.approx(10**logarithm - 1, abs=0.051)
    assert low <= point <= high
    known = [p for p in published_scores.published("phoenix") if p.protocol == DOPAMINE]
    assert peers and {row["by"] for row in peers} <= {p.peer for p in known}


def test_protocols_are_never_mixed(everything):
    written = Report(everything)
    for protocol, agent in ((DOPAMINE, "DQN"), (OPENAI, "PPO")):
        for game in published_scores.ATARI5_WEIGHTS:
            ours, *theirs = written.rows(f"{game}: {protocol}")
            assert (ours["agent"], ours["by"]) == (agent, "this project")
            known = [p for p in published_scores.published(game) if p.protocol == protocol]
            allowed = {(p.algorithm.upper(), p.peer) for p in known}
            assert {(row["agent"], row["by"]) for row in theirs} == allowed
    assert len([caption for caption, _ in written.tables if caption == "Results"]) == 3


def test_every_run_tells_how_it_was_made(cartpole_report):
    records, written = cartpole(), cartpole_report
    for row, record in zip(written.rows("Runs"), records, strict=True):
        assert row["command"] == record["command"]
        score = statistics.fmean(record["evaluation_returns"])
        assert value(row["score"]) == pytest.approx(score, abs=0.051)
        assert row["git revision"] == record["git_revision"]
        assert row["SHA-256 of the configuration"] == record["config_sha256"]
        assert row["SHA-256 of the weights"] == record["weights_sha256"]
        assert (row["seed"], row["machine"]) == (str(record["seed"]), "1")
    (machine,) = written.rows("Machines and software")
    assert machine["versions"] == "python 3.13.0, tensorflow 2.21.0, tf-agents 0.19.0"
    assert (machine["CPU"], machine["usable cores"]) == ("A Processor", "2")


def test_speeds_are_medians_with_their_range(tmp_path):
    seconds = {1: 24.0, 2: 60.0, 3: 3723.0}
    records = [
        make_record(seed=seed, wall_seconds=wall, env_steps_per_second=1000.0 * seed, workers=2)
        for seed, wall in seconds.items()
    ]
    (row,) = write(tmp_path, records).rows("Wall-clock and speed")
    assert row["wall-clock of a run, h:mm:ss: median [range]"] == "0:01:00 [0:00:24, 1:02:03]"
    assert row["environment steps/s: median [range]"] == "2,000 [1,000, 3,000]"
    assert row["runs at once, at most"] == "2"


class Page(html.parser.HTMLParser):
    """Elements of an HTML page; parsing fails where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in {"meta", "br", "use"}:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if tag not in {"meta", "br", "use"}:
            assert self._open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def attributes(self, name: str) -> list[Any]:
        return [attributes[name] for _, attributes in self.tags if name in attributes]


def test_page_needs_nothing_else(everything):
    text = (everything / "report.html").read_text()
    page = Page(text)
    assert not re.search(r"https?:|//\w|@import|<script|<link|javascript", text)
    assert not page.attributes("src")
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    references = page.attributes("href") + re.findall(r"url\(([^)]*)\)", text)
    assert references and {reference.removeprefix("#") for reference in references} <= set(ids)


def test_the_page_has_the_tables_of_the_markdown(everything):
    page, written = Page((everything / "report.html").read_text()), Report(everything)
    assert [tag for tag, _ in page.tags].count("table") == len(written.tables)
    words = " ".join(" ".join(page.words).split())
    for caption, rows in written.tables:
        assert caption in words
        assert " ".join(rows[0][next(iter(rows[0]))].split()) in words


def test_every_figure_is_there_and_described(everything):
    page, written = Page((everything / "report.html").read_text()), Report(everything)
    labels = [a["aria-label"] or "" for tag, a in page.tags if tag == "svg"]
    titles = [label.partition(". ")[0] for label in labels]
    per_group = [f"{x}: return while training" for x in sorted(published_scores.ATARI5_WEIGHTS)]
    per_group += [
        "Performance profiles over all games",
        "All games: human-normalized return while training",
    ]
    of_cartpole = ["CartPole-v1: return while training", "CartPole-v1: performance profiles"]
    assert titles == [*per_group, *per_group, *of_cartpole]
    said = [_plain(line) for line in written.text.splitlines()]
    assert all(f"- {label}" in said for label in labels)


def test_names_cannot_break_out(tmp_path):
    evil = '<script>alert("|`x`|")</script> [a](b) &lt;'
    fields: dict[str, Any] = {"config": evil, "command": evil, "cpu_model": evil, "protocol": evil}
    agent = "<script>a|*b*</script>"
    failed = make_failed(agent, evil, 2, evil, protocol=evil)
    written = write(tmp_path, [make_record(agent, evil, **fields), failed], draws=True)
    page = Page(written.html)
    assert "script" not in {tag for tag, _ in page.tags}
    assert not [a for tag, a in page.tags if tag == "a" and a["href"] == "b"]
    assert "".join(page.words).count(evil) >= 4
    run, _ = written.rows("Runs")
    assert (run["agent"], run["command"]) == (agent.upper(), evil)


def test_the_documentation_site_shows_every_table_of_the_markdown(everything):
    text = (everything / "report.md").read_text()
    site = markdown.markdown(text, extensions=["tables", "md_in_html"])
    assert site.count("<table>") == len(re.findall(r"^\| :?-", text, re.MULTILINE)) > 5


def test_same_records_give_the_same_bytes(everything, tmp_path):
    for path in everything.glob("*.jsonl"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    code = (
        "import pathlib, sys, matplotlib\n"
        "matplotlib.rcParams['font.size'] = 31\n"
        "from pipeline.benchmarks import interval_estimates, report\n"
        f"vars(interval_estimates).update({FEW})\n"
        "report.write(pathlib.Path(sys.argv[1]))\n"
        "assert 'tensorflow' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, tmp_path], check=True, timeout=120, env={"PYTHONHASHSEED": "7"}
    )
    for name in ("report.html", "report.md"):
        assert (tmp_path / name).read_bytes() == (everything / name).read_bytes()


def test_records_that_cannot_be_read_are_named(tmp_path):
    write(tmp_path, cartpole())
    error = PermissionError(13, "Permission denied")
    reason = "cannot read .*trial.jsonl: Permission denied"
    with (
        mock.patch.object(pathlib.Path, "open", side_effect=error),
        pytest.raises(errors.UserError, match=reason),
    ):
        report.write(tmp_path)


@pytest.mark.parametrize("content", [None, ""])
def test_folder_without_records(tmp_path, content):
    if content is not None:
        (tmp_path / "classic.jsonl").write_text(content)
    (tmp_path / "eval.jsonl").write_text('{"env_steps": 5, "returns": [1.0]}\n')  # a run's log
    with pytest.raises(errors.UserError, match="no records of runs in .*run a suite first"):
        report.write(tmp_path)
    assert not (tmp_path / "report.html").exists()
