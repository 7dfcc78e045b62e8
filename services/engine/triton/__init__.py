"""Kernels for GPUs in Triton, compared with `services/engine/kernels`, and the decoder's operations made of them."""
