"""Publishes the events of the prefix cache over ZeroMQ, as vLLM does, for routers outside of the deployment."""
