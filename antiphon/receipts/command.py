"""`antiphon verify`: what it prints, and its exit codes."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from antiphon.receipts.claims import claim_of, read_file, read_keys
from antiphon.receipts.sampling import verify_sample
from antiphon.receipts.verdict import Finding, Verifier, directory_of
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.terminal.exit_codes import Exit
from antiphon.terminal.output import harmless, in_json_line, show

_EXITS = {"equal": Exit.OK, "differs": Exit.FAILED, "refused": Exit.FAILED, "undecided": Exit.UNDECIDED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the command line asks for. `settings`: those of the engine. `share` and `seed`: see `sampling`."""

    path: str
    model: str
    keys: str = ""
    request: str = ""
    answer: str = ""
    share: float | None = None
    seed: int = 0
    settings: dict[str, Any]
    as_json: bool = False


def run(order: Order) -> int:
    """Checks one receipt, or a sample of many. Returns the exit code. Raises SettingsError for wrong usage."""
    keys = read_keys(order.keys) if order.keys else None
    if order.share is not None:
        if order.request or order.answer:
            raise SettingsError("--sample: the lines of a file have no --request and no --answer: leave them out")
        if not 0 < order.share <= 1:
            raise SettingsError(f"--sample: {order.share:g} is not above 0 and at most 1")
        verifier = Verifier(directory_of(order.model), keys, **order.settings)
        try:
            return _many(verifier, order, order.share)
        finally:
            verifier.close()
    try:
        claim = claim_of(read_file(order.path, "RECEIPT"))
        if order.answer:
            claim = claim.beside(read_file(order.answer, "--answer"))
        claim.receipt(keys)
    except ServiceError as error:
        # Loading a model takes long, and a receipt that is refused does not need it.
        return _shown(Finding(verdict="refused", reason=error.message), as_json=order.as_json)
    request = read_file(order.request, "--request") if order.request else None
    verifier = Verifier(directory_of(order.model), keys, **order.settings)
    try:
        return _shown(verifier.verify(claim, request), as_json=order.as_json)
    finally:
        verifier.close()


def _shown(finding: Finding, *, as_json: bool) -> int:
    show(asdict(finding), map(harmless, _lines(finding)), as_json=as_json)
    return _EXITS[finding.verdict]


def _lines(finding: Finding) -> Iterator[str]:
    yield finding.verdict + (f": {finding.reason}" if finding.reason else "")
    for output in finding.outputs:
        told = f"output {output['index']}: {output['verdict']}, {output['num_tokens']} tokens"
        if "num_checked" in output:
            told += f"; {output['num_equal']} of {output['num_checked']} are the ones that this machine chooses"
        yield told
    yield from finding.notes


def _many(verifier: Verifier, order: Order, share: float) -> int:
    def found(number: int, finding: Finding) -> None:
        if order.as_json:
            print(in_json_line({"line": number, **asdict(finding)}), flush=True)
        elif finding.verdict != "equal":
            print(harmless(f"line {number} ({finding.request_id}): {next(_lines(finding))}"), flush=True)

    counts = verify_sample(verifier, order.path, share, order.seed, found)
    names = ("equal", "differs", "refused", "undecided", "skipped")
    if not order.as_json:
        print(", ".join(f"{counts[name]} {name}" for name in names), flush=True)
    return _exit_of(counts)


def _exit_of(counts: Counter[str]) -> int:
    if counts["differs"] or counts["refused"]:
        return Exit.FAILED
    return Exit.UNDECIDED if counts["undecided"] or not counts["equal"] else Exit.OK
