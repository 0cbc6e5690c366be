"""README.md says what the committed results say."""

import json

import readme_tables


def test_the_tables_are_those_of_the_committed_results():
    text = readme_tables.README.read_text()
    assert readme_tables.rewritten(text) == text


def test_another_measurement_would_change_the_table(monkeypatch, tmp_path):
    results = json.loads((readme_tables.RESULTS / "throughput/throughput.json").read_text())
    for work in results["works"].values():
        for side in work["sides"].values():
            for stage in side["stages"].values():
                stage["per_second"] *= 2
    (tmp_path / "throughput").mkdir()
    (tmp_path / "throughput/throughput.json").write_text(json.dumps(results))
    monkeypatch.setattr(readme_tables, "RESULTS", tmp_path)
    text = readme_tables.README.read_text()
    assert readme_tables.rewritten(text) != text
