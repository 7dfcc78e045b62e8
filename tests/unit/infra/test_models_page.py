"""The tables of models: what families say is known to the gateway, and what is not computed is an error."""

import pytest

from antiphon.services.engine.backends.torch.own_cache.kinds import OWN_CACHE_TYPES
from antiphon.services.engine.models.about import About, about
from antiphon.services.engine.models.families import llama
from antiphon.services.engine.models.registry import FAMILIES
from antiphon.shared.settings.output_formats import REASONING_MARKS, TOOL_MARKS
from infra.checks.models import page, rows
from infra.checks.models.recipes import BATCHED, NATIVE, NO, ONE, Recipe, read_recipes, state
from infra.checks.models.rows import Facts, Row

SAID = [*OWN_CACHE_TYPES.values(), *(about(family, name) for family in FAMILIES for name in family.ARCHITECTURES)]


def test_families_have_names_and_formats_that_the_gateway_knows() -> None:
    assert [one for one in SAID if not one.models.strip()] == []
    assert {name for one in SAID for name in one.tools} <= set(TOOL_MARKS)
    assert {name for one in SAID for name in one.reasoning} <= set(REASONING_MARKS)


def test_a_family_that_says_nothing_has_the_name_in_its_docstring() -> None:
    class New:
        """New 1 and 2: Llama with something new."""

    assert about(New, "NewForCausalLM") == About(models="New 1 and 2")
    assert about(llama, "LlamaForCausalLM").models == "Llama 1 to 3"


def test_a_family_that_no_test_has_a_model_of_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class New:
        ARCHITECTURES = ("NewForCausalLM",)

    monkeypatch.setattr(rows, "FAMILIES", (New,))
    monkeypatch.setattr(rows.examples, "decoders", lambda: ())
    monkeypatch.setattr(rows.examples, "own_caches", lambda: ())
    with pytest.raises(ValueError, match="no test has a model of NewForCausalLM"):
        rows.family_rows()


def test_a_table_leaves_out_columns_without_contents() -> None:
    row = Row(about=About(models="A"), architectures=("B",), facts=Facts(("C++", "yes", *"––––––")), measured="–")
    assert list(rows.table([row])) == [
        "| models | architectures | backends | batched |",
        "|---|---|---|---|",
        "| A | `B` | C++ | yes |",
    ]


def test_text_outside_of_the_markers_stays() -> None:
    begin, end = "<!-- a: written by `python -m infra.checks.models.page` -->", "<!-- end of a -->"
    assert page.replaced(f"x\n{begin}\nold\n{end}\ny", "a", iter(("new",))) == f"x\n{begin}\n\nnew\n\n{end}\ny"
    with pytest.raises(ValueError, match="the page has no lines"):
        page.replaced("x", "a", iter(()))


@pytest.mark.parametrize(
    ("architecture", "kind", "text_kind", "expected"),
    [
        ("LlamaForCausalLM", "llama", "", NATIVE),
        ("Mistral3ForConditionalGeneration", "mistral3", "ministral3", NATIVE),
        ("Mistral3ForConditionalGeneration", "mistral3", "mamba", NO),
        ("MiMoV2FlashForCausalLM", "mimo_v2_flash", "", ONE),
        ("HeliumForCausalLM", "helium", "", BATCHED),
        ("OtherForCausalLM", "other", "", NO),
    ],
)
def test_the_state_of_a_model_follows_from_its_architecture(
    architecture: str, kind: str, text_kind: str, expected: str
) -> None:
    recipe = Recipe(model="a/b", architecture=architecture, kind=kind, text_kind=text_kind)
    assert state(recipe, frozenset({"helium"})) == expected


def test_each_model_is_listed_once() -> None:
    names = [recipe.model for recipe in read_recipes()]
    assert names == sorted(set(names), key=str.lower)
