"""Benchmarks: suites of training runs, their statistics and reports, and throughput.

Running a suite, here or on a cluster:

suites.py              suites, described by gin files
planned_runs.py        the runs of a suite, with their folders and commands
suite_folder.py        records, plan and lock of a suite's folder
records.py             the record of one run
runner.py              runs a suite with several processes at a time
run_flags.py           flags of the programs that start many runs
train_process.py       the process that trains a run on this machine
cluster.py             chooses the nodes of a Ray cluster
node_probe.py          properties of a node
ray_process.py         the process that trains a run on a node

The report:

report.py              writes the report
results.py             groups the records
interval_estimates.py  scores with confidence intervals
published_scores.py    human-normalized scores, and scores of others
report_tables.py       tables
figures.py             figures
formatting.py          numbers and names
markdown.py            elements of Markdown
page.py                the HTML page

Measurements:

throughput.py          times each stage of a run
eager_graph/           compares eager and graph training
"""
