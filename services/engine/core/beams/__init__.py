"""Beam search in the core."""
