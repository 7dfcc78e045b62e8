"""Answers to requests with an `Idempotency-Key`, which all gateways share over the bus. ADR 110.

| module  | what it does                                                     |
|---------|------------------------------------------------------------------|
| `store` | the log on the bus with the requests and their answers           |
| `guest` | makes it for a gateway                                           |
"""
