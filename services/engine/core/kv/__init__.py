"""The core's KV blocks: pool, prefix cache, reuse, swap space and transfers between engines."""
