"""Checks of the source that general tools do not offer; most are run by `make check`."""
