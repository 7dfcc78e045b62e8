"""Layers with a recurrent state in place of attention."""
