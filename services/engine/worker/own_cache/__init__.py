"""Models that run through transformers with the cache that transformers keeps for them, in place of paged KV."""
