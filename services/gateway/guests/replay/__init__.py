"""Recorded requests that run again: compared with what was recorded, or from the middle of their output.

checks       checks a record that a client sends
rerun        makes a request from a recorded one
comparison   runs it and compares the tokens
output       the recorded tokens with their texts
api          `GET /v1/requests/{id}/record` and `…/output`, `POST …/replay` and `…/fork`, `POST /v1/replay`
"""
