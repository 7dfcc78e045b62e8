"""The reference part of the protocol's page is what the code says."""

import ast

from antiphon.shared.messages import Ack, ErrorReply
from infra.checks.protocol_page import (
    PAGE,
    Handler,
    Listener,
    Module,
    fields_of,
    handlers,
    limits_section,
    listeners,
    render,
    table,
)

SERVICE = """
class Example:
    async def start(self):
        control = self._host.subjects.engine_control(self._id, self._instance_id)
        await self.bind(control, Submit, Cancel)
        await self.bind(subjects.tokenize(), TokenizeRequest, queue=QUEUE)

    @handles(Submit)
    def on_submit(self, envelope: Envelope) -> SubmitReply | None: ...

    @handles(Cancel)
    async def on_cancel(self, envelope: Envelope) -> None: ...
"""


def test_the_page_of_the_protocol_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run `make docs`"


def test_who_listens_and_what_is_answered_is_read_from_the_source() -> None:
    module = Module("engine", ast.parse(SERVICE))
    assert list(listeners([module])) == [
        Listener("engine", "engine_control", ("Submit", "Cancel"), False),
        Listener("engine", "tokenize", ("TokenizeRequest",), True),
    ]
    assert list(handlers([module])) == [Handler("engine", "Submit", "SubmitReply"), Handler("engine", "Cancel", "")]


def test_fields_are_listed_with_type_and_default() -> None:
    assert fields_of(Ack) == "`sequence_id: str`"
    assert fields_of(ErrorReply).endswith("`param: str = ''`<br>`retry_after_s: float = 0.0`")


def test_a_limit_has_its_unit_and_its_reason() -> None:
    text = "\n".join(
        limits_section(
            '# --- bus ---\nOUTBOUND_BYTES_MAX = 32 * 2**20\n"""Buffer of\none subscription."""\nDRAIN_S = 20.0\n'
        )
    )
    assert "### Bus" in text
    assert "| `OUTBOUND_BYTES_MAX` | 32 MiB | Buffer of one subscription. |" in text
    assert "| `DRAIN_S` | 20.0 s | |" in text


def test_a_bar_in_a_cell_does_not_split_it() -> None:
    assert table(("a", "b"), [("x | y", "z")]).splitlines()[-1] == "| x \\| y | z |"
