"""Which models, versions and adapters can be used now."""
