"""Pictures of requests: files from the network, and the files that a gateway or the bus keeps."""
