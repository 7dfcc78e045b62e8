"""Notices what heartbeats do not tell: `death_probe` finds dead members early, `progress_watch` stalled sequences.

`losses` tells in the log which members are lost.
"""
