"""The GPU worker and its own parts: CUDA graphs, inputs and sampling on the device, blocks, staging."""
