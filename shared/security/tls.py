"""TLS certificates: checks those for HTTPS before start-up, and creates the TLS context for the bus.

Called by the command line's settings, by the gateway, and by every client of the bus.
"""

from typing import TYPE_CHECKING

from antiphon.shared.config import GatewaySettings
from antiphon.shared.flags import SettingsError
from antiphon.shared.settings.bus import BusSettings

if TYPE_CHECKING:
    import ssl


def check(settings: GatewaySettings) -> bool:
    """Returns whether the settings enable HTTPS. Raises SettingsError if key or certificate cannot be used."""
    if not settings.ssl_certfile and not settings.ssl_keyfile:
        return False
    if not settings.ssl_certfile:
        raise SettingsError("--ssl-keyfile needs --ssl-certfile: the certificate of the key")
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # One file may contain both. The empty password keeps OpenSSL from asking for one on the terminal.
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile or None, password="")
    except (OSError, ValueError) as error:
        files = " and ".join(name for name in (settings.ssl_certfile, settings.ssl_keyfile) if name)
        raise SettingsError(
            f"--ssl-certfile and --ssl-keyfile: {files} cannot be used ({error}). Both are PEM, the key without a "
            "password."
        ) from error
    return True


def any_certificate() -> "ssl.SSLContext":
    """Returns a context that accepts any certificate: for a server of this machine, whose certificate names another."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def bus_context(settings: BusSettings) -> "ssl.SSLContext | None":
    """Returns the context for the connection to the bus; None if the settings do not enable TLS.

    A URL `tls://` enables it too, with the system's certificate authorities unless `nats_tls_ca` names others. Raises
    SettingsError if a file cannot be used.
    """
    ca, certificate, key = settings.nats_tls_ca, settings.nats_tls_cert, settings.nats_tls_key
    if key and not certificate:
        raise SettingsError("--nats-tls-key needs --nats-tls-cert: the certificate of the key")
    if not (ca or certificate or "tls://" in settings.nats):
        return None
    import ssl

    try:
        context = ssl.create_default_context(cafile=ca or None)
    except (OSError, ValueError) as error:
        raise SettingsError(f"--nats-tls-ca: {ca} cannot be used ({error}); it must be PEM") from error
    if certificate:
        try:
            context.load_cert_chain(certificate, key or None, password="")
        except (OSError, ValueError) as error:
            files = " and ".join(name for name in (certificate, key) if name)
            raise SettingsError(
                f"--nats-tls-cert and --nats-tls-key: {files} cannot be used ({error}). Both are PEM, the key without "
                "a password."
            ) from error
    return context
