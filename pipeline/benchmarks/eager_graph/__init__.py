"""Compares eager and graph training: how far they drift apart, where this begins, and why."""
