"""What the log says about a member that is lost."""

from typing import Any

import pytest

from antiphon.services.gateway.path.liveness.loss_report import ENDED, report, silent
from antiphon.shared.messages import GatewayStatus, PoolStatus, ServiceName, StreamStatus
from tests.support.heartbeats import engine_status, heartbeat

ENGINE, DETOKENIZER = engine_status(), StreamStatus()


@pytest.mark.parametrize(
    ("service", "status", "count", "others", "told"),
    [
        ("engine", ENGINE, 4, ["b"], "its 4 requests move to b"),
        ("engine", ENGINE, 1, ["b", "c"], "its 1 request moves to b and c"),
        ("engine", ENGINE, 2, ["b", "c", "d", "e", "f"], "its 2 requests move to b, c, d and 2 others"),
        ("engine", ENGINE, 1, [], "its 1 request waits for another engine"),
        ("engine", ENGINE, 0, ["b"], "it had no requests"),
        ("detokenizer", DETOKENIZER, 3, ["b"], "its 3 requests move to b"),
        ("tokenizer", PoolStatus(), 0, ["b"], "b goes on"),
        ("tokenizer", PoolStatus(), 0, [], "no other tokenizer is there"),
        ("gateway", GatewayStatus(), 1, ["b"], "its 1 request ends, unless their clients resume them elsewhere"),
    ],
)
def test_the_sentence_says_what_becomes_of_the_requests(
    service: ServiceName, status: Any, count: int, others: list[str], told: str
):
    assert report(heartbeat(service, "a", "i", status), ENDED, count, others) == f"a has ended: {told}"


def test_a_silent_member_is_told_with_its_silence():
    assert report(heartbeat("engine", "a", "i", ENGINE), silent(0.447), 0, []) == (
        "a has not been heard from for 0.4 s: it had no requests"
    )
