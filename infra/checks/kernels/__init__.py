"""The compile check of the GPU kernels: compiles every kernel for the launchers' arguments, without a GPU."""
