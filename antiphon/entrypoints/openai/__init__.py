"""The entry point of the server with the OpenAI API."""
