"""What a family says about its models besides what its code computes: names, formats of their outputs, limits.

The optional `ABOUT` of a family's module, for all its architectures or for each. No computation depends on it:
docs/reference/models.md shows it.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Facts about the models of a family, or of one of its architectures."""

    models: str = ""
    """The models' names; empty: what the docstring of the family's module names before its first colon."""
    tools: tuple[str, ...] = ()
    """Formats of tool calls in the chat templates of these models (`output_formats.TOOL_MARKS`)."""
    reasoning: tuple[str, ...] = ()
    """Formats of reasoning in them (`output_formats.REASONING_MARKS`)."""
    limits: str = ""
    """What is not served of these models, or served in another way, in Markdown."""


def about(family: object, architecture: str) -> About:
    """Returns what a family says about one of its architectures, with the models' names filled in."""
    said: About | Mapping[str, About] = getattr(family, "ABOUT", None) or About()
    one = said if isinstance(said, About) else said.get(architecture, About())
    names = one.models or (family.__doc__ or "").partition(":")[0]
    return About(models=names, tools=one.tools, reasoning=one.reasoning, limits=one.limits)
