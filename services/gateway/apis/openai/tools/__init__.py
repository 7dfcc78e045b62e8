"""Tools in requests of OpenAI's API: which tools may or must be called, and how calls are separated from content."""
