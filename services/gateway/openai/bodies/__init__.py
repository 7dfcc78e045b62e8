"""Checks the bodies of requests, and has the parts of their conversion that several endpoints share. Pure."""
