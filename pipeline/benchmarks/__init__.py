"""Benchmarks: suites of training runs, their statistics and reports, and throughput."""
