"""Authentication and permissions: API keys, certificates, users of the bus."""
