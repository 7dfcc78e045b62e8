"""The worker runs step plans on a device. In the engine, only it and `models`, `kernels`, `triton`, `cpu` use torch."""
