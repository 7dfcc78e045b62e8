"""A client of MCP servers over Streamable HTTP. It trusts no server: see `outbound` and `exchange`.

| module     | what it does                                                            |
|------------|-------------------------------------------------------------------------|
| `outbound` | where a request may go, and a connection to an address that was checked |
| `exchange` | one HTTP request and its answer, limited in time and bytes              |
| `client`   | the session with one server: its tools, and calls of them               |
| `errors`   | the two ways in which a request can fail                                |
"""
