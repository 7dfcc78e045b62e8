"""Benchmarks: one script for each claim in docs/performance.md. `make bench` runs `bench.run`."""
