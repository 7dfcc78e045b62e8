"""Pairs of texts in a score template, whole and shortened, and the templates in `examples/score`."""

from pathlib import Path

import pytest

from antiphon.shared.errors import ServiceError
from antiphon.shared.text.codec import Codec
from antiphon.shared.text.templates.chat_template import ChatTemplate
from antiphon.shared.text.templates.score_template import ScorePrompt
from tests.tokenizer_files import byte_level

EXAMPLES = Path(__file__).parents[3] / "examples" / "score"
TEMPLATE = (
    '<s>Q {{ (messages | selectattr("role", "eq", "query") | first).content }} '
    'D {{ (messages | selectattr("role", "eq", "document") | first).content }} answer:'
)
CODEC = Codec(byte_level())


def rendered(pair: tuple[str, str], template: str = TEMPLATE, keep: int = 0) -> tuple[str, int, int]:
    """The text of the prompt, the number of its tokens, and how often it was rendered."""
    prompt = ScorePrompt(CODEC, pair, keep=keep, add_special_tokens=True, bos="<s>")
    times, ids = 0, None
    while ids is None:
        times += 1
        ids = prompt.token_ids(ChatTemplate(template, {}, 10**6).render(prompt.messages, False))
    return CODEC.decode(ids), len(ids), times


def test_a_pair_becomes_the_text_of_the_template() -> None:
    assert rendered(("pets", "a cat"))[0] == "<s>Q pets D a cat answer:"


@pytest.mark.parametrize("keep", [20, 30, 60])
def test_the_texts_are_shortened_the_longer_one_first_and_the_template_stays(keep: int) -> None:
    document = "straße und ähnliche wörter " * 40
    text, count, times = rendered(("pets", document), keep=keep)
    assert text.startswith("<s>Q pets D stra")
    assert text.endswith(" answer:")
    assert "\ufffd" not in text
    assert keep - 4 <= count <= keep
    assert times <= 3
    text, count, _ = rendered((document, document), keep=keep)
    query, _, rest = text.removeprefix("<s>Q ").partition(" D ")
    assert document.startswith(query)
    assert document.startswith(rest.removesuffix(" answer:").rstrip())
    assert count <= keep


def test_a_text_that_stands_twice_in_the_template_is_shortened_for_both() -> None:
    template = "{{ messages[1].content }} | {{ messages[1].content }} {{ messages[0].content }} end"
    text, count, _ = rendered(("q", "cat and dog " * 50), template, keep=40)
    first, _, second = text.removesuffix(" q end").partition(" | ")
    assert first == second
    assert count <= 40


@pytest.mark.parametrize("template", [TEMPLATE, "a template that has no place for any text"])
def test_a_template_that_fills_the_tokens_alone_is_refused(template: str) -> None:
    with pytest.raises(ServiceError, match="leave no room for the texts in the score template") as refused:
        rendered(("pets", "a cat"), template, keep=4)
    assert (refused.value.code, refused.value.param) == ("invalid_value", "truncate_prompt_tokens")


def test_the_examples_are_the_prompts_that_the_models_were_trained_with() -> None:
    def of(name: str) -> str:
        messages = ScorePrompt(CODEC, ("pets", "a\ncat"), keep=0, add_special_tokens=True, bos="").messages
        return ChatTemplate((EXAMPLES / name).read_text(), {}, 10**6).render(messages, False)

    # The prompts are those of the model cards of Qwen3-Reranker and bge-reranker-v2-gemma.
    assert of("qwen3_reranker.jinja") == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        "<Query>: pets\n<Document>: a\ncat<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert of("bge-reranker-v2-gemma.jinja") == (
        "A: pets\nB: a\ncat\nGiven a query A and a passage B, determine whether the passage contains an answer to the "
        "query by providing a prediction of either 'Yes' or 'No'."
    )
