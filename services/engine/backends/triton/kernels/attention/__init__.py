"""Attention over the paged KV cache: the work list of a step, and kernels for decode, prefill and latent attention."""
