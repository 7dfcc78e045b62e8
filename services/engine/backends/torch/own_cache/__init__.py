"""Models that run through transformers with transformers' own cache objects instead of the paged KV cache."""
