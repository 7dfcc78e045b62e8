"""The worker runs step plans on a device.

In the engine, only the worker and `models`, `kernels`, `triton`, `cpu` use torch.
"""
