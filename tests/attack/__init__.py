"""`make attack`: attacks on a real server, each with a goal, and what another client sees meanwhile.

docs/contributing/attacks.md has the results.

| module | |
|---|---|
| `judging` | goals, measures and verdicts; pure |
| `page` | the tables: of a run, and in docs/contributing/attacks.md |
| `place` | what an attack is given, and how it asks the server |
| `target` | the servers that are attacked |
| `memory` | a limit of memory for each process of a server |
| `victim` | the client that is measured, in a process of its own |
| `few_files` | `antiphon serve` with few descriptors |
| `bus` | the bus as one process of the server sees it |
| `kinds` | the attacks |
| `run` | the command |
"""
