"""Autotuning: products with weights have several forms, and the fastest on this GPU is found by measuring them once."""
