"""Benchmarks: each runs the plain way and ours in one process and returns the ratio."""
