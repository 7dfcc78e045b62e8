"""Which GGUF file of a repository a tag names."""

import pytest

from antiphon.shared.models.gguf_model.names import NoSuchFileError, choose, quantization_of, stem_of

MODELS = {
    "Qwen3-0.6B-Q4_K_M.gguf": "Q4_K_M",
    "qwen2.5-7b-instruct-q8_0.gguf": "Q8_0",
    "Qwen3-0.6B-UD-Q4_K_XL.gguf": "UD-Q4_K_XL",
    "Llama-3.2-1B.IQ4_XS.gguf": "IQ4_XS",
    "gpt-oss-20b-mxfp4.gguf": "MXFP4",
    "gpt-oss-20b-F16.gguf": "F16",
    "Q2_K/Big-Q2_K-00001-of-00002.gguf": "Q2_K",
    "BF16/Big-00001-of-00002.gguf": "BF16",
    "model.gguf": "",
    "Qwen3-Q.gguf": "",
}


def test_names_have_quantizations() -> None:
    assert {name: quantization_of(name) for name in MODELS} == MODELS
    assert stem_of("a/Big-Q2_K-00001-of-00002.gguf") == "Big-Q2_K"
    assert stem_of("m.Q8_0.gguf") == "m.Q8_0"


def one(files: list[str], tag: str = "") -> str:
    (name,) = choose(files, tag)
    return name


def test_a_tag_chooses_in_any_case_and_without_one_the_usual_ones_are_taken() -> None:
    files = ["README.md", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-UD-Q2_K_XL.gguf", "mmproj-F16.gguf", "m.imatrix.gguf"]
    assert one(files) == one(files, "q4_k_m") == "m-Q4_K_M.gguf"
    assert one(files, "Q8_0") == one(files, "m-Q8_0.gguf") == one(files, "m-Q8_0") == "m-Q8_0.gguf"
    assert one(files, "Q2_K_XL") == one(files, "ud-q2_k_xl") == "m-UD-Q2_K_XL.gguf"
    assert one(["a-Q6_K.gguf", "a-Q8_0.gguf"]) == "a-Q8_0.gguf"
    assert one(["a-Q6_K.gguf"]) == "a-Q6_K.gguf"
    assert one(["a.gguf"], "a") == "a.gguf"


def test_the_parts_of_a_model_belong_together() -> None:
    parts = [f"Q4_K_M/m-Q4_K_M-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    assert choose([*reversed(parts), "m-Q8_0.gguf"], "") == parts


@pytest.mark.parametrize(
    ("files", "tag", "told"),
    [
        (["mmproj-F16.gguf"], "", "it has no GGUF file of a language model."),
        (["a-Q6_K.gguf", "a-Q5_0.gguf"], "", "it has several GGUF files; add one of these tags: Q5_0, Q6_K."),
        (["a-Q6_K.gguf"], "Q4_0", "it has no GGUF file with the tag 'Q4_0'; it has: Q6_K."),
        (["a-Q6_K.gguf", "b-Q6_K.gguf"], "Q6_K", "give the name of one as the tag: a-Q6_K.gguf, b-Q6_K.gguf."),
        (["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"], "", "it has several GGUF files; add one of these tags: Q4_K_M."),
    ],
)
def test_what_cannot_be_chosen_is_refused_with_the_tags(files: list[str], tag: str, told: str) -> None:
    with pytest.raises(NoSuchFileError) as raised:
        choose(files, tag)
    assert str(raised.value).endswith(told)
