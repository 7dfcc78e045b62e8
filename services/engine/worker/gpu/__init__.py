"""The GPU worker and what only it needs: CUDA graphs, inputs and sampling on the device, blocks, staging."""
