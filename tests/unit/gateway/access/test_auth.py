import pytest

from antiphon.services.gateway.edge.access.call import new_id
from antiphon.services.gateway.edge.http.auth import ApiKeys
from antiphon.shared.errors import ServiceError

KEYS = ApiKeys(" k1, ,k2,ключ,")


def header(value: str) -> dict[bytes, bytes]:
    return {b"host": b"x", b"authorization": value.encode()}


@pytest.mark.spec("S-API-006", "S-API-080", "S-SRV-013")
@pytest.mark.parametrize("value", ["Bearer k1", "bearer k2", "BEARER  k1 ", "Bearer ключ"])
def test_any_of_the_keys_opens(value: str):
    KEYS.check("/v1/models", header(value))


@pytest.mark.spec("S-API-080", "S-SRV-013")
@pytest.mark.parametrize("value", ["", "Bearer", "Bearer ", "Bearer k3", "Bearer k1,k2", "k1", "Basic k1", "Bearer K1"])
def test_anything_else_does_not(value: str):
    with pytest.raises(ServiceError) as raised:
        KEYS.check("/v1/models", header(value))
    assert raised.value.status == 401
    assert "k1" not in raised.value.message


def test_only_the_probes_and_the_files_of_the_console_are_open():
    for path in ("/livez", "/readyz", "/health", "/", "/console/app.js"):
        KEYS.check(path, {})
    for path in (
        "/console",
        "/v1/requests",
        "/admin/topology",
        "/metrics",
        "/docs",
        "/openapi.json",
        "/version",
        "/health/",
        "/livez/x",
        "//health",
        "/HEALTH",
    ):
        with pytest.raises(ServiceError):
            KEYS.check(path, {})


@pytest.mark.parametrize("listed", ["", " ", ",", " , "])
def test_without_keys_everything_is_open(listed: str):
    ApiKeys(listed).check("/v1/models", {})


@pytest.mark.spec("S-API-070")
def test_ids_are_22_letters_and_digits_and_differ():
    ids = {new_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(len(one) == 22 and one.isascii() and one.isalnum() for one in ids)
