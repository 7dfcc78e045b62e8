"""Benchmarks: one script for each claim in docs/contributing/performance.md and its pages.

`make bench` runs `bench.run` (one table for each model); `make bench-peers` runs `bench.peer_systems.peers`, which
alternates between this system and other serving systems. Both send the loads of `bench.harness.loads` with the
product's own client (`antiphon.benchmark.load`), account for CPU time (`bench.limits_of_machine.cpu_accounting`), and
compare the measured time with the floor: the shortest time (`bench.limits_of_machine.roofline`) that the machine's
limits, measured around the load by `bench.limits_of_machine.probe`, allow.
"""
