"""Kernels for GPUs in Triton, and the decoder's operations made of them. Each is compared with `services/engine/kernels`."""
