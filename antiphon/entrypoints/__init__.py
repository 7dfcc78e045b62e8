"""Where other programs expect to start a server: module names that they know."""
