"""Images of requests: files from the network, and the files that a gateway keeps while their requests run."""
