"""Notices what heartbeats do not tell: `death_probe` finds dead members early, `progress_watch` stalled sequences."""
