"""The HTTP server of a gateway.

| module           | what it does                                                   |
|------------------|----------------------------------------------------------------|
| `uvicorn_server` | uvicorn, its settings and its listening socket                 |
| `connection`     | bounds the request line and headers in size and time           |
| `waiting`        | accepts connections that wait at other gateways' sockets       |
"""
