"""How many rows of an engine's batch are reserved, so that one client cannot take all rows.

A row is the place of one running sequence in the batch.
"""

RESERVED_SHARE = 64
"""One row, plus one for each RESERVED_SHARE rows, is reserved for clients without a running sequence."""
RESERVING_ROWS_MIN = 16
"""Engines with fewer rows reserve none, because a single client would lose too large a part of the rows."""


def num_reserved_rows(num_rows: int) -> int:
    """Returns how many of an engine's rows are reserved for clients (API keys) without a running sequence."""
    return 1 + num_rows // RESERVED_SHARE if num_rows >= RESERVING_ROWS_MIN else 0
