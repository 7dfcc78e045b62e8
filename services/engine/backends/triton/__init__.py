"""The GPU backend: the worker, CUDA graphs, inputs, sampling and adapters on the device, and the `kernels`."""
