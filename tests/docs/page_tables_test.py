"""Tests that README.md and docs/ agree with the committed results."""

import json
import re
import shutil

import page_tables
import pytest

from benchmarks import tables
from benchmarks.workers.protocol import STAGES
from pipeline.benchmarks import figures, report

WITH_TABLES = [page for page in page_tables.PAGES if page_tables.shown(page.read_text())]


@pytest.mark.parametrize("page", WITH_TABLES, ids=lambda page: page.name)
def test_the_tables_are_those_of_the_committed_results(page):
    text = page.read_text()
    assert page_tables.rewritten(text) == text


def test_some_pages_have_tables():
    assert {"README.md", "performance.md"} <= {page.name for page in WITH_TABLES}


def test_a_page_shows_every_measurement():
    shown = {part for page in page_tables.PAGES for part in page_tables.shown(page.read_text())}
    measured = {path.name for path in page_tables.RESULTS.glob("throughput*")}
    tables_of_speeds = ("speeds", "asynchronous actors")
    assert {folder for folder, table in shown if table in tables_of_speeds} == measured


def test_another_measurement_would_change_the_table(monkeypatch, tmp_path):
    for folder in page_tables.RESULTS.glob("throughput*"):
        results = json.loads((folder / "throughput.json").read_text())
        for workload in results["workloads"].values():
            for side in workload["sides"].values():
                for stage in side["stages"].values():
                    stage["per_second"] *= 2
        (tmp_path / folder.name).mkdir()
        (tmp_path / folder.name / "throughput.json").write_text(json.dumps(results))
    (tmp_path / "classic").mkdir()
    text = (page_tables.RESULTS / "classic/report.md").read_text()
    (tmp_path / "classic/report.md").write_text(text.replace(".", "9."))
    monkeypatch.setattr(page_tables, "RESULTS", tmp_path)
    pages = [page.read_text() for page in page_tables.PAGES]
    changed = [text for text in pages if page_tables.rewritten(text) != text]
    of_results = [text for text in pages if {s for s, _ in page_tables.shown(text)} - {"gin"}]
    assert changed == of_results and changed


@pytest.mark.parametrize("suite", ["classic", "atari_small_budget"])
def test_the_report_is_that_of_the_committed_records(tmp_path, monkeypatch, suite):
    # Figures are drawn, but not written, which takes half of the time.
    monkeypatch.setattr(figures, "inline_svg", lambda canvas: "<svg></svg>")
    committed = page_tables.RESULTS / suite
    for name in (f"{suite}.jsonl", f"{suite}.plan.json"):
        shutil.copy(committed / name, tmp_path)
    report.write(tmp_path)
    written, kept = (rows((folder / "report.md").read_text()) for folder in (tmp_path, committed))
    assert written == kept and len(kept) > 50
    pages = [(folder / "report.html").read_text() for folder in (tmp_path, committed)]
    cells = [re.findall("<t[hd].*?</t[hd]>", page) for page in pages]
    assert cells[0] == cells[1] and len(cells[0]) > 200
    assert pages[0].count("<svg") == pages[1].count("<svg") > 0


def rows(text):
    """Returns the rows of all tables of a page in Markdown."""
    return [line for line in text.splitlines() if line.startswith("|")]


def test_the_committed_pages_are_those_of_the_numbers_beside_them():
    for folder in page_tables.RESULTS.glob("throughput*"):
        document = tables.document(json.loads((folder / "throughput.json").read_text()))
        kept = rows((folder / "throughput.md").read_text())
        assert kept == rows(document) and kept


def test_the_sides_of_a_workload_train_networks_of_one_size():
    compared = 0
    for folder in page_tables.RESULTS.glob("throughput*"):
        workloads = json.loads((folder / "throughput.json").read_text())["workloads"]
        for name, workload in workloads.items():
            sizes = [side["facts"].get("num_parameters") for side in workload["sides"].values()]
            known = [size for size in sizes if size]
            if len(known) > 1:
                compared += 1
                # Earlier measurements left SAC's temperature out of the peers' counts.
                assert max(known) - min(known) <= name.startswith("sac"), (name, sizes)
    assert compared


def test_the_headline_measurement_took_ten_seconds_a_stage():
    results = json.loads((page_tables.RESULTS / "throughput/throughput.json").read_text())
    rounds = [
        stage["rounds"]
        for workload in results["workloads"].values()
        for side in workload["sides"].values()
        for name, stage in side["stages"].items()
        if name in STAGES
    ]
    assert rounds
    assert min(sum(answer["seconds"] for answer in stage) for stage in rounds) >= 10
