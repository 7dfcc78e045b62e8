"""The parts of `make gpu-check`. Each runs in its own process: `python -m bench.gpu.<part>` prints results as JSON."""
