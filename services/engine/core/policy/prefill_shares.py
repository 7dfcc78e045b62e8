"""Divides a step's tokens for prompts between clients: a long prompt of one must not delay the prompts of others.

Prompts also leave room for the next tokens of other clients' sequences. Without clients, or with sequences of a single
client, nothing is divided. Used by `lanes.running`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from antiphon.services.engine.core.sequence import Sequence


def shares_of(running: Iterable[Sequence], newcomer: Sequence | None, budget: int) -> dict[str, int]:
    """Returns how many prompt tokens each client gets in a step of `budget` tokens, after the decoding sequences.

    `newcomer`: a waiting sequence that has a share too.
    """
    demands = Counter[str]()
    num_decoding = 0
    for sequence in running:
        if (count := sequence.num_unscheduled_tokens) > 1:
            demands[sequence.client] += count
        else:
            num_decoding += count
    if newcomer is not None:
        demands[newcomer.client] += newcomer.num_tokens
    return divide(budget - num_decoding, demands)


def divide(budget: int, demands: Mapping[str, int]) -> dict[str, int]:
    """Returns how many tokens each client gets: equal shares; the unused part of a share is divided among the others.

    `demands`: prompt tokens that each client could compute now, above 0. Each client gets at least one token.
    """
    shares: dict[str, int] = {}
    left = len(demands)
    for client in sorted(demands, key=lambda client: (demands[client], client)):
        shares[client] = max(1, min(demands[client], budget // left))
        budget = max(0, budget - shares[client])
        left -= 1
    return shares
