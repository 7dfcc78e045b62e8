"""Data structures that several services use: a cache bounded in bytes, and a fair order of clients. Pure."""
