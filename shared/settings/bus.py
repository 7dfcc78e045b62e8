"""The settings that every service has."""

from antiphon.shared.flags import Settings, flag


class BusSettings(Settings, group="bus"):
    """Settings of every service: the bus, the service's own id, logging and tracing."""

    nats: str = flag("", "URL of an existing NATS server (several: separated by commas)", env="ANTIPHON_NATS")
    nats_credentials: str = flag(
        "", "file with 'user:password' for the bus, readable by its owner only", env="ANTIPHON_NATS_CREDENTIALS"
    )
    nats_tls_ca: str = flag(
        "",
        "PEM file of the authorities that the bus's certificate must come from; the connection then uses TLS only",
        env="ANTIPHON_NATS_TLS_CA",
    )
    nats_tls_cert: str = flag(
        "",
        "PEM file of this client's own certificate, for a bus that asks for one (mutual TLS)",
        env="ANTIPHON_NATS_TLS_CERT",
    )
    nats_tls_key: str = flag(
        "", "PEM file of the private key of --nats-tls-cert, if it is not in the same file", env="ANTIPHON_NATS_TLS_KEY"
    )
    namespace: str = flag(
        "antiphon",
        "name of the deployment on the bus; deployments that share a NATS server need different names",
        env="ANTIPHON_NAMESPACE",
    )
    service_id: str = flag("", "name of this replica on the bus (default: host name and process id)")
    log_level: str = flag("info", "lowest severity of messages to print", choices=("debug", "info", "warning", "error"))
    log_format: str = flag(
        "text", "form of the lines: text, or json (one object a line, for log collectors)", choices=("text", "json")
    )
    otlp_traces_endpoint: str = flag(
        "",
        "URL of an OpenTelemetry collector that takes OTLP over HTTP (default: OTEL_EXPORTER_OTLP_ENDPOINT, or none)",
    )
