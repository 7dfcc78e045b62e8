"""The edge to clients: the HTTP server, and who may do what."""
