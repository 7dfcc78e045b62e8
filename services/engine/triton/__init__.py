"""GPU kernels in Triton, tested against `services/engine/kernels`, and the decoder's operations built from them."""
