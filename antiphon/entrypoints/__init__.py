"""Modules under the names that vLLM has for them, so that existing programs and scripts can start a server."""
