"""Encodes answers of OpenAI's API, whole and as streams. Pure."""
