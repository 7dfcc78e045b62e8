"""Pictures of requests: files from the network, the files that a gateway keeps, and their encoding."""
