"""The machine's limits, measured around a load, and the floor of a load's time that follows from them."""
