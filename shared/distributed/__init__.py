"""Engines on several devices and machines: their processes, their machines, and the shared secret of the machines.

| module        | what it does                                                                      |
|---------------|-----------------------------------------------------------------------------------|
| `world`       | checks the settings of a model that several devices compute; number of processes  |
| `machines`    | the machines that compute one model together, and the index of this machine       |
| `cluster_key` | the secret with which processes on several machines authenticate each other       |
"""
