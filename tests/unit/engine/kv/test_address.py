"""The address at which other engines find a prefill engine, if none is given."""

import pytest

from antiphon.services.engine.kv.address import default_kv_host


@pytest.mark.parametrize(
    ("nats", "host"),
    [
        ("nats://127.0.0.1:4222", "127.0.0.1"),
        ("", "127.0.0.1"),
        ("nats://no-such-host.invalid:4222", "127.0.0.1"),
    ],
)
def test_without_a_server_elsewhere_it_is_the_loopback_address(nats: str, host: str) -> None:
    assert default_kv_host(nats) == host


def test_a_server_on_this_host_does_not_decide_if_others_are_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"nats://127.0.0.1:4222": "127.0.0.1", "nats://gone:4222": "", "nats://n2:4222": "10.0.0.1"}
    monkeypatch.setattr("antiphon.services.engine.kv.address._way", ways.__getitem__)
    assert default_kv_host(", ".join(ways)) == "10.0.0.1"
