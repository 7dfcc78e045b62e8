"""Engines that sleep: wakes them when sequences wait, and puts them to sleep for operators (docs/guides/sleep.md)."""
