"""Benchmarks of what protection costs and withstands: a soak, power cuts, the cost of records, isolation of clients."""
