"""Checks of request bodies, and parts of their conversion that several endpoints share. Pure."""
