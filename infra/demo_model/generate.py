"""Greedy generation and token log-probabilities with the training model.

``evaluate.py`` uses it to measure the weights without the server's code. It is also run by hand to try prompts:
``python -m infra.demo_model.generate "Hello!"``.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from infra.demo_model.model import Llama, Shape, rope_tables, rotate, within_window
from infra.demo_model.sample import Message, Tool
from infra.demo_model.tokenizer import DEMO, END, END_OF_TEXT, load, render

GenerateFn = Callable[[Sequence[Sequence[Message]]], list[str]]
LogprobFn = Callable[[Sequence[int]], list[float]]

Cache = list[tuple[Tensor, Tensor]]
#: Tokens of a prompt that are computed at once.
_CHUNK = 512


def shape_of(folder: Path) -> Shape:
    """The sizes written in a model directory's ``config.json``."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    fields = {name: config[name] for name in Shape.__dataclass_fields__ if name in config}
    fields["no_rope_layers"] = tuple(config.get("no_rope_layers") or ())
    return Shape(**{**fields, "rope_theta": config.get("rope_theta") or config["rope_parameters"]["rope_theta"]})


def load_model(folder: Path = DEMO) -> Llama:
    """The model of a directory as ``export.py`` writes it, in float32."""
    model = Llama(shape_of(folder))
    weights = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    model.load_state_dict(weights)
    return model.eval()


class Decoder:
    """Runs the model token by token with a key/value cache."""

    def __init__(self, model: Llama, tokenizer: Tokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.stops = {tokenizer.token_to_id(END), tokenizer.token_to_id(END_OF_TEXT)}
        self.cos, self.sin = rope_tables(model.shape, model.shape.max_position_embeddings)

    def _forward(self, ids: Tensor, past: int, cache: Cache) -> Tensor:
        """Hidden states of the tokens from position ``past`` on; extends ``cache`` in place."""
        cos, sin = self.cos[past : past + ids.shape[1]], self.sin[past : past + ids.shape[1]]
        x = self.model.model.embed_tokens(ids)
        for number, layer in enumerate(self.model.model.layers):
            turn = None if self.model.model.far[number] else (cos, sin)
            mixed = self._attend(layer.self_attn, layer.input_layernorm(x), turn, cache, number)
            x = x + layer.self_attn.o_proj(mixed)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.model.norm(x)

    def _attend(
        self, block: torch.nn.Module, x: Tensor, turn: tuple[Tensor, Tensor] | None, cache: Cache, number: int
    ) -> Tensor:
        rows, length, _ = x.shape
        query, key, value = (part(x).view(rows, length, -1, self.model.shape.head_dim).transpose(1, 2)
                             for part in (block.q_proj, block.k_proj, block.v_proj))  # fmt: skip
        window = self.model.shape.sliding_window if turn else None
        if turn:
            query, key = rotate(query, *turn), rotate(key, *turn)
        if number < len(cache):
            key, value = torch.cat((cache[number][0], key), 2), torch.cat((cache[number][1], value), 2)
        else:
            cache.append((key, value))
        # The next token sees one token less of a window.
        kept = key.shape[2] if window is None else window - 1
        cache[number] = (key[:, :, -kept:], value[:, :, -kept:])
        seen = torch.ones(length, key.shape[2], dtype=torch.bool).tril(key.shape[2] - length)
        if window is not None:
            seen = within_window(seen, window, key.shape[2] - length)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(rows, length, -1)

    @torch.inference_mode()
    def greedy(self, prompts: list[list[int]], limit: int) -> list[list[int]]:
        """Returns the greedy continuations of prompts of equal length, each up to its end token or `limit` tokens."""
        cache: Cache = []
        ids = torch.tensor(prompts)
        past = (ids.shape[1] - 1) // _CHUNK * _CHUNK
        for start in range(0, past, _CHUNK):
            self._forward(ids[:, start : start + _CHUNK], start, cache)
        ids = ids[:, past:]
        answers: list[list[int]] = [[] for _ in prompts]
        open_rows = set(range(len(prompts)))
        for _ in range(limit):
            chosen = self.model.logits(self._forward(ids, past, cache)[:, -1]).argmax(-1)
            past += ids.shape[1]
            for row in sorted(open_rows):
                token = int(chosen[row])
                if token in self.stops:
                    open_rows.discard(row)
                else:
                    answers[row].append(token)
            if not open_rows:
                break
            ids = chosen[:, None]
        return answers

    @torch.inference_mode()
    def next_tokens(self, ids: Sequence[int]) -> list[int]:
        """The most likely token after each token of a text."""
        cache: Cache = []
        found: list[int] = []
        for start in range(0, len(ids), _CHUNK):
            states = self._forward(torch.tensor([ids[start : start + _CHUNK]]), start, cache)
            found += self.model.logits(states)[0].argmax(-1).tolist()
        return found

    def texts(self, prompts: Sequence[str], limit: int = 220, rows: int = 64) -> list[str]:
        """Continues texts; prompts of the same length run together, so none is padded."""
        encoded = [self.tokenizer.encode(prompt).ids for prompt in prompts]
        groups: dict[int, list[int]] = defaultdict(list)
        for place, ids in enumerate(encoded):
            groups[len(ids)].append(place)
        found = [""] * len(prompts)
        for places in groups.values():
            for start in range(0, len(places), rows):
                part = places[start : start + rows]
                for place, ids in zip(part, self.greedy([encoded[place] for place in part], limit), strict=True):
                    found[place] = self.tokenizer.decode(ids)
        return found

    def answers(
        self, conversations: Sequence[Sequence[Message]], tools: Sequence[Sequence[Tool]] | None = None
    ) -> list[str]:
        """A ``GenerateFn``: the assistant's next message in each conversation, with the tools offered in each."""
        offered = tools or [()] * len(conversations)
        return self.texts(
            [render(messages, prompt=True, tools=told) for messages, told in zip(conversations, offered, strict=True)]
        )

    @torch.inference_mode()
    def logprobs(self, ids: Sequence[int]) -> list[float]:
        """A ``LogprobFn``: the log-probability of each token after the first."""
        tokens = torch.tensor([list(ids)])
        scores = F.log_softmax(self.model.logits(self.model.hidden(tokens)), dim=-1)[0, :-1]
        return scores.gather(1, tokens[0, 1:, None]).squeeze(1).tolist()


def decoder(folder: Path = DEMO) -> Decoder:
    return Decoder(load_model(folder), load(folder))


def main() -> None:
    """Answer each argument as the first message of a conversation."""
    prompts = sys.argv[1:]
    for prompt, answer in zip(
        prompts, decoder().answers([[{"role": "user", "content": text}] for text in prompts]), strict=True
    ):
        print(f"> {prompt}\n{answer}\n")


if __name__ == "__main__":
    main()
