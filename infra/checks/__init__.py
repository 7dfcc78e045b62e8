"""Checks of the source that no general tool makes; run by `make check`."""
