"""`antiphon serve`: starts the processes, their bus and their sockets, and reports when the server is ready."""
