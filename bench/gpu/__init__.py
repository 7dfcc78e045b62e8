"""The parts of `make gpu-check`: `python -m bench.gpu.<module> PART …` prints a line for each part (`parts`)."""
