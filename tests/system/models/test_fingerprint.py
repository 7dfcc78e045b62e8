"""`system_fingerprint` of real systems: it tells a user of `seed` whether the same answer can be expected."""

from pathlib import Path

import pytest

from tests.system.served import Served, fetch, until_the_end

pytestmark = [pytest.mark.system, pytest.mark.nats]


def fingerprint(model: Path, *flags: str) -> str:
    """Of one start, which a whole answer and a streamed one agree on."""
    with until_the_end(Served(f"--model={model}", *flags)) as served:
        body = {"prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0}
        whole = fetch(served, "POST", "/v1/completions", body).json["system_fingerprint"]
        assert f'"{whole}"' in fetch(served, "POST", "/v1/completions", {**body, "stream": True}).body.decode()
    return whole


@pytest.mark.spec("S-API-076")
def test_another_type_has_another_fingerprint_and_a_restart_the_same(model: Path) -> None:
    first, again = (fingerprint(model, "--dtype=float32") for _ in range(2))
    assert first == again
    assert first.startswith("fp_")
    assert fingerprint(model, "--dtype=bfloat16") != first
