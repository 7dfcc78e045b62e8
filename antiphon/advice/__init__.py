"""`antiphon doctor` and `antiphon plan`: what this machine can run, and the memory that a model needs."""
