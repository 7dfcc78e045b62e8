"""Runs in vLLM's environment: loads one checkpoint and writes the greedy tokens of some prompts.

    ENVIRONMENT/bin/python vllm_greedy.py MODEL_DIRECTORY REQUEST.json RESULT.json

The request is {"prompts": [[token id, …], …], "max_tokens": int}; the result is {"version": str, "outputs": [[token id,
…], …]}. Called by `bench.peer_systems.vllm_loads`; imports nothing of this project, which vLLM's environment lacks.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

MAX_MODEL_LEN = 512


def main(model: str, request: Path, result: Path) -> None:
    # Named at run time: the project's environment, in which types are checked, has no vLLM.
    vllm: Any = importlib.import_module("vllm")
    wanted = json.loads(request.read_text(encoding="utf-8"))
    engine = vllm.LLM(model=model, dtype="bfloat16", max_model_len=MAX_MODEL_LEN, enforce_eager=True, max_num_seqs=8)
    params = vllm.SamplingParams(temperature=0, max_tokens=wanted["max_tokens"])
    prompts = [{"prompt_token_ids": prompt} for prompt in wanted["prompts"]]
    outputs = [list(output.outputs[0].token_ids) for output in engine.generate(prompts, params, use_tqdm=False)]
    result.write_text(json.dumps({"version": vllm.__version__, "outputs": outputs}), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
