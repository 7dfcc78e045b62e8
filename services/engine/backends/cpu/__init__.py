"""The CPU backend: computes a whole decoder step in one call to C++ code (`source/`) compiled for this processor."""
