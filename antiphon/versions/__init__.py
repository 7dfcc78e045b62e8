"""The versions of models that a launcher runs: starts a new one, switches to it, ends the former one.

supervisor   the launcher's actor on the bus: takes the orders of gateways and carries them out
watch        which members of a version are ready, and whether its engines are idle
"""
