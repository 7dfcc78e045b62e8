"""Prints the device's highest copy bandwidth and multiplication rate, measured by `timing.rooflines`."""

import json

from bench.gpu.timing import rooflines

if __name__ == "__main__":
    print(json.dumps(rooflines()))
