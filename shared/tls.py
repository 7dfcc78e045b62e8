"""Checks before start-up that the private key and the certificate for HTTPS can be used.

Called by the command line's settings and by the gateway.
"""

from shared.config import GatewaySettings, SettingsError


def check(settings: GatewaySettings) -> bool:
    """Returns whether the settings ask for HTTPS. Raises SettingsError if key or certificate cannot be used."""
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
