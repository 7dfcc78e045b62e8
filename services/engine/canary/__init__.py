"""The engine's self-tests, which detect wrong results. See `docs/guides/second-opinion.md`.

| module      | what it does                                                                          |
|-------------|---------------------------------------------------------------------------------------|
| `probe`     | the canary's sequence, its results, and the comparison with the golden value           |
| `measure`   | computes the golden value at start, and checks batch invariance                        |
| `canary`    | runs the canary among the requests, and keeps the engine's fault                       |
| `checksums` | checksums of the weights in memory, compared with those at load                        |
| `guard`     | the thread that computes the checksums in small portions                               |
"""
