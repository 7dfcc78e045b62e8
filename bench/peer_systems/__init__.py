"""Comparison with other serving systems: their commands, and models in their formats."""
