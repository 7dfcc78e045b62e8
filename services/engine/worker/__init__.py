"""The worker runs step plans on a device.

In the engine, only the worker and the packages that it calls (`models`, `kernels`, `triton`, `cpu`, ...) use torch.
"""
