"""Prints what the device can do at best: `timing.rooflines`."""

import json

from bench.gpu.timing import rooflines

if __name__ == "__main__":
    print(json.dumps(rooflines()))
