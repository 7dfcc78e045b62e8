"""The limit on the tokens of a model's reasoning, as it reaches the engine.

The gateway makes it from a request's budget and the model's reasoning format; tokenizers convert the marks to ids.
"""

import msgspec


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """After `budget` tokens of reasoning the output must go on with the tokens of the closing mark."""

    budget: int
    opening: tuple[int, ...]
    closing: tuple[int, ...]
    inside: bool = False
    """Whether the output begins within the reasoning, because the prompt ends with the opening mark."""
    repeats: bool = False
    """Whether an output may have reasoning anywhere and several times, which together have the budget; if not, it has
    reasoning only at its beginning."""
