"""Runs tests of kernels or of workers on the GPU: `python -m bench.gpu.kernel_tests kernels|workers [-n 12]`.

The same tests run on a CPU in `make test`, the kernels under Triton's interpreter. The output of pytest is printed
before the result.
"""

import json
import os
import re
import subprocess
import sys

_OF_WORKERS = (
    "adapters", "beams", "latent_attention", "lookahead", "own_cache", "parity", "images", "pooling",
    "prompt_adapters", "prompt_logprobs", "text_parts", "transformers_model", "triton_adapters", "triton_worker",
    "whole_text",
)  # fmt: skip
TESTS = {
    "kernels": ("tests/unit/engine/backends/triton",),
    "workers": (
        *(f"tests/model/test_{name}.py" for name in _OF_WORKERS),
        *(f"tests/quantized/test_{name}.py" for name in ("fp8", "checkpoints", "mxfp4", "bitsandbytes")),
    ),
}
NOT_HERE = "not native and not compiled_backend and not refuse and not cpu"
"""Expression for pytest's `-k`. The tests of the C++ code, and of what is refused on a CPU, need no GPU."""


def main() -> None:
    # Other versions of libraries than the pinned ones may warn, which is an error in this suite.
    options = ["-q", "-W", "default", "-p", "no:cacheprovider", "--tb=short", "-k", NOT_HERE]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(sys.argv[2:] or ["-n", "12"]), *TESTS[sys.argv[1]]],
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
