"""The key and the certificate that HTTPS is served with: whether they can be used, found before anything starts.

Called by the launcher and by the gateway.
"""

from shared.config import GatewaySettings, SettingsError


def check(settings: GatewaySettings) -> bool:
    """True when HTTPS is to be served. Raises SettingsError for files that cannot be used."""
    if not settings.ssl_certfile and not settings.ssl_keyfile:
        return False
    if not settings.ssl_certfile:
        raise SettingsError("--ssl-keyfile needs --ssl-certfile: the certificate of the key")
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A file may hold both. Without a password there is nothing to ask the terminal for.
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile or None, password="")
    except (OSError, ValueError) as error:
        files = " and ".join(name for name in (settings.ssl_certfile, settings.ssl_keyfile) if name)
        raise SettingsError(
            f"--ssl-certfile and --ssl-keyfile: {files} cannot be used ({error}). Both are PEM, the key without a "
            "password."
        ) from error
    return True
