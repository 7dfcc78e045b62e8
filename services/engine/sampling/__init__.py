"""Logits processors: the request parameters that change or forbid logits before a token is sampled.

| module       | what it does                                                                       |
|--------------|------------------------------------------------------------------------------------|
| `processor`  | the interface: one object for each sequence and parameter                          |
| `masks`      | packed bitmasks of allowed tokens                                                  |
| `processors` | `logit_bias`, `allowed_token_ids`, `bad_words`, `min_tokens`; makes a sequence's list |
| `thinking`   | ends the model's reasoning after a number of tokens                                |
| `grammar`    | structured output: the mask of a compiled grammar                                  |
| `mask_time`  | the time that masks of grammars take, and whose turn it is                         |

The state table keeps the processors of its rows; the samplers apply the adjustments. Penalties are arrays over all rows
and belong to the samplers.
"""
