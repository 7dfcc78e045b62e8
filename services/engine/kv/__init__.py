"""Transfers of KV blocks between engines: the half that moves bytes. The scheduler's half is `core.kv.kv_transfer`.

layout         the transfer layout of a block, independent of the backend
pieces         copies of blocks to and from contiguous memory, with their checksum
wire           the messages on a connection
channel        a connection for messages and blocks
shared_memory  memory that engines of one machine share, for several transfers
sender         serves the blocks that this engine has computed for others
receiver       one load: fetches blocks, checks them, writes them to host blocks
connector      the interface for the step loop: runs sender and receivers on a separate thread
"""
