"""Coding agents as their makers ship them, each through turns with a real server: part of `make client-test`."""
