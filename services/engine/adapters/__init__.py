"""LoRA adapters of an engine: reading them, keeping them in memory, and computing with them.

delta          the low-rank product of one matrix, and an adapter as a set of them
peft_files     reads an adapter directory and maps its tensors on the decoder's parameters
library        the adapters that this engine knows, by version, and which of them are in memory
shards         the part of an adapter that one of several ranks has
torch_layers   the products in torch operations, beside the model's own matrices
"""
