"""The detokenizer: token events of many sequences in, text events for their gateways out."""
