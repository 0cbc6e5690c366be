"""Benchmarks: suites of training runs, their statistics and report; throughput beside peers."""
