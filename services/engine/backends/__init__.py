"""The three backends, a folder for each, and `load`, which chooses one.

cpu     C++ compiled for this processor
triton  GPU kernels in Triton
torch   PyTorch's operations on any device, the reference of the others; models that run through transformers

What they share is in `worker`. They do not import each other.
"""
