"""The tasks that the demo model is trained on, a module for each kind."""
