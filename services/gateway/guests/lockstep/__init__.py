"""Runs a request on two engines at once and shows only tokens on which both agree. See `docs/guides/second-opinion.md`.

| module        | what it does                                                                       |
|---------------|------------------------------------------------------------------------------------|
| `trust`       | engines that get no work: quarantined ones, and those whose golden value was outvoted |
| `pair`        | holds a sequence's text until the second engine has the same tokens; finds differences |
| `verdict`     | decides which of two engines is wrong: by a third one, repetition, or self-tests     |
| `copies`      | runs a copy of a sequence on one engine, whose tokens come to the gateway            |
| `sequence`    | one sequence in lockstep: runs its copy and resolves differences                     |
| `guest`       | the lockstep of one gateway: selects requests, routes messages, counts results       |
"""
