"""The tokenizer service: converts texts and conversations to token ids, and ids to text.

Stateless; any number of replicas.
"""
