"""Runs the tests of the kernels and of the GPU worker with compiled kernels: `python -m bench.gpu.kernel_tests [-n 8]`.

The same tests run under Triton's interpreter in `make test`. The output of pytest is printed before the result.
"""

import json
import os
import re
import subprocess
import sys

TESTS = (
    "tests/unit/engine/triton",
    "tests/model/test_triton_worker.py",
    "tests/model/test_triton_adapters.py",
    "tests/model/test_latent_attention.py",
    "tests/model/test_pooling.py",
    "tests/quantized/test_fp8.py",
    "tests/quantized/test_checkpoints.py",
)


def main() -> None:
    # Other versions of libraries than the pinned ones may warn, which is an error in this suite.
    options = ["-q", "-W", "default", "-p", "no:cacheprovider", "--tb=short", "-k", "triton or gpu or fp8"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(sys.argv[1:] or ["-n", "8"]), *TESTS],
        env={**os.environ, "TRITON_INTERPRET": "0"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    print(done.stdout, flush=True)
    lines = done.stdout.splitlines() or [""]
    counted = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", lines[-1])}
    wrong = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if not counted:
        wrong.append(f"pytest ended with {done.returncode}")
    print(json.dumps({**counted, "wrong": wrong}))


if __name__ == "__main__":
    main()
