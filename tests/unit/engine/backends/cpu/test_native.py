"""The structures of the binding and those of the header have the same fields, of the same sizes, in the same order."""

import ctypes
import re

import pytest

from antiphon.services.engine.backends.cpu.compile import SOURCE
from antiphon.services.engine.backends.cpu.native import Quantized, Spec, Step

HEADER = (SOURCE / "abi.h").read_text()


def declared(structure: str) -> list[tuple[str, int]]:
    """Returns the name and the bytes of each field of a structure of the header."""
    found = re.search(rf"struct {structure} {{\n(.*?)\n}};", HEADER, re.DOTALL)
    assert found is not None
    fields: list[tuple[str, int]] = []
    for statement in re.sub(r"//.*", "", found[1]).split(";")[:-1]:
        first, *more = statement.split(",")
        kind, first = first.strip().rsplit(maxsplit=1)
        for field in (first, *more):
            is_address = "*" in kind + field
            fields.append((field.strip(" \n*"), 4 if kind == "float" and not is_address else 8))
    return fields


@pytest.mark.parametrize(
    ("name", "structure"), [("antiphon_Spec", Spec), ("antiphon_Step", Step), ("antiphon_Quantized", Quantized)]
)
def test_a_structure_is_that_of_the_header(name: str, structure: type[ctypes.Structure]) -> None:
    assert declared(name) == [(field, ctypes.sizeof(kind)) for field, kind, *_ in structure._fields_]
