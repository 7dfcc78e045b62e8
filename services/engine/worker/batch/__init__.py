"""The batch that a worker keeps: its rows, the inputs of a step, and what comes of them, from tokens to vectors."""
