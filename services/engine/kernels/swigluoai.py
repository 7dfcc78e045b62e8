"""The constants of gpt-oss's activation (see `activation`), in a module of their own that imports no PyTorch.

Families compare config.json with them, also in the launcher, which must not import PyTorch.
"""

SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT = 1.702, 7.0
