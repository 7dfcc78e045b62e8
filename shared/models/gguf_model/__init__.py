"""Models in GGUF files, the format of llama.cpp: all that a model directory has besides weights is made from them.

    reader     opens files, and refuses damaged ones; hands out metadata and tensors
    config     metadata → config.json and generation_config.json
    tokenizer  metadata → tokenizer.json and tokenizer_config.json
    splitting  how byte-level tokenizers split text, by the names that GGUF has for it
    directory  keeps the result in a private directory, with links to the files

So every service finds a model directory as always. The weights stay in the file, which the engine reads itself
(`services/engine/worker/loading/gguf_file.py`). Called by `shared.models.model_files` and the engine.
"""
