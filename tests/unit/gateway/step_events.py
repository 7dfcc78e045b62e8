"""Messages about steps, as engines send them."""

from dataclasses import dataclass, field

from antiphon.shared.messages import SequenceSteps, StepEvent, StepEvents
from antiphon.shared.observability.step_rows import pack_sequence, pack_step


@dataclass(frozen=True)
class Told:
    """A step. `shares`: for each sequence and attempt its age in microseconds, first position, tokens and output."""

    event: StepEvent
    shares: dict[tuple[str, int], tuple[int, int, int, int]] = field(default_factory=dict)


def told(engine: str, *steps: Told) -> StepEvents:
    """Returns the message about these steps."""
    found = {name: bytearray() for one in steps for name in one.shares}
    for one in steps:
        event = one.event
        whole = pack_step(event.num_sequences, event.num_tokens, event.num_waiting, event.num_free_blocks)
        for name, (age_us, *share) in one.shares.items():
            found[name] += pack_sequence(event.step, age_us, event.duration_us, *share) + whole
    sequences = tuple(SequenceSteps(*name, bytes(rows)) for name, rows in found.items())
    return StepEvents(engine, "b", tuple(one.event for one in steps), sequences)
