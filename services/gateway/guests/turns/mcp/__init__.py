"""A client of MCP servers over Streamable HTTP. It trusts no server: see `outbound` and `exchange`.

| module     | what it does                                                            |
|------------|-------------------------------------------------------------------------|
| `outbound` | which servers a client may name, and the connection to one              |
| `exchange` | one HTTP request and its answer, limited in time and bytes              |
| `client`   | the session with one server: its tools, and calls of them               |
| `errors`   | the two ways in which a request can fail                                |
"""
