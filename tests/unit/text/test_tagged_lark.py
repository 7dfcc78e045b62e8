"""Free text with tagged parts: what its grammar allows, whether its marks are special tokens or not."""

import json
from functools import cache

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.parameters.tagged_text import (
    Chain,
    Choice,
    Json,
    Literal,
    Name,
    Raw,
    Repeat,
    Space,
    Tag,
    TaggedText,
    decode,
    schemas,
)
from antiphon.shared.text.grammars import constraint
from tests.tokenizer_files import token_id

NUMBER = {"type": "integer", "minimum": 1, "maximum": 5}
CALL = Tag("<call>", Chain((Space(), Json(NUMBER, 0), Literal("</call>"))))


@cache
def tokenizer(*special: str) -> Tokenizer:
    """One token for each byte, and these special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<|end|>", *special)])
    return found


def allows(grammar: TaggedText | Grammar, text: str, *special: str, spelled: bool = False) -> bool:
    """Whether the grammar allows this output as a whole. `spelled`: written without special tokens."""
    vocabulary = tokenizer(*special)
    tokens = LLTokenizer(vocabulary.to_str(), eos_token=[token_id(vocabulary, "<|end|>")])
    if isinstance(grammar, TaggedText):
        grammar = Grammar("tagged_text", grammar.encode())
    matcher = constraint.compile_grammar(grammar, tokens)
    written = [one for part in (text if spelled else [text]) for one in vocabulary.encode(part).ids]
    return matcher.try_consume_tokens(written) == len(written) and matcher.is_accepting()


@pytest.mark.parametrize("special", [(), ("<call>",), ("<call>", "</call>", "<other>")])
@pytest.mark.parametrize("spelled", [True, False])
def test_a_mark_begins_its_part_however_it_is_written(special: tuple[str, ...], spelled: bool) -> None:
    for text, fits in [
        ("", True),
        ("free <cal text > call> \n é\n", True),
        ("a <call>3</call> b <call> \n5</call>", True),
        ("a <call>7</call>", False),
        ("a <call>3", False),
        ("a <call>3</call> <call>x", False),
    ]:
        assert allows(TaggedText((CALL,)), text, *special, spelled=spelled) is fits, text


def test_other_special_tokens_are_free_text_unless_they_split_a_mark() -> None:
    tagged = TaggedText((CALL,))
    assert allows(tagged, "<other>a <call>3</call><other>b", "<other>")
    assert allows(tagged, "a < <other> call>", "<other>")
    # Detokenizers skip <other>, so this would be a mark.
    assert not allows(tagged, "a <ca<other>ll>", "<other>")


def test_an_opening_stands_where_the_text_begins_and_free_text_does_not_look_like_it() -> None:
    tagged = TaggedText(
        (CALL, Tag("<end>", Chain(()))), opening=Chain((Literal("{"), Name(), Literal("}"))), not_first="{["
    )
    for text, fits in [
        ("{a_1}", True),
        (" {a}{b} more", True),
        ("text {1} [", True),
        ("{1}", False),
        (" [1]", False),
        ("\u00a0\x1c[", False),
        ("a <end> {b}", True),
        ("a <end> {1}", False),
        ("<call>3</call> {1}", False),
    ]:
        assert allows(tagged, text) is fits, text


def test_json_has_little_whitespace_if_the_output_is_nothing_else() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    call = Chain((Literal("<call>"), Json(schema, 0)))
    only = TaggedText((), opening=call, is_free=False)
    for text in ('<call>{"a":1}', '<call>{"a": 1}', '<call>{\n"a": 1\n}'):
        assert allows(only, text), text
    assert not allows(only, '<call>{"a":  1}')
    assert allows(TaggedText((Tag("<call>", Json(schema, 0)),)), '<call>{"a":  1}')


def test_raw_text_ends_at_the_first_closing_mark() -> None:
    value = Chain((Raw("</v>", "\n", 2, 4), Literal("!")))
    for special in ((), ("</v>",)):
        for text, fits in [
            ("ab\n</v>!", True),
            ("éééé\n</v>!", True),
            ("a\n\n</v>!", True),
            ("a\n</v>!", False),
            ("abcde\n</v>!", False),
            ("ab</v>!", False),
            ("ab</v>x\n</v>!", False),
        ]:
            assert allows(TaggedText((Tag("<v>", value),)), "<v>" + text, *special) is fits, text


def test_pieces_are_chosen_repeated_and_left_out() -> None:
    digits = Repeat(Choice((Literal("1"), Literal("2"))))
    tagged = TaggedText((Tag("(", Chain((digits, Repeat(Literal("!"), at_most_once=True), Literal(")")))),))
    for text, fits in [("()", True), ("(1221!)", True), ("(!!)", False), ("(3)", False)]:
        assert allows(tagged, text) is fits, text


def test_a_structural_tag_of_a_request_is_such_a_text() -> None:
    structures = [{"begin": f"<f={name}>", "schema": NUMBER, "end": "</f>"} for name in ("a", "b")]
    grammar = Grammar("structural_tag", json.dumps({"structures": structures, "triggers": ["<f="]}))
    for special in ((), ("</f>", "<think>")):
        assert allows(grammar, "<think>Free <f> text <f=a>3</f> and <f=b>1</f>.", *special)
        assert not allows(grammar, "<f=c>3</f>", *special)
        assert not allows(grammar, "<f=a>9</f>", *special)


def test_the_schema_that_cannot_be_used_is_named_by_its_place() -> None:
    wrong = Tag("<b>", Repeat(Choice((Json({"type": "strng"}, 4),))))
    tagged = TaggedText((CALL, wrong), opening=Json({}))
    assert decode(tagged.encode()) == tagged
    assert [one.place for one in schemas(tagged)] == [4, 0]
    with pytest.raises(ServiceError, match="cannot be used") as error:
        constraint.check_grammar(Grammar("tagged_text", tagged.encode()), constraint.byte_tokenizer())
    assert error.value.param == "4"
    constraint.check_grammar(Grammar("tagged_text", TaggedText((CALL,)).encode()), constraint.byte_tokenizer())
