"""`antiphon bench latency | throughput | serve`: what users of other servers know under these names.

`offline` measures a model in this process, `serving` a server that runs, of any make, with `client`. The scripts in
`bench/` compare with other systems and with the machine's limits; they send their loads with the same client.
"""
