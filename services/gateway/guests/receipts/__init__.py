"""Receipts: an answer says, with a signature, which weights, parameters and engines made its tokens (ADR 109).

`guest` decides which requests get one, `engines` collects what is known of the engines, `making` makes the receipt,
`encoder` puts it into the answer, `api` publishes the keys. `antiphon verify` checks receipts by running the model.
"""
