"""Child processes that cannot outlive their parent, restarted when they end."""
