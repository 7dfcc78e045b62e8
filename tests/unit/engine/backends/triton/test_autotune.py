"""The forms of products, and how one is chosen: by measuring, by the rule, by name. Kernels are real, timers given."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.services.engine.backends.triton.autotune import forms, tuning
from antiphon.services.engine.backends.triton.autotune.expert_forms import ExpertWeights
from antiphon.services.engine.backends.triton.autotune.forms import FORMS, Choice, Form, Products
from antiphon.services.engine.backends.triton.autotune.kept import Kept
from antiphon.services.engine.backends.triton.autotune.measuring import Timer, check, reference, rows_like, timer_of
from antiphon.services.engine.backends.triton.autotune.tuning import Asked, asked, row_numbers, tune
from antiphon.services.engine.backends.triton.kernels.products.quantized import few_rows
from antiphon.services.engine.backends.triton.kernels.products.weights import kernel_weight
from antiphon.services.engine.parallel.communicator import Communicator
from antiphon.shared.settings.allowed_values import GPU_KERNEL_FORMS, GPU_KERNELS
from tests.support.ranks import RankThreads
from tests.unit.engine.backends.triton.test_graphs import Idle
from tests.unit.engine.backends.triton.test_quantized import KINDS, draw

CPU = torch.device("cpu")
LIKE = torch.empty(0)
MEASURE = Asked(measures=True, anew=False, pinned={})
ROWS_MAX = 70


class Clock:
    """A timer that says what a form takes by its name and number of rows, and counts what it was asked."""

    def __init__(self, milliseconds: Callable[[str, int], float]) -> None:
        self._milliseconds, self.asked = milliseconds, list[tuple[str, int]]()

    def __call__(self, calls: Sequence[Callable[[], object]]) -> float:
        bound = dict(zip(calls[0].__code__.co_freevars, calls[0].__closure__ or (), strict=True))  # type: ignore[attr-defined]
        form, x = bound["form"].cell_contents, bound["x"].cell_contents
        self.asked.append((form.name, len(x)))
        return self._milliseconds(form.name, len(x))


def skinny_up_to(limit: int) -> Clock:
    """As if `skinny` and `tiles` were faster up to a number of rows."""
    return Clock(lambda name, rows: 1.0 if (name == "library") == (rows > limit) else 2.0)


def plain_products(*weights: Tensor) -> tuple[Products, Choice]:
    products = Products()
    choices = [products.add_plain(weight) for weight in weights or (draw(24, 40),)]
    return products, choices[0]


def names(choice: Choice, rows: Sequence[int]) -> list[str]:
    return [choice.name(number) for number in rows]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_form_computes_the_product(kind: str, dtype: torch.dtype) -> None:
    weight = kernel_weight(KINDS[kind](draw(48, 208, seed=1)), dtype)
    choice = Products().add_quantized(weight, torch.empty(0, dtype=dtype))
    assert ("scaled" in choice.forms) == (kind == "fp8")
    assert "swapped" in choice.forms
    for rows in (3, 40):
        x = rows_like(weight, rows, torch.empty(0, dtype=dtype))
        for form in choice.forms.values():
            check(form, x, weight, reference(x, weight, in_fp8=form.in_fp8))
            bias, residual = draw(48, seed=2, dtype=dtype), draw(rows, 48, seed=3, dtype=dtype)
            y, added = form.compute(x, weight, bias, None), form.compute(x, weight, bias, residual.clone())
            torch.testing.assert_close(added.float(), y.float() + residual.float(), rtol=2e-2, atol=2e-2)


def test_forms_of_plain_weights_compute_the_product_too() -> None:
    weight, bias = draw(24, 40), draw(24, seed=2)
    x, residual = rows_like(weight, 7, LIKE), draw(7, 24, seed=3)
    for form in FORMS["plain"]:
        check(form, x, weight, reference(x, weight))
        added = form.compute(x, weight, bias, residual.clone())
        torch.testing.assert_close(added, reference(x, weight) + bias + residual, rtol=1e-5, atol=1e-5)


def test_a_reordered_weight_is_measured_with_rows_of_its_inputs() -> None:
    stored = KINDS["int4, groups of 32"](draw(16, 64, seed=1))
    order = torch.cat((torch.randperm(40, generator=torch.Generator().manual_seed(1)), torch.full((24,), -1)))
    weight = kernel_weight(replace(stored, shape=(16, 40), order=order.int()), torch.float32)
    x = rows_like(weight, 5, LIKE)
    assert x.shape == (5, 40)
    for form in Products().add_quantized(weight, LIKE).forms.values():
        check(form, x, weight, reference(x, weight))


def expert_weights(dtype: torch.dtype, **chosen: Any) -> ExpertWeights:
    sizes = (96, 48) if chosen.get("gated", True) else (48, 48)
    usual: dict[str, Any] = {
        "gate_up": draw(5, sizes[0], 40, seed=1, dtype=dtype) / 6,
        "down": draw(5, 40, sizes[1], seed=2, dtype=dtype) / 6,
        "biases": (None, None),
        "activation": "silu",
        "gated": True,
        "weighted_inputs": False,
        "per_token": 2,
        "one_tile": False,
    }
    return ExpertWeights(**{**usual, **chosen})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "chosen",
    [{}, {"activation": "swigluoai"}, {"gated": False, "activation": "relu2"}, {"weighted_inputs": True}],
    ids=str,
)
def test_every_form_computes_a_mixture_of_experts(chosen: dict[str, Any], dtype: torch.dtype) -> None:
    weight = expert_weights(dtype, **chosen)
    for rows in (1, 37):
        x = rows_like(weight, rows, torch.empty(0, dtype=dtype))
        residual = draw(rows, 40, seed=3, dtype=dtype)
        expected = reference(x, weight)
        for form in FORMS["experts"]:
            check(form, x, weight, expected)
            added = form.compute(x, weight, None, residual)
            torch.testing.assert_close(added.float(), expected + residual.float(), rtol=2e-2, atol=2e-2)


def test_experts_are_measured_where_the_library_has_their_product() -> None:
    products = Products()
    plain, weighted = (
        products.add_experts(expert_weights(torch.float32, weighted_inputs=w), LIKE) for w in (False, True)
    )
    biased = products.add_experts(expert_weights(torch.float32, biases=(draw(5, 96), draw(5, 40))), LIKE)
    assert len({id(choice) for choice in (plain, weighted, biased)}) == len(products.found) == 3
    tune(products, 64, LIKE, MEASURE, None, Clock(lambda name, rows: 1.0 if (name == "tiles") == (rows < 32) else 2.0))
    assert names(plain, (1, 16, 32, 64, 65)) == ["tiles", "tiles", "library", "library", "tiles"]
    assert names(biased, (1, 64)) == ["tiles", "tiles"]


def test_the_rule_holds_until_something_is_chosen() -> None:
    _, plain = plain_products()
    assert names(plain, (1, 8, 9, 5000)) == ["skinny", "skinny", "library", "library"]
    weight = kernel_weight(KINDS["int8"](draw(16, 64)), torch.float32)
    choice = Products().add_quantized(weight, LIKE)
    assert names(choice, (1, few_rows(weight), few_rows(weight) + 1)) == ["tiles", "tiles", "library"]
    dynamic = kernel_weight(KINDS["int8_dynamic"](draw(16, 64)), torch.float32)
    large = Products().add_quantized(dynamic, LIKE)
    assert large.name(4096) == "tiles"
    assert [form.name for form in large.candidates(4096)] == ["tiles", "library"], "the usual form is always one"


def test_the_fastest_form_is_taken_for_each_number_of_rows(caplog: pytest.LogCaptureFixture) -> None:
    products, choice = plain_products()
    with caplog.at_level(logging.INFO):
        tune(products, ROWS_MAX, LIKE, MEASURE, None, skinny_up_to(2))
    # More rows than `skinny` can compute have one form, which is not measured.
    assert row_numbers(ROWS_MAX) == [1, 2, 4, 8, 16, 32, 64, 70]
    assert names(choice, (1, 2, 3, 8, 16, 17, 70)) == ["skinny", "skinny", *["library"] * 5]
    assert "float32 24 x 40: skinny up to 2, library up to 70" in caplog.text
    assert not products.found, "the weights are forgotten"


def test_ranks_choose_what_is_the_fastest_on_the_slowest_of_them() -> None:
    # On one rank the kernel is faster, on the other the library, by less; a form failed there for 4 rows.
    def other(name: str, rows: int) -> float:
        if rows == 4 and name == "skinny":
            raise RuntimeError("it failed")
        return 3.0 if name == "library" else 9.0

    clocks = [Clock(lambda name, _: 2.0 if name == "library" else 1.0), Clock(other)]
    chosen = dict[int, list[str]]()

    def make(ranks: Communicator) -> Idle:
        products, choice = plain_products()
        tune(products, 16, LIKE, MEASURE, None, clocks[ranks.shard.rank], ranks)
        chosen[ranks.shard.rank] = names(choice, [1, 2, 4, 8, 16])
        return Idle()

    RankThreads(make, 2, 1).close()
    assert chosen == {rank: ["library"] * 5 for rank in (0, 1)}


def test_a_form_that_is_hardly_faster_does_not_replace_the_usual_one() -> None:
    products, choice = plain_products()
    tune(products, ROWS_MAX, LIKE, MEASURE, None, Clock(lambda name, _: 0.97 if name == "library" else 1.0))
    assert choice.name(1) == "skinny"


def test_a_form_that_fails_or_is_wrong_is_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> Tensor:
        raise RuntimeError("no kernel image is available")

    def doubles(x: Tensor, weight: Tensor, *_: object) -> Tensor:
        return 2 * reference(x, weight)

    def lacks(x: Tensor, weight: Tensor, *_: object) -> Tensor:
        return reference(x, weight).fill_(float("nan"))

    added = tuple(Form(name=each.__name__, compute=each) for each in (fails, doubles, lacks))
    monkeypatch.setitem(forms.FORMS, "plain", (*added, *FORMS["plain"]))
    products, choice = plain_products()
    clock = Clock(lambda name, _: 1.0 if name == "library" else 0.1 if name != "skinny" else 2.0)
    tune(products, 16, LIKE, MEASURE, None, clock)
    assert set(names(choice, range(1, 17))) == {"library"}
    assert {name for name, _ in clock.asked} == {"skinny", "library"}
    assert "float32 24 x 40, 1 rows: fails is left out: no kernel image is available" in caplog.text
    assert caplog.text.count("fails is left out") == 1, "one warning for all numbers of rows"
    assert "doubles is left out: its relative error is 1" in caplog.text
    assert "lacks is left out: its relative error is nan" in caplog.text


def test_without_memory_to_measure_with_the_usual_form_computes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def full(x: Tensor, *_: object, **__: object) -> Tensor:
        if len(x) > 4:
            raise torch.cuda.OutOfMemoryError
        return reference(x, weight)

    weight = draw(24, 40)
    monkeypatch.setattr(tuning, "reference", full)
    products, choice = plain_products(weight)
    tune(products, 16, LIKE, MEASURE, Kept(str(tmp_path), "one"), skinny_up_to(2))
    assert names(choice, (1, 2, 4, 8, 16)) == ["skinny", "skinny", "library", "skinny", "library"]
    assert "8 rows: no memory is left to measure with" in caplog.text
    assert set(Kept(str(tmp_path), "one").read()["float32 24 x 40"]) == {1, 2, 4}, "it is measured at the next start"


def test_weights_of_one_shape_have_one_choice_and_are_used_in_turn() -> None:
    products, choice = plain_products(draw(24, 40), draw(24, 40, seed=1), draw(32, 40))
    assert products.add_plain(draw(24, 40, seed=2)) is choice
    seen: list[int] = []

    def timer(calls: Sequence[Callable[[], object]]) -> float:
        seen.append(len(calls))
        return 1.0

    tune(products, 1, LIKE, MEASURE, None, timer)
    assert seen == [3, 3, 1, 1]


def test_what_was_measured_is_kept_for_the_same_machine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def start(clock: Clock, machine: str = "one", *, wanted: Asked = MEASURE) -> Choice:
        products, choice = plain_products()
        tune(products, 16, LIKE, wanted, Kept(str(tmp_path), machine), clock)
        return choice

    first, second, other, again = (skinny_up_to(limit) for limit in (2, 4, 8, 16))
    assert start(first).name(4) == "library"
    assert (start(second).name(4), second.asked) == ("library", [])
    assert start(other, "another").name(8) == "skinny"
    assert start(again, wanted=replace(MEASURE, anew=True)).name(16) == "skinny"
    assert len(again.asked) == len(first.asked) == 10
    assert start(second).name(16) == "skinny", "the new times are kept"
    path = Kept(str(tmp_path), "one").path
    assert path is not None
    assert json.loads(path.read_text())["products"]["float32 24 x 40"]["1"] == {"skinny": 1.0, "library": 2.0}
    path.write_text("{")
    assert start(first).name(16) == "library"
    assert "cannot be read, so products are measured again" in caplog.text


def test_a_directory_that_cannot_be_written_only_costs_the_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    products, choice = plain_products()
    tune(products, 16, LIKE, MEASURE, Kept(str(tmp_path / "file"), "one"), skinny_up_to(2))
    assert choice.name(4) == "library"
    assert "is not kept" in caplog.text


def test_rows_are_rounded_to_8_bit_floating_point_only_where_the_weights_were_made_for_that() -> None:
    rounded = KINDS["fp8"](draw(48, 208, seed=1))
    assert rounded.rows_in_fp8
    for weight, expected in ((rounded, "scaled"), (replace(rounded, rows_in_fp8=False), "library")):
        products = Products()
        choice = products.add_quantized(kernel_weight(weight, torch.float32), LIKE)
        clock = Clock(lambda name, _: {"scaled": 1.0, "library": 2.0}.get(name, 3.0))
        tune(products, 64, LIKE, MEASURE, None, clock)
        assert choice.name(64) == expected
    products = Products()
    choice = products.add_quantized(kernel_weight(rounded, torch.float32), LIKE)
    assert choice.name(5000) == "library", "the rule keeps rows as they are"
    tune(products, 64, LIKE, asked("quantized=scaled", CPU), None, timer_of(CPU))
    assert (choice.name(1), choice.name(64)) == ("scaled", "scaled")
    # A product moves by about a fortieth of its size; twice that where the interpreter cuts off instead of rounding.
    x = rows_like(kernel_weight(rounded, torch.float32), 9, LIKE)
    y = choice.compute(x, kernel_weight(rounded, torch.float32), None)
    exact = reference(x, kernel_weight(rounded, torch.float32))
    assert 0.01 < (y - exact).norm() / exact.norm() < 0.07


def test_what_the_setting_asks_for() -> None:
    assert dict(GPU_KERNEL_FORMS) == {kind: tuple(form.name for form in each) for kind, each in FORMS.items()}
    for value in ("auto", "measure", "reference", "plain=library", "experts=library", "quantized=tiles,plain=skinny"):
        assert GPU_KERNELS.holds(value)
    for value in ("", "fast", "plain", "plain=tiles", "plain=skinny,plain=library", "auto,plain=skinny"):
        assert not GPU_KERNELS.holds(value)
    assert not asked("auto", CPU).measures, "the interpreter's times mean nothing"
    assert asked("auto", torch.device("cuda")) == MEASURE
    assert asked("measure", CPU) == replace(MEASURE, anew=True)
    assert asked("reference", torch.device("cuda")) == replace(MEASURE, measures=False)


def test_a_named_form_computes_all_the_rows_that_it_can() -> None:
    for value, expected in (("plain=skinny", "skinny"), ("plain=library,quantized=tiles", "library")):
        products, choice = plain_products()
        weight = kernel_weight(KINDS["int8"](draw(16, 64)), torch.float32)
        quantized = products.add_quantized(weight, LIKE)
        tune(products, 512, LIKE, asked(value, CPU), None, timer_of(CPU))
        assert names(choice, (1, 16, 17)) == [expected, expected, "library"]
        assert quantized.name(200) == ("tiles" if "tiles" in value else "library")


def test_real_times_are_measured() -> None:
    timer: Timer = timer_of(CPU)
    assert 0 < timer([lambda: torch.ones(10).sum()] * 3) < 1000
