"""Trains the demo model's last layer, which sees far, on turns of coding agents with long prompts."""
