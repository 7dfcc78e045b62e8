"""Engines on several devices and machines: their processes, their machines, and the secret that these share.

| module        | what it does                                                                      |
|---------------|-----------------------------------------------------------------------------------|
| `world`       | checks the settings of a model that several devices compute; number of processes  |
| `machines`    | the machines that compute one model together, and which of them this one is       |
| `cluster_key` | the secret with which processes on several machines recognise each other          |
"""
