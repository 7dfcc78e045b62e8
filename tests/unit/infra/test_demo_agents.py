"""The layer of the demo model that sees far: its training data, and that its training computes what the model does."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file

from antiphon.services.gateway.apis.parsers.formats import TOOL_FORMATS
from infra.demo_model.agents import features, lengthen, texts
from infra.demo_model.agents.features import Piece, ShardMaker, bare_words, near_states, shard_path, sources_of
from infra.demo_model.agents.lengthen import Context, FarLayer, Pieces, Plan, Run, lengthened, row_of, unit
from infra.demo_model.agents.measure import judged, whole_text
from infra.demo_model.agents.styles import READERS, pick, reader_tool
from infra.demo_model.agents.turns import Encoded, Turn, encode_turn, make_turn
from infra.demo_model.batches import Maker
from infra.demo_model.checkpoint import near_part
from infra.demo_model.export import export
from infra.demo_model.generate import Decoder, load_model
from infra.demo_model.model import SHAPES, Layer, Llama
from infra.demo_model.sample import read_call
from infra.demo_model.tokenizer import DEMO, load

SMALL = {"TURNS": 6, "EXERCISES": 4, "SECTIONS": 3, "TOOLS": 2, "TOOLS_OF_PATHS": 1, "TOOLS_OF_READERS": 1}


def far_model(window: int = 512) -> Llama:
    """The shipped near layers with a last layer that writes something."""
    model = lengthened(load_model(DEMO))
    torch.manual_seed(0)
    last = model.model.layers[-1]
    assert isinstance(last, Layer)
    with torch.no_grad():
        last.self_attn.o_proj.weight.normal_(std=0.2)
        last.mlp.down_proj.weight.normal_(std=0.2)
    model.shape = replace(model.shape, sliding_window=window)
    return model


def turns(count: int = 60) -> list[Turn]:
    return [make_turn(Random(number), "train") for number in range(count)]


def test_a_new_last_layer_changes_nothing() -> None:
    near, _ = near_part(load_model(DEMO))
    model = Llama(replace(SHAPES["near"], vocab_size=load().get_vocab_size()))
    model.load_state_dict(near)
    ids = torch.randint(3, 4096, (1, 40))
    assert torch.equal(model.hidden(ids), lengthened(model).hidden(ids))


def test_tokens_beyond_the_window_reach_only_the_last_layer() -> None:
    model = far_model(window=8)
    ids = torch.randint(3, 4096, (1, 120))
    other = ids.clone()
    other[0, 0] = 5
    near_layers = len(model.model.layers) - 1
    # Six layers with a window of eight tokens see 42 tokens before their own.
    with torch.no_grad():
        rows = [Encoded(row[0].tolist(), [0] * 120, [], []) for row in (ids, other)]
        one, two = near_states(model, rows)
        assert near_layers * 7 < 60
        assert torch.equal(one[60:], two[60:])
        assert not torch.equal(model.hidden(ids)[0, 60:], model.hidden(other)[0, 60:])


def test_what_is_generated_token_by_token_has_the_same_window() -> None:
    model = far_model(window=16)
    ids = torch.randint(3, 4096, (1, 1100))
    with torch.no_grad():
        whole = model.logits(model.hidden(ids))[0].argmax(-1).tolist()
    assert Decoder(model, load()).next_tokens(ids[0].tolist()) == whole
    [more] = Decoder(model, load()).greedy([ids[0].tolist()], 1)
    assert more in ([], [whole[-1]])


def test_the_layer_computes_in_training_what_it_does_in_the_model() -> None:
    model = far_model()
    ids = torch.randint(3, 4096, (150,)).tolist()
    [states] = near_states(model, [Encoded(ids, [0] * 150, [], [])])
    places = torch.arange(100, 149)
    nothing = torch.zeros(len(places), 150, dtype=torch.bool)
    piece = Piece(states, torch.ones(150, dtype=torch.bool), places, torch.tensor(ids)[places + 1], nothing)
    row = row_of(model, piece)
    last = model.model.layers[-1]
    assert isinstance(last, Layer)
    with torch.no_grad():
        for written in (last.self_attn.o_proj, last.mlp.down_proj):
            written.weight.div_(lengthen.SCALE)  # as it is in training
        pieces = Pieces()
        pieces.of_exercises = [row]
        group = pieces.exercises(Random(1))
        bare, _ = FarLayer(model).at(group, None)
        # A part of the text as context gives the same as the whole text.
        units = unit(states, model.shape.rms_norm_eps)
        context = Context(units[:40], torch.zeros(40))
        own = replace(group, units=group.units[:, 40:], seen=group.seen[:, 40:], places=group.places - 40)
        split, _ = FarLayer(model).at(own, context)
        for written in (last.self_attn.o_proj, last.mlp.down_proj):
            written.weight.mul_(lengthen.SCALE)
        wanted = model.hidden(torch.tensor([ids]))[0]
    real = group.targets != -100
    found = model.model.norm(bare[real])
    assert torch.equal(model.logits(found).argmax(-1), model.logits(wanted[group.places[real]]).argmax(-1))
    torch.testing.assert_close(split[real], bare[real], rtol=1e-3, atol=1e-3)


def test_filler_with_a_bias_counts_as_often_as_it_is_repeated() -> None:
    model = far_model()
    ids = torch.randint(3, 4096, (30,)).tolist()
    [states] = near_states(model, [Encoded(ids, [0] * 30, [], [])])
    nothing = torch.zeros(19, 30, dtype=torch.bool)
    piece = Piece(states, torch.ones(30, dtype=torch.bool), torch.arange(10, 29), torch.tensor(ids)[11:30], nothing)
    pieces = Pieces()
    pieces.of_exercises = [row_of(model, piece)]
    group = pieces.exercises(Random(1))
    units = torch.randn(20, model.shape.hidden_size)
    with torch.no_grad():
        many, _ = FarLayer(model).at(group, Context(units.repeat(50, 1), torch.zeros(1000)))
        few, _ = FarLayer(model).at(group, Context(units, torch.full((20,), float(torch.tensor(50.0).log()))))
    torch.testing.assert_close(many, few, rtol=1e-4, atol=1e-4)


def test_a_turn_calls_its_tool_as_the_gateway_reads_it() -> None:
    for turn in turns():
        messages = [message for part in turn.parts for message in part]
        for place, message in enumerate(messages):
            if read_call(message["content"]) is None or message["role"] != "assistant":
                continue
            parser = TOOL_FORMATS["hermes"].parser((reader_tool(Random(1), turn.reader),))
            parser.feed(message["content"])
            parser.finish()
            assert parser.num_calls == 1
            call = read_call(message["content"])
            assert call is not None
            [value] = call["arguments"].values()
            path = value[-1] if isinstance(value, list) else value.removeprefix("cat ")
            told = "".join(turn.texts()).split(message["content"])[0]
            assert path in told or path.removeprefix(turn.folder + "/") in told
            assert messages[place + 1]["role"] == "tool"


def test_only_what_the_assistant_says_is_learnt() -> None:
    maker = Maker(load(), 1)
    for turn in turns(20):
        row = encode_turn(turn, maker.encode, maker.assistant_part)
        pairs = zip(row.ids, row.learnt, strict=True)
        said = maker.tokenizer.decode([token for token, learn in pairs if learn], skip_special_tokens=False)
        parts = [message["content"] for part in turn.parts for message in part if message["role"] == "assistant"]
        assert said == "".join(f"{part}<|im_end|>" for part in parts)


def test_a_token_is_copied_from_where_its_neighbours_are_alike() -> None:
    words = bare_words(load())
    ids = Maker(load(), 1).encode("read a/plan.txt and b/plan.txt now: b/plan.txt")
    texts_of = [load().decode([token]) for token in ids]
    last = len(ids) - 1
    [found] = sources_of(ids, [last - 2], [True] * len(ids), words)
    assert "".join(texts_of[: found.nonzero()[0][0]]) == "read a/plan.txt and b/plan."
    assert found.sum() == 1
    [nowhere] = sources_of(ids, [1], [True] * len(ids), words)
    assert not nowhere.any()


def test_forms_that_are_measured_are_not_trained_on() -> None:
    rng = Random(1)
    for forms in (texts.ASKS, texts.FRAMES, texts.ENVIRONMENTS, texts.REMINDERS, texts.WRAPPERS):
        trained = {pick(rng, forms, "train") for _ in range(2000)}
        measured = {pick(rng, forms, "held out") for _ in range(2000)}
        assert trained
        assert measured
        assert not trained & measured
    assert all(turn.reader != READERS[-1] for turn in turns(300))


def test_an_answer_is_judged_token_by_token() -> None:
    turn = make_turn(Random(4), "held out", READERS[0])
    text = whole_text(Random(1), turn, 700)
    model = Decoder(lengthened(load_model(DEMO)), load())
    maker = Maker(load(), 1)
    answers = judged(model, maker, text)
    assert [wanted for wanted, _, _ in answers] == [
        message["content"] for part in turn.parts for message in part if message["role"] == "assistant"
    ]
    for wanted, given, right in answers:
        assert not right or wanted == given


def test_a_run_goes_on_and_leaves_the_near_layers_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(features, name, value)
    monkeypatch.setattr(lengthen, "FIRST_SHARDS", 1)
    monkeypatch.setattr(lengthen, "REPORT_STEPS", 1)
    monkeypatch.setattr(lengthen, "WEIGHTS", (*[1.0] * (len(READERS) - 1), 0.0))
    maker = ShardMaker(load_model(DEMO))
    shard = maker.make(0)
    some = next(iter(shard.turns.values()))
    for reader in range(len(READERS) - 1):
        shard.turns.setdefault(reader, some)
    torch.save(shard, shard_path(tmp_path, 0))
    plan = Plan(DEMO, tmp_path, steps=2, rate=1e-3, matrix_rate=6e-3, seed=1, threads=1)
    Run(plan).run()
    Run(replace(plan, steps=3)).run()
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["1", "2", "3"]
    export(tmp_path / "model.pt", tmp_path / "made", DEMO)
    shipped, made = (load_file(folder / "model.safetensors") for folder in (DEMO, tmp_path / "made"))
    same = {name for name in made if torch.equal(shipped.get(name, torch.empty(0)), made[name])}
    assert {name for name in made if ".layers.6." not in name} <= same
    assert made["model.layers.6.self_attn.o_proj.weight"].abs().max() > 0
