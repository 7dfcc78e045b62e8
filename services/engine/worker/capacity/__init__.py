"""A worker's memory: measurement, prediction and division; the KV cache and the swap space."""
