"""The documentation site: what builds it, and what checks the result."""
