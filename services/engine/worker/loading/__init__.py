"""Reads model directories: configuration files, checkpoints of every format, and the parameters for every backend."""
