"""The parts of `make gpu-check`, each a process of its own: `python -m bench.gpu.<part>` prints its results as JSON."""
