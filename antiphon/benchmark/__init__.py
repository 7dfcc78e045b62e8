"""`antiphon bench latency | throughput | serve`: the benchmarks that vLLM has under these names.

`offline` measures a model in this process; `serving` measures a running OpenAI-compatible server, with `client`. The
scripts in `bench/` compare with other systems and with the machine's limits; they use the same client.
"""
