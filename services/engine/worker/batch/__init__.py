"""The worker's persistent batch: its rows, the inputs of a step, and its results (tokens, log probabilities, ...)."""
