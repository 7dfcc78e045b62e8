"""Benchmarks of the engine without the whole system: core, worker, kernels, and what the bus adds."""
