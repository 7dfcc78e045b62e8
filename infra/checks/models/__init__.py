"""Writes what the documents say about models, and checks that it is up to date."""
