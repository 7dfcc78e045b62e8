"""LoRA adapters of an engine: reading, caching in memory, and computation.

delta          the low-rank product of one matrix, and an adapter as a set of them
peft_files     reads an adapter directory and maps its tensors on the decoder's parameters
library        the adapters known to this engine, by version; caches them in memory
shards         the part of an adapter that one of several ranks has

Each backend adds the LoRA products to its own matrix products.
"""
