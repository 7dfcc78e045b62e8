"""Placement of sequences: the queue of waiting sequences, the choice of engines, and moves from draining engines."""
