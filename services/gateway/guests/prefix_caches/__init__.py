"""Follows the content of engines' prefix caches, so that the router knows where the beginning of a prompt is."""
