"""Checks a share of many receipts, the lines of a file, with one model.

Which lines are checked depends on the seed and on each line's number, not on how the file is read: the same seed checks
the same lines. A server that does not know the seed cannot know which answers will be checked.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from antiphon.receipts.claims import claim_of
from antiphon.receipts.verdict import Finding, Verifier
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError

Found = Callable[[int, Finding], None]
"""Takes the number of a line, from 1, and what was found."""


def chosen(seed: int, number: int, share: float) -> bool:
    """Whether the line is in the sample. `share`: 0 to 1."""
    drawn = hashlib.sha256(f"{seed}:{number}".encode()).digest()[:8]
    return int.from_bytes(drawn, "big") < share * 2**64


def lines_of(path: str) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a file that are not empty, with their numbers from 1. Raises SettingsError."""
    try:
        with Path(path).open("rb") as file:
            number = 0
            while line := file.readline(limits.RECEIPT_BYTES_MAX + 1):
                number += 1
                if len(line) > limits.RECEIPT_BYTES_MAX:
                    raise SettingsError(f"{path}: line {number} has more than {limits.RECEIPT_BYTES_MAX} bytes")
                if line.strip():
                    yield number, line
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from error


def verify_sample(verifier: Verifier, path: str, share: float, seed: int, found: Found) -> Counter[str]:
    """Checks the chosen lines of a file. Returns how many had each verdict, and as `skipped` how many were left out.

    A line is an answer with its evidence, or a receipt. Raises SettingsError if the file cannot be read.
    """
    counts = Counter[str]()
    for number, line in lines_of(path):
        if not chosen(seed, number, share):
            counts["skipped"] += 1
            continue
        try:
            finding = verifier.verify(claim_of(line))
        except ServiceError as error:
            finding = Finding(verdict="refused", reason=error.message)
        counts[finding.verdict] += 1
        found(number, finding)
    return counts
