"""The console at `/`, and the endpoints that it reads: requests, their timelines, and the topology."""
