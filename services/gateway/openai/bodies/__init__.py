"""Checks the bodies of requests, and converts them to requests for the backend. Pure."""
