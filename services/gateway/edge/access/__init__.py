"""Access control for clients: API keys, rate limits, deadlines, usage records. Independent of HTTP server and engines.

| module              | what it does                                                                            |
|---------------------|-----------------------------------------------------------------------------------------|
| `key_file`          | reads the file of API keys (`shared/security/api_keys.py`) when it changes              |
| `call`              | the HTTP request in progress: its key and the headers that concern access               |
| `guard`             | the backend restricted to one key's models and limits; all endpoints use it             |
| `quotas`, `account` | limits that hold for all gateways together                                              |
| `reservation`       | the part of its key's limits that a request has reserved; it is given back exactly once |
| `log_part`          | the part of a log on the bus that one gateway may fill, divided among keys              |
| `kept_images`       | files of images in such a log, once for each key                                        |
| `usage`             | passes usage records on without delaying requests                                       |
| `usage_sinks`       | receivers of usage records: the bus, a file, a web server                               |
| `usage_metrics`     | counts of usage records for `/metrics`                                                  |
"""
