"""The language models among vLLM's recipes: how each would be run here, computed from its architecture.

The models are in docs/recipes.tsv: the hub name, the architecture in config.json, its `model_type`, and that of its
`text_config` if it decides whether the model is served. What runs is computed by the functions that choose a worker,
and, for models without a family, from the tests (`examples`).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.services.engine.backends.torch.own_cache.kinds import keeps_own_cache
from antiphon.services.engine.models.registry import find_family, has_family
from infra.checks.models import examples

DATA = Path(__file__).resolve().parents[3] / "docs" / "recipes.tsv"
NATIVE, BATCHED, ONE, NO = (
    "native",
    "through transformers, batched",
    "through transformers, one sequence at a time",
    "no",
)
STATES = (NATIVE, BATCHED, ONE, NO)
_COLUMNS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A line of the file."""

    model: str
    architecture: str
    kind: str
    text_kind: str

    @property
    def config(self) -> dict[str, Any]:
        """What is known of its config.json."""
        return {
            "architectures": [self.architecture],
            "model_type": self.kind,
            "text_config": {"model_type": self.text_kind},
        }


def read_recipes() -> list[Recipe]:
    """Returns the models in the order of the file. Raises ValueError for a line without four columns."""
    found: list[Recipe] = []
    for number, line in enumerate(DATA.read_text(encoding="utf-8").splitlines(), 1):
        columns = line.split("\t")
        if len(columns) != _COLUMNS:
            raise ValueError(f"{DATA}:{number}: {len(columns)} columns, not {_COLUMNS}")
        model, architecture, kind, text_kind = columns
        found.append(Recipe(model=model, architecture=architecture, kind=kind, text_kind=text_kind))
    return found


def state(recipe: Recipe, batched: frozenset[str]) -> str:
    """Returns how a model is run here. `batched`: the types that tests run through transformers in batches."""
    if has_family(recipe.config):
        kinds = getattr(find_family(recipe.config), "kinds", ())
        refused = bool(kinds and recipe.text_kind and recipe.text_kind not in kinds)
        return NO if refused else NATIVE
    if keeps_own_cache(recipe.config):
        return ONE
    return BATCHED if recipe.kind in batched else NO


def sections() -> dict[str, Iterator[str]]:
    """Returns the lines of the page's generated parts by their names."""
    batched = frozenset(one.config["model_type"] for one in examples.foreign())
    found = [(recipe, state(recipe, batched)) for recipe in read_recipes()]
    return {"counts": _counts([each for _, each in found]), "recipes": _table(found)}


def _counts(found: list[str]) -> Iterator[str]:
    counts = Counter(found)
    yield "| state here | models |"
    yield "|---|---|"
    for name in STATES:
        yield f"| {name} | {counts[name]} |"
    yield f"| all | {len(found)} |"


def _table(found: list[tuple[Recipe, str]]) -> Iterator[str]:
    yield "| model | architecture | state here |"
    yield "|---|---|---|"
    for recipe, each in found:
        yield f"| {recipe.model} | `{recipe.architecture}` | {each} |"
