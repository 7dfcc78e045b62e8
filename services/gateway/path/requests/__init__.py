"""One request: it is prepared, runs until its end, and releases what it has placed."""
