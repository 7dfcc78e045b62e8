"""The reference operations in PyTorch and NumPy, one file for each operation, with its formula."""
