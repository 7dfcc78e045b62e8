"""Tells others which blocks an engine's prefix cache has: gateways over the bus, other routers over ZeroMQ."""
