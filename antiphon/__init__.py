"""Antiphon's public face: the command line and the launcher of a local deployment. The logic is in `services`."""
