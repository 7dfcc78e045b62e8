"""The compile gate of the GPU kernels: what the launchers would start, really compiled, without a GPU."""
