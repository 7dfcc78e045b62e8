"""Divides a step's tokens for prompts between clients: a long prompt of one must not delay the prompts of others.

Prompts also leave room for the next tokens of other clients' sequences. Without clients, or with sequences of a single
client, nothing is divided. Used only by `scheduler`.
"""

from collections.abc import Mapping


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
