"""Settings of the tools that a gateway runs for the model."""

from antiphon.shared.flags import Settings, flag


class GatewayToolSettings(Settings, group="http"):
    """MCP servers whose tools responses may use (docs/guides/turns.md)."""

    mcp_servers: str = flag(
        "",
        "JSON file with the MCP servers that every request may use by name; they may be in a private network "
        "(default: none)",
        metavar="FILE",
    )
    allowed_mcp_hosts: str = flag(
        "",
        "public hosts of MCP servers that a request may name by URL, separated by commas; .example.org: all hosts "
        "below it (default: none)",
    )
