"""The four services: gateway, tokenizer, engine, detokenizer. None imports another."""
