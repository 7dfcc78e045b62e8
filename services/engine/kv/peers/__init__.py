"""Copies of an engine's stored blocks at an engine of another machine, which can go on if the first machine is lost.

ring      which engine keeps the copies of which other one; pure. `peer_actor` asks it over the bus
copies    sends blocks that have been written, over a connection, beside everything else
keeper    receives blocks of other engines and writes them to the own store
"""
