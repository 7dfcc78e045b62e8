"""The routes of the HTTP server, and their description in `/openapi.json`."""
