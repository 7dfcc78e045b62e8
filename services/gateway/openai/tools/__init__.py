"""Tools in requests of OpenAI's API: which may or must be called, and how calls are told from content."""
