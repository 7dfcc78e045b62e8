"""The engine's half of sessions that travel: blocks of KV from its disk and to it, by their names.

blocks   assembles written blocks from their parts, and cuts read ones; without bus
actor    answers gateways
"""
