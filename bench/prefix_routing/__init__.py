"""How much of prompts is in the prefix cache of the engine that gets them, by policy of placement: `__main__`."""
