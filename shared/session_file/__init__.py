"""The file of an exported session (docs/guides/sessions.md, ADR 105). Pure; the gateway writes and reads it.

sealing   a stream of bytes, encrypted and authenticated in chunks: nothing of a damaged chunk is given out
frames    what is in the stream: the head with the tokens, and the blocks of KV
"""
