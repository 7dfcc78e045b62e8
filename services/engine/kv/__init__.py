"""Transfers of KV blocks between engines: the half that moves bytes. The scheduler's half is `core.kv.kv_transfer`.

layout       the form in which blocks travel, whatever the backend
wire         the messages on a connection
channel      a connection: messages with their blocks, and shared memory between engines of one machine
sender       the blocks that this engine has computed for others
receiver     one load: fetches blocks, checks them, writes them to host blocks
connector    both, on a thread with an event loop of its own; what the step loop uses
"""
