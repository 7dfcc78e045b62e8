"""The gateway service: the HTTP edge, and one request actor for each request."""
