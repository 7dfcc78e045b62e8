"""The compile check of the GPU kernels: compiles every kernel as the launchers would start it, without a GPU."""
