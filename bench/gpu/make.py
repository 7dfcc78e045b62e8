"""Writes a benchmark model as DIRECTORY/NAME: `python -m bench.gpu.make NAME DIRECTORY`."""

import json
import sys
from pathlib import Path

from bench.gpu.models import make

if __name__ == "__main__":
    print(json.dumps({"directory": str(make(sys.argv[1], Path(sys.argv[2])))}))
