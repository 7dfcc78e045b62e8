"""Adapter slots: who holds one, which is refilled, and what the worker is told."""

from antiphon.services.engine.core.adapter_slots import AdapterSlots


def test_an_adapter_keeps_its_slot_until_another_one_needs_it() -> None:
    slots = AdapterSlots(2)
    first, second = slots.take("a"), slots.take("b")
    assert {first, second} == {0, 1}
    assert sorted(slots.announce()) == [(0, "a"), (1, "b")]
    assert slots.take("a") == first
    assert not slots.has_room("c")
    assert slots.has_room("b")
    assert slots.has_room("")
    slots.release(first)
    assert not slots.has_room("c"), "one sequence still uses it"
    slots.release(first)
    assert slots.take("a") == first
    assert slots.announce() == (), "the worker still has it"
    slots.release(first)
    slots.release(second)
    assert slots.take("c") == first, "the least recently used slot is refilled"
    assert slots.announce() == ((first, "c"),)
    assert slots.take("b") == second
    assert slots.num_users == 2


def test_without_slots_nothing_fits() -> None:
    assert not AdapterSlots(0).has_room("a")
    assert len(AdapterSlots(0)) == 0
