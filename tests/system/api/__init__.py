"""The HTTP API through the whole system. A package, so that its tests share one system."""
