"""Receipts: signed statements of what made the tokens of an answer (docs/reference/receipts.md).

`document` is what a receipt says and the digests in it, `signing` the keys and the signature, `finding` takes receipts
out of answers. No service and no engine: both the gateway that makes receipts and the command that checks them use it.
"""
