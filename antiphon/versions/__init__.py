"""Versions of models: the launcher starts a new version, switches to it and ends the former one; loaded models too.

orders       what orders make of the states of models; pure
supervisor   the launcher's actor on the bus: executes orders of gateways
watch        which members of a version are ready, and whether its engines are idle
"""
