"""The backend of PyTorch's operations, the reference of the others, and models that transformers computes."""
