"""Benchmarks: one script for each claim in docs/performance.md and its pages.

`make bench` runs `bench.run` (a table for each model), `make bench-peers` `bench.peers` (beside other systems in turn).
Both send the loads of `bench.loads` with the product's own client (`antiphon.benchmark.client`), book the processor
with `bench.books`, and compare with the floor of `bench.roofline` at the limits that `bench.probe` has just measured.
"""
