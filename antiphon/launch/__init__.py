"""`antiphon serve`: the processes of one command, their bus, their sockets, and when they are ready."""
