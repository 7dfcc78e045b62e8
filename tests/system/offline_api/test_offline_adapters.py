"""LoRA adapters offline: one for a call, one for each prompt, in chats, embeddings and with asyncio."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from antiphon import LLM, AsyncLLMEngine, LoRARequest, PromptAdapterRequest
from tests.adapters import make_adapter, make_prompt_adapter, merge, prompted_reference
from tests.models import greedy_reference
from tests.system.offline import FLAGS, GREEDY, PROMPTS, generate

pytestmark = [pytest.mark.system, pytest.mark.model]


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    made = tmp_path_factory.mktemp("adapters")
    paths = [make_adapter(made / name, model, seed=seed) for seed, name in enumerate(("sql", "tales"), 1)]
    return [LoRARequest(path.name, number, str(path)) for number, path in enumerate(paths, 1)]


@pytest.fixture(scope="module")
def adapted(model: Path) -> Iterator[LLM]:
    with LLM(str(model), enable_lora=True, max_lora_rank=8, **FLAGS) as made:
        yield made


@pytest.fixture(scope="module")
def merged(model: Path, adapters: list[LoRARequest], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = tmp_path_factory.mktemp("merged")
    return [merge(made / one.lora_name, model, Path(one.lora_path)) for one in adapters]


def ids(outputs: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def expected(llm: LLM, directory: Path, prompt: str) -> list[int]:
    """What transformers gives, up to the end of the sequence."""
    found = greedy_reference(directory, llm.get_tokenizer()(prompt)["input_ids"], GREEDY.max_tokens or 0)
    return found[: found.index(2) + 1] if 2 in found else found


@pytest.mark.spec("S-OFF-033")
def test_one_adapter_for_all_prompts_or_one_for_each(
    adapted: LLM, model: Path, adapters: list[LoRARequest], merged: list[Path]
) -> None:
    by_model = {one: [expected(adapted, one, prompt) for prompt in PROMPTS] for one in (model, *merged)}
    assert len({str(found) for found in by_model.values()}) == 3
    assert ids(generate(adapted, PROMPTS, GREEDY)) == by_model[model]
    assert ids(generate(adapted, PROMPTS, GREEDY, lora_request=None)) == by_model[model]
    for request, directory in zip(adapters, merged, strict=True):
        assert ids(generate(adapted, PROMPTS, GREEDY, lora_request=request)) == by_model[directory]
    same = [PROMPTS[0]] * 3
    mixed = generate(adapted, same, GREEDY, lora_request=[adapters[0], None, adapters[1]])
    assert ids(mixed) == [by_model[merged[0]][0], by_model[model][0], by_model[merged[1]][0]]


@pytest.mark.spec("S-OFF-025")
def test_a_chat_with_an_adapter(adapted: LLM, adapters: list[LoRARequest], merged: list[Path]) -> None:
    messages = [{"role": "user", "content": "Name a colour."}]
    plain = ids(adapted.chat(messages, GREEDY, use_tqdm=False))
    found = ids(adapted.chat(messages, GREEDY, use_tqdm=False, lora_request=adapters[0]))
    assert found != plain
    with LLM(str(merged[0]), **FLAGS) as reference:
        assert ids(reference.chat(messages, GREEDY, use_tqdm=False)) == found


def test_vectors_with_an_adapter(adapted: LLM, adapters: list[LoRARequest], merged: list[Path]) -> None:
    found = adapted.embed(PROMPTS[0], use_tqdm=False, lora_request=adapters[1])[0].outputs.embedding
    with LLM(str(merged[1]), **FLAGS) as reference:
        wanted = reference.embed(PROMPTS[0], use_tqdm=False)[0].outputs.embedding
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_files_that_are_replaced_between_two_calls_are_another_adapter(
    adapted: LLM, model: Path, adapters: list[LoRARequest], merged: list[Path], tmp_path: Path
) -> None:
    request = LoRARequest("changing", 9, str(make_adapter(tmp_path / "a", model, seed=1)))
    first = expected(adapted, merged[0], PROMPTS[0])
    assert ids(generate(adapted, PROMPTS[0], GREEDY, lora_request=request)) == [first]
    make_adapter(tmp_path / "a", model, seed=2)
    second = expected(adapted, merged[1], PROMPTS[0])
    assert ids(generate(adapted, PROMPTS[0], GREEDY, lora_request=request)) == [second]


@pytest.mark.parametrize(
    ("asked", "kind", "said"),
    [
        (lambda one: [one], ValueError, "2 prompts and 1 lora_request: give one, or as many as prompts"),
        (lambda one: "sql", TypeError, "lora_request must be a LoRARequest"),
        (lambda one: LoRARequest("x", 1, "/nowhere"), ValueError, "there is no directory /nowhere"),
    ],
)
def test_wrong_adapters_raise_before_anything_runs(
    adapted: LLM, adapters: list[LoRARequest], asked: Any, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        generate(adapted, PROMPTS, GREEDY, lora_request=asked(adapters[0]))


def test_a_request_names_what_is_missing() -> None:
    cases: list[tuple[tuple[Any, ...], str]] = [
        (("", 1, "a"), "lora_name"), (("a", 0, "a"), "lora_int_id"), (("a", 1), "lora_path"),
    ]  # fmt: skip
    for arguments, said in cases:
        with pytest.raises(ValueError, match=said):
            LoRARequest(*arguments)


async def test_concurrent_requests_with_different_adapters(
    model: Path, adapted: LLM, adapters: list[LoRARequest], merged: list[Path]
) -> None:
    import asyncio

    engine = AsyncLLMEngine(str(model), enable_lora=True, **FLAGS)

    async def last(request: LoRARequest | None) -> list[int]:
        outputs = [one async for one in engine.generate(PROMPTS[0], GREEDY, lora_request=request)]
        return list(outputs[-1].outputs[0].token_ids)

    try:
        found = await asyncio.gather(*map(last, (*adapters, None)))
    finally:
        await engine.shutdown()
    assert found == [expected(adapted, one, PROMPTS[0]) for one in (*merged, model)]


def test_adapters_named_by_the_constructor_must_be_servable(model: Path, adapters: list[LoRARequest]) -> None:
    word = f"sql={adapters[0].lora_path}"
    with LLM(str(model), lora_modules=[word], **FLAGS) as llm:
        assert ids(generate(llm, PROMPTS[0], GREEDY, lora_request=adapters[0]))
    with pytest.raises(ValueError, match="above --max-lora-rank=2"):
        LLM(str(model), lora_modules=[word], max_lora_rank=2, **FLAGS)


@pytest.mark.spec("S-OFF-034")
def test_prompt_adapters_one_for_all_prompts_or_one_for_each(
    model: Path, adapters: list[LoRARequest], merged: list[Path], tmp_path: Path
) -> None:
    paths = [make_prompt_adapter(tmp_path / str(count), model, num_tokens=count) for count in (4, 9)]
    requests = [PromptAdapterRequest(path.name, 1, str(path), int(path.name)) for path in paths]
    flags = {"enable_prompt_adapter": True, "max_prompt_adapter_token": 16, "enable_lora": True}
    with LLM(str(model), **flags, **FLAGS) as llm:
        tokens = llm.get_tokenizer()(PROMPTS[0])["input_ids"]

        def wanted(directory: Path, path: Path) -> list[int]:
            found = prompted_reference(directory, path, tokens, GREEDY.max_tokens or 0)
            return found[: found.index(2) + 1] if 2 in found else found

        both = [wanted(model, path) for path in paths]
        plain = expected(llm, model, PROMPTS[0])
        assert len({str(one) for one in (*both, plain)}) == 3
        same = [PROMPTS[0]] * 3
        one_each = generate(llm, same, GREEDY, prompt_adapter_request=[requests[0], None, requests[1]])
        assert ids(one_each) == [both[0], plain, both[1]]
        assert all(output.prompt_token_ids == tokens for output in one_each)
        assert ids(generate(llm, same, GREEDY, prompt_adapter_request=requests[1])) == [both[1]] * 3
        with_lora = generate(llm, PROMPTS[0], GREEDY, lora_request=adapters[0], prompt_adapter_request=requests[0])
        assert ids(with_lora) == [wanted(merged[0], paths[0])]
        for wrong, said in (
            (PromptAdapterRequest("x", 1, str(paths[0]), 5), "5 were given, and the adapter 'x' has 4"),
            (PromptAdapterRequest("x", 1, adapters[0].lora_path), "the adapter 'x' is a LoRA adapter"),
            ([requests[0]], "3 prompts and 1 prompt_adapter_request"),
        ):
            with pytest.raises(ValueError, match=said):
                generate(llm, same, GREEDY, prompt_adapter_request=wrong)
        with pytest.raises(ValueError, match="is a prompt adapter"):
            generate(llm, same, GREEDY, lora_request=LoRARequest("x", 1, str(paths[0])))
