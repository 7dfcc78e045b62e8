"""Finds an engine that computes wrong results before its clients do. See `docs/second-opinion.md`.

| module      | what it does                                                                          |
|-------------|---------------------------------------------------------------------------------------|
| `probe`     | the hidden sequence, what was observed of it, and the comparison with the golden value |
| `measure`   | computes the golden value at start, and checks batch invariance                        |
| `canary`    | when the hidden sequence runs among the requests, and the engine's fault               |
| `checksums` | sums over the weights in memory, compared with those at load                           |
| `guard`     | the thread that does so in small portions                                              |
"""
