"""The files that HTTPS is served with are looked at before anything starts."""

from pathlib import Path

import pytest

from antiphon.services.gateway.service import GatewayService
from antiphon.shared.config import GatewaySettings
from antiphon.shared.flags import SettingsError
from antiphon.shared.security import tls

FILES = Path(__file__).parents[2] / "system" / "tls"
KEY, CERTIFICATE = str(FILES / "key.pem"), str(FILES / "certificate.pem")


def test_a_key_and_its_certificate_are_taken_from_two_files_or_one(tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_text(Path(KEY).read_text() + Path(CERTIFICATE).read_text())
    assert tls.check(GatewaySettings(ssl_keyfile=KEY, ssl_certfile=CERTIFICATE))
    assert tls.check(GatewaySettings(ssl_certfile=str(both)))
    assert not tls.check(GatewaySettings())


@pytest.mark.parametrize(
    ("key", "certificate", "said"),
    [
        (KEY, "", "--ssl-keyfile needs --ssl-certfile"),
        (KEY, "/none.pem", "/none.pem and "),
        ("/none.pem", CERTIFICATE, " and /none.pem cannot be used"),
        ("", CERTIFICATE, "cannot be used"),
        (CERTIFICATE, CERTIFICATE, "cannot be used"),
    ],
)
def test_files_that_cannot_be_used_are_named(key: str, certificate: str, said: str) -> None:
    settings = GatewaySettings(ssl_keyfile=key, ssl_certfile=certificate)
    for look in (tls.check, GatewayService):
        with pytest.raises(SettingsError, match=said):
            look(settings)
