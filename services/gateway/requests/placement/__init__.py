"""Where sequences run: the queue of those that wait, the choice of engines, and moves on purpose."""
