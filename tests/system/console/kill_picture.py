"""Draws the recording of a stream that outlived its engine as an animated SVG, and reads a recording from such a file.

The picture has no script. Styles let each piece of text appear at its recorded moment, slowed by a factor that the
picture names; without animation, or for readers who want less motion, it shows the end. The recording is in the file
as JSON, so that anyone can draw it again. Starts nothing.
"""

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from xml.etree import ElementTree
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 960, 430
COLUMNS = 64
"""Characters in a line of the terminal."""
PLAYED_S, REST_S = 9.0, 4.0
"""About how long the stream is shown, and how long its end, before it begins again."""
_NAMESPACE = "http://www.w3.org/2000/svg"
_STYLE = """
text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #c9d1d9;
  white-space: pre }
.dim { fill: #8b949e } .good { fill: #7ee787 } .bad { fill: #ff7b72 } .title { font-weight: bold; fill: #f0f6fc }
.box { fill: #161b22; stroke: #30363d } .line { stroke: #30363d; stroke-width: 2 } .small { font-size: 12px }
.run { animation-duration: %(loop_s)ss; animation-iteration-count: infinite; animation-timing-function: step-end }
@media (prefers-reduced-motion: reduce) { * { animation: none !important } }
"""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one event of the stream, when it arrived (seconds after the request), and how many tokens it has."""

    at_s: float
    num_tokens: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """One stream whose engine was killed, and the text of the same request without the kill.

    `pids`: the engines' process ids by name. `killed_s`: when `killed` was killed, in seconds after the request.
    `num_tokens_before`: the tokens that the killed engine gave.
    """

    date: str
    machine: str
    prompt: str
    seed: int
    pids: dict[str, int]
    killed: str
    killed_s: float
    num_tokens_before: int
    pieces: list[Piece]
    undisturbed: str

    @property
    def num_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.pieces)

    @property
    def other(self) -> str:
        """The engine that went on."""
        return next(name for name in self.pids if name != self.killed)

    def first_after(self) -> int:
        """Returns the index of the first piece with a token of the other engine."""
        total = 0
        for index, piece in enumerate(self.pieces):
            total += piece.num_tokens
            if total > self.num_tokens_before:
                return index
        return len(self.pieces)

    def pause_s(self) -> float:
        """Returns the longest time between two pieces from the kill on, seconds."""
        moments = [piece.at_s for piece in self.pieces]
        return max(later - at_s for at_s, later in itertools.pairwise(moments) if later > self.killed_s)

    def is_proof(self) -> bool:
        """Whether the stream moved in its midst and has the text of the undisturbed one."""
        moved = 0 < self.first_after() < len(self.pieces) and self.killed_s < self.pieces[self.first_after()].at_s
        return moved and "".join(piece.text for piece in self.pieces) == self.undisturbed


def read(picture: str) -> Recording:
    """Returns the recording that a picture shows. Raises ParseError for text that is no XML."""
    found = ElementTree.fromstring(picture).find(f"{{{_NAMESPACE}}}metadata")
    assert found is not None
    fields = json.loads(found.text or "")
    return Recording(**{**fields, "pieces": [Piece(*piece) for piece in fields["pieces"]]})


def draw(recording: Recording) -> str:
    """Returns the picture as an SVG document."""
    return "\n".join(_Drawing(recording).lines()) + "\n"


class _Drawing:
    """One picture of a recording. Moments are seconds of the recording, times those of the picture."""

    def __init__(self, recording: Recording) -> None:
        self._it = recording
        self._slower = max(1, round(PLAYED_S / recording.pieces[-1].at_s))
        self._end_s = recording.pieces[-1].at_s
        self._loop_s = self._end_s * self._slower + REST_S
        self._frames: dict[str, str] = {}

    def lines(self) -> Iterator[str]:
        body = [*self._terminal(), *self._processes(), *self._axis()]
        fields = asdict(self._it) | {"pieces": [[one.at_s, one.num_tokens, one.text] for one in self._it.pieces]}
        style = _STYLE % {"loop_s": f"{self._loop_s:.2f}"} + "\n".join(self._frames.values())
        yield f'<svg xmlns="{_NAMESPACE}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        yield f"<title>{escape(self._summary())}</title>"
        yield f"<metadata>{escape(json.dumps(fields, ensure_ascii=False))}</metadata>"
        yield f"<style>{escape(style)}</style>"
        yield f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#0d1117"/>'
        yield from body
        yield "</svg>"

    def _summary(self) -> str:
        one = self._it
        return (
            f"A stream of {one.num_tokens} tokens. {one.killed} is killed after {one.num_tokens_before} of them; "
            f"{one.other} goes on, and the text is the same as without the kill."
        )

    def _terminal(self) -> Iterator[str]:
        yield '<rect class="box" x="16" y="16" width="600" height="318" rx="6"/>'
        request = f'POST /v1/completions  {{"seed": {self._it.seed}, "stream": true, …}}'
        yield f'<text class="dim" x="32" y="44">{request}</text>'
        line = [f'<tspan class="title">{escape(self._it.prompt)}</tspan>']
        row, column = 0, len(self._it.prompt)
        for index, piece in enumerate(self._it.pieces):
            kind = "good" if index >= self._it.first_after() else "plain"
            for text in re.split("(\n)", "".join(_parts(piece.text, column))):
                if text == "\n":
                    yield _text(row, line)
                    row, column, line = row + 1, 0, []
                elif text:
                    line.append(f'<tspan class="run {kind}" {self._appears(piece.at_s)}>{escape(text)}</tspan>')
                    column += len(text)
        yield _text(row, line)

    def _processes(self) -> Iterator[str]:
        one, killed_s = self._it, self._it.killed_s
        resumed_s = one.pieces[one.first_after()].at_s
        yield '<rect class="box" x="632" y="16" width="312" height="318" rx="6"/>'
        for row, (name, pid) in enumerate(one.pids.items()):
            y = 44 + 58 * row
            yield f'<text class="title" x="648" y="{y}">{name} <tspan class="dim">pid {pid}</tspan></text>'
            if name == one.killed:
                yield self._said(y + 22, "run good", "computes the stream", 0, until_s=killed_s)
                yield self._said(y + 22, "run bad", "killed", killed_s)
            else:
                yield self._said(y + 22, "run dim", "waits", 0, until_s=resumed_s)
                yield self._said(y + 22, "run good", "goes on with the stream", resumed_s)
        yield self._said(180, "run bad", f"$ kill -9 {one.pids[one.killed]}", killed_s)
        yield self._said(212, "run", f"longest wait after it: {1000 * one.pause_s():.0f} ms", resumed_s)
        yield self._said(250, "run good", "same text as without the kill", self._end_s)
        said = f"{one.num_tokens} tokens, none lost or repeated"
        yield self._said(272, "run good", said, self._end_s)
        yield f'<text class="dim small" x="648" y="302">{escape(one.machine[:40])}</text>'
        yield f'<text class="dim small" x="648" y="320">{one.date}, antiphon serve --engines 2</text>'

    def _axis(self) -> Iterator[str]:
        """The recorded moments on a line: a dot for each piece, the kill, and a hand that moves."""
        one = self._it
        yield '<path class="line" d="M32 380H928"/>'
        for index, piece in enumerate(one.pieces):
            colour = "#7ee787" if index >= one.first_after() else "#c9d1d9"
            yield f'<circle cx="{self._x(piece.at_s):.1f}" cy="380" r="2.5" fill="{colour}"/>'
        x = self._x(one.killed_s)
        yield f'<path d="M{x:.1f} 362V398" stroke="#ff7b72" stroke-width="2"/>'
        yield f'<text class="bad small" x="{x:.1f}" y="356" text-anchor="middle">kill -9</text>'
        yield '<text class="dim small" x="32" y="414">0 s: the request</text>'
        slower = f", shown {self._slower} times slower" if self._slower > 1 else ""
        yield f'<text class="dim small" x="928" y="414" text-anchor="end">{self._end_s:.2f} s{slower}</text>'
        share = 100 * self._end_s * self._slower / self._loop_s
        self._frames["hand"] = (
            f"@keyframes hand {{ 0% {{ transform: translateX(-896px) }} {share:.2f}% {{ transform: none }} }}"
        )
        style = "animation-name: hand; animation-timing-function: linear"
        yield f'<path class="run" style="{style}" d="M928 368V392" stroke="#f0f6fc" stroke-width="2"/>'

    def _x(self, at_s: float) -> float:
        return 32 + 896 * at_s / self._end_s

    def _said(self, y: int, kind: str, text: str, from_s: float, *, until_s: float | None = None) -> str:
        style = self._appears(from_s) if until_s is None else self._leaves(until_s)
        return f'<text class="{kind}" x="648" y="{y}" {style}>{escape(text)}</text>'

    def _appears(self, at_s: float) -> str:
        name, share = self._frame("a", at_s)
        self._frames[name] = f"@keyframes {name}{{0%{{visibility:hidden}}{share}%{{visibility:visible}}}}"
        return f'style="animation-name:{name}"'

    def _leaves(self, at_s: float) -> str:
        name, share = self._frame("l", at_s)
        self._frames[name] = f"@keyframes {name}{{0%{{visibility:visible}}{share}%{{visibility:hidden}}}}"
        return f'visibility="hidden" style="animation-name:{name}"'

    def _frame(self, kind: str, at_s: float) -> tuple[str, str]:
        """Returns a name for a change at a moment, and the share of the loop in percent at which it comes."""
        share = f"{100 * at_s * self._slower / self._loop_s:.2f}"
        return kind + share.replace(".", "-"), share


def _parts(text: str, column: int) -> Iterator[str]:
    """Yields the text in words with the space before them, and a line feed where a line of the terminal ends."""
    for word in re.findall(r"\n|[^\S\n]*[^\s]+|[^\S\n]+", text):
        if word != "\n" and column + len(word) > COLUMNS:
            yield "\n"
            column, word = 0, word.lstrip()
        yield word
        column = 0 if word == "\n" else column + len(word)


def _text(row: int, spans: list[str]) -> str:
    return f'<text x="32" y="{76 + 20 * row}">{"".join(spans)}</text>'
