"""Models in GGUF files, the format of llama.cpp: converts everything except the weights to a model directory.

    reader     opens files and refuses damaged ones; returns metadata and tensors
    config     metadata → config.json and generation_config.json
    tokenizer  metadata → tokenizer.json and tokenizer_config.json
    names      the names of files in a repository: quantization, parts, choice
    splitting  how byte-level tokenizers split text (pre-tokenization), by GGUF's names
    directory  keeps the result in a private directory, with links to the files

So every service can use an ordinary model directory. The weights stay in the file, which the engine reads itself
(`services/engine/worker/loading/gguf_file.py`). Called by `antiphon.shared.models.model_files` and the engine.
"""
