"""Who may do what: API keys, certificates, users of the bus."""
