"""The small models of the tests, each with the backends whose output a test compares with transformers.

Read from the tests' parametrisations, so that a new variant there is an example here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from antiphon.services.engine.backends.torch.whole_text.kinds import CLASSIFIER, ENCODERS
from antiphon.services.engine.models.registry import has_family
from tests import vision_models
from tests.model import (
    harness,
    test_images,
    test_own_cache,
    test_parity,
    test_text_parts,
    test_transformers_model,
    test_triton_worker,
)
from tests.model import test_whole_text as whole_text
from tests.models import small_config
from tests.plain_decoders import PLAIN_FAMILIES

Config = dict[str, Any]
_TORCH = frozenset({"torch"})
BACKENDS = {"native": "C++", "triton": "Triton", "torch": "PyTorch"}
"""The tests' name of a backend → that in the documents, in their order there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """The config.json of a test's model."""

    config: Config
    backends: frozenset[str] = frozenset()
    """Those whose output is compared; empty: the model is in no comparison."""
    plain: bool = False
    """Whether it is compared with a plain reference, because transformers has no class for the model."""

    @property
    def architecture(self) -> str:
        """The architecture's name."""
        return self.config["architectures"][0]


def decoders() -> Iterator[Example]:
    """Yields the models whose generated tokens are compared."""
    pairs: dict[str, set[str]] = {}
    compared = test_parity.test_greedy_output_is_that_of_transformers_in_chunks_and_a_mixed_batch
    for backend, variant in _values(compared, "backend,variant"):
        pairs.setdefault(variant, set()).add(backend)
    # The GPU's kernels are compared with PyTorch's operations.
    for variant in _values(
        test_triton_worker.test_families_of_every_kind_get_the_tokens_of_the_torch_worker, "variant"
    ):
        pairs[variant].add("triton")
    for variant, backends in pairs.items():
        family, fields = harness.VARIANTS[variant]
        config, plain = small_config(family, **fields), family in PLAIN_FAMILIES
        yield Example(config=config, backends=frozenset(backends), plain=plain)
    for name in _values(test_text_parts.test_text_is_that_of_transformers, "name"):
        yield Example(config=test_text_parts.small_config(name), backends=frozenset(harness.BACKENDS))
    fast = _values(test_images.test_the_fast_backend_takes_images, "family")
    for name in vision_models.FAMILIES:
        backends = {"torch", "native"} if name in fast else {"torch"}
        yield Example(config=vision_models.small_vision_config(name), backends=frozenset(backends))


def own_caches() -> Iterator[Example]:
    """Yields the models that are compared while they run with transformers' own cache."""
    compared = test_own_cache.test_greedy_text_is_that_of_transformers_in_chunks_and_a_mixed_batch
    for family in _values(compared, "family"):
        yield Example(config=small_config(family), backends=_TORCH)


def foreign() -> Iterator[Example]:
    """Yields the models without a family that are compared while they run with the engine's cache."""
    compared = test_transformers_model.test_greedy_text_is_that_of_transformers_in_chunks_and_a_mixed_batch
    yield from _typed(_values(compared, "family"))
    yield from (one for one in decoders() if not has_family(one.config))


def encoders() -> Iterator[Example]:
    """Yields a model of each type of encoder."""
    compared = _values(whole_text.test_vectors_are_those_of_transformers_whatever_is_computed_beside, "model_type")
    for kind in ENCODERS:
        fields = {"model_type": kind, "architectures": [MODEL_MAPPING_NAMES[kind]]}
        yield Example(config=fields, backends=_TORCH if kind in compared else frozenset())


def classifiers() -> Iterator[Example]:
    """Yields the models with a classification head that are compared."""
    compared = whole_text.test_labels_are_those_of_transformers_whatever_is_computed_beside
    for kind in _values(compared, "model_type"):
        name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[kind]
        assert name.endswith(CLASSIFIER)
        yield Example(config={"model_type": kind, "architectures": [name]}, backends=_TORCH)


def _typed(kinds: list[str]) -> Iterator[Example]:
    """Yields examples of which only the type is known."""
    for kind in kinds:
        yield Example(config={"model_type": kind, "architectures": [architecture_of(kind)]}, backends=_TORCH)


def architecture_of(kind: str) -> str:
    """Returns transformers' architecture of a model type; of one that takes images, the class that does."""
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]


def _values(test: Any, names: str) -> list[Any]:
    """Returns the values with which a test is parametrised for these names, the slow ones too."""
    for mark in test.pytestmark:
        given = mark.args[0] if mark.name == "parametrize" else ()
        if names == (given if isinstance(given, str) else ",".join(given)):
            return [_plain(one) for one in mark.args[1]]
    raise ValueError(f"{test.__name__} is not parametrised by {names}: say in {__name__} what it compares")


def _plain(one: Any) -> Any:
    """Returns what `pytest.param` was given: its only value, or a tuple of several."""
    if not isinstance(one, type(pytest.param())):
        return one
    return one.values[0] if len(one.values) == 1 else one.values
