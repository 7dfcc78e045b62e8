"""The server with the OpenAI API."""
