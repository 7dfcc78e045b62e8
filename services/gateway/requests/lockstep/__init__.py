"""Runs a request on two engines at once and shows only tokens on which both agree. See `docs/second-opinion.md`.

| module        | what it does                                                                       |
|---------------|------------------------------------------------------------------------------------|
| `trust`       | engines that get no work: quarantined ones, and minorities by their golden values    |
| `pair`        | holds a sequence's text until the second engine has the same tokens; finds differences |
| `verdict`     | which of two engines is wrong, from a third one, from repetitions, from self-tests   |
| `copies`      | runs a copy of a sequence on one engine, whose tokens come to the gateway            |
| `sequence`    | one sequence in lockstep: its copy, its differences and what follows from them       |
| `coordinator` | all of a gateway: which requests run in lockstep, messages, counters                 |
"""
