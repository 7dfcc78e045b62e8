"""GPU kernels in Triton, tested against `services/engine/kernels`."""
