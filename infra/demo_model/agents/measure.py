"""Measures turns of coding agents in forms that were held out of training, in prompts of thousands of tokens.

An answer is right if each of its tokens is the most likely one, which is what greedy decoding would write. Run by hand:
``python -m infra.demo_model.agents.measure``; ``evaluate.py`` puts the same figures into ``results.json``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch

from infra.demo_model.agents import texts
from infra.demo_model.agents.sources import other_tool, path_argument, section
from infra.demo_model.agents.styles import READERS, Reader, as_json, pick, reader_tool
from infra.demo_model.agents.turns import CANNOT, TOOLS_END, Turn, draw_reader, make_turn
from infra.demo_model.batches import Maker
from infra.demo_model.generate import Decoder, decoder
from infra.demo_model.sample import Message, read_call
from infra.demo_model.tokenizer import DEMO, START

_SEED = "held out"
#: Tokens of the prompts that are measured.
LENGTHS = (1000, 4000, 12_000, 20_000, 28_000)
TOOLS_BEGIN = "\n\nYou may call functions. Their signatures are in <tools></tools>:\n<tools>\n"
#: Of a prompt, the characters of a token, and the share that its tools have.
_CHARACTERS, _TOOLS_SHARE = 2.6, 0.5


def _sections(rng: Random, size: float) -> str:
    found = section(rng)
    while len(found) < size:
        found += "\n\n" + section(rng)
    return found


def _tools(rng: Random, reader: Reader, size: float) -> str:
    tools = [reader_tool(rng, reader)]
    names = {reader.name}
    while sum(len(as_json(tool)) for tool in tools) < size:
        tool = other_tool(rng, path_argument(reader.argument), *_known(rng))
        if tool["function"]["name"] not in names:
            names.add(tool["function"]["name"])
            tools.append(tool)
        elif len(names) > 40:
            break
    rng.shuffle(tools)
    return "".join(as_json(tool) + "\n" for tool in tools)


def _known(rng: Random) -> tuple[str | None, str]:
    return rng.choice(texts.OTHER_TOOLS) if rng.random() < 0.8 else (None, "")


def whole_text(rng: Random, turn: Turn, length: int) -> str:
    """A turn as one text of about as many tokens, with the beginning of its system prompt and its tools."""
    size = length * _CHARACTERS
    text = f"{START}system\n{pick(rng, texts.OPENINGS, turn.split)}\n\n{_sections(rng, size * (1 - _TOOLS_SHARE))}\n"
    ended = False
    open_before = False
    for place, part in enumerate(turn.texts()):
        before = turn.before.get(place, "")
        if before.endswith(TOOLS_END):
            text += TOOLS_BEGIN + _tools(rng, turn.reader, size * _TOOLS_SHARE) + TOOLS_END.removeprefix("\n")
            ended = True
        elif ended:
            text += f"{'' if open_before else START + 'system'}\n{_sections(rng, 4000)}\n{before}"
        else:
            text += f"{before}\n\n{_sections(rng, 1000)}"
        text += part.removeprefix(before)
        open_before = place in turn.after
    return text


def _kind(message: Message, before: Sequence[Message]) -> str:
    text = message["content"]
    if read_call(text) is not None:
        return "call"
    if text == CANNOT:
        return "failed read"
    return "answer" if before and before[-1]["role"] == "tool" else "follow-up"


def judged(model: Decoder, maker: Maker, text: str) -> list[tuple[str, str, bool]]:
    """For each answer of the assistant in a text: what it should be, what the model says, and whether that is right.

    What the model says is, for each token, what it would say after the right beginning.
    """
    ids = maker.encode(text)
    learnt = maker.assistant_part(ids)
    said = model.next_tokens(ids)
    found: list[tuple[str, str, bool]] = []
    place = 0
    while place < len(ids):
        if not learnt[place]:
            place += 1
            continue
        stop = place
        while stop < len(ids) and learnt[stop]:
            stop += 1
        wanted, given = ids[place:stop], said[place - 1 : stop - 1]
        decode = model.tokenizer.decode
        found.append((decode(wanted), decode(given), wanted == given))
        place = stop
    return found


def agent_accuracy(
    model: Decoder, count: int = 30, lengths: Sequence[int] = LENGTHS, show: bool = False
) -> dict[str, dict[str, int]]:
    """Right answers by kind of answer, and calls by tool and by length of the prompt."""
    maker = Maker(model.tokenizer, 1)
    table: dict[str, dict[str, int]] = {}
    rng = Random(_SEED)
    for number in range(count):
        reader = READERS[-1] if number % 12 == 11 else draw_reader(rng)
        length = lengths[number % len(lengths)]
        turn = make_turn(rng, "held out", reader)
        text = whole_text(rng, turn, length)
        messages = [message for part in turn.parts for message in part]
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        for place, (wanted, given, right) in zip(places, judged(model, maker, text), strict=True):
            kind = _kind(messages[place], messages[:place])
            names = [kind]
            if kind == "call":
                names += [f"call {reader.name} {reader.argument}", f"call in {length} tokens"]
            for name in names:
                counts = table.setdefault(name, {"right": 0, "of": 0})
                counts["right"] += right
                counts["of"] += 1
            if show and not right:
                print(f"[{kind}, {length} tokens]\n  wanted {wanted!r}\n  said   {given!r}", flush=True)
    return dict(sorted(table.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--failures", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    table = agent_accuracy(decoder(arguments.model), arguments.count, arguments.lengths, arguments.failures)
    for name, counts in table.items():
        print(f"{name}: {counts['right']}/{counts['of']}")


if __name__ == "__main__":
    main()
