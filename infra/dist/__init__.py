"""Builds what a release publishes: an sdist, and a wheel for each kind of machine."""
