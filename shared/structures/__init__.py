"""Data structures: a cache bounded in bytes, a bounded place that several keys share, a fair order of clients. Pure."""
