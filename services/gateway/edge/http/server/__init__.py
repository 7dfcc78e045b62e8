"""The HTTP server of a gateway.

| module           | what it does                                                        |
|------------------|---------------------------------------------------------------------|
| `uvicorn_server` | uvicorn, its settings and its listening socket                      |
| `accepting`      | accepts connections from that socket, makes their protocol objects  |
| `waiting`        | accepts connections that wait at other gateways' sockets            |
| `places`         | how many connections there may be, and which are closed for others  |
| `connection`     | bounds requests in size and time, and ends connections              |
| `web_socket`     | a connection that has become a WebSocket, with its own limits       |
"""
