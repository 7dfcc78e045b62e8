"""The detokenizer service: converts the token events of many sequences to text events for their gateways."""
