"""Reads model directories: small files, checkpoints of every format, and the parameters for every backend."""
