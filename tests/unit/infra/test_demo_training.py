"""The demo model's training: the fast paths give what the plain ones give, and a run leaves a checkpoint."""

import os
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from infra.demo_model.batches import IGNORED, LENGTH, LONG_EVERY, LONG_LENGTH, Maker
from infra.demo_model.encoding import Encoder
from infra.demo_model.exercises.tasks import conversation
from infra.demo_model.exercises.tasks_tools import tool_conversation
from infra.demo_model.export import export
from infra.demo_model.generate import load_model
from infra.demo_model.grow import grown
from infra.demo_model.makers import Batches, MakerFailedError
from infra.demo_model.model import SHAPES, Llama, Shape, document_mask
from infra.demo_model.muon import StackedMuon
from infra.demo_model.texts import prose
from infra.demo_model.texts.corpus import plain_text
from infra.demo_model.tokenizer import DEMO, load, render
from infra.demo_model.train import Plan, Run, loss_of, pace

FEW = ("A simple sentence of the standard library, short.", "Another one, to be repeated.")


@pytest.fixture(autouse=True)
def few_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading all docstrings of the standard library takes seconds, in every process."""
    monkeypatch.setattr(prose, "sentences", lambda: FEW)


def texts() -> list[str]:
    rng = Random(1)
    found = [plain_text(rng) for _ in range(40)]
    found += [render(conversation(rng)) for _ in range(200)]
    for _ in range(100):
        messages, tools = tool_conversation(rng, 0.4)
        found.append(render(messages, tools=tools))
    return found


def test_the_encoder_gives_the_tokens_of_the_tokenizer() -> None:
    tokenizer = load()
    encode = Encoder(tokenizer).encode
    odd = [
        "",
        " ",
        "a  b 's 5  5   \n\n 6 <|im_end|>  \n<|im_start|>.<|im_end|>it's 'quoted' \t x_y  ",
        "é 5 ² <|im_end|>",
    ]
    for text in [*texts(), *odd]:
        assert encode(text) == tokenizer.encode(text).ids


def test_only_what_the_assistant_says_is_learnt() -> None:
    maker = Maker(load(), 1)
    for seed in range(40):
        document = maker.chat(Random(seed))
        pairs = zip(document.ids, document.learnt, strict=True)
        learnt = maker.tokenizer.decode([token for token, learn in pairs if learn], skip_special_tokens=False)
        text = maker.tokenizer.decode(document.ids, skip_special_tokens=False)
        turns = text.split("<|im_start|>")[1:]
        said = [turn.removeprefix("assistant\n").rstrip("\n") for turn in turns if turn.startswith("assistant\n")]
        assert learnt == "".join(said)


def test_a_target_is_the_next_token_of_the_same_document() -> None:
    batch = Maker(load(), 1).batch(3, 4096)
    scored = batch.targets != IGNORED
    places = batch.places[scored]
    assert len(places) > 500
    assert np.array_equal(batch.ids.reshape(-1)[places + 1], batch.targets[scored])
    owner = batch.owner.reshape(-1)
    assert np.array_equal(owner[places + 1], owner[places])
    assert (owner[places] >= 0).all()


def test_every_eighth_batch_has_long_rows() -> None:
    maker = Maker(load(), 1)
    assert maker.batch(0, 2048).ids.shape == (2048 // LENGTH, LENGTH)
    assert maker.batch(LONG_EVERY - 1, 2048).ids.shape == (2048 // LONG_LENGTH, LONG_LENGTH)


def test_batches_are_the_same_however_many_processes_make_them() -> None:
    with Batches(DEMO, 1, 1024, 5, makers=2) as made, Batches(DEMO, 1, 1024, 5) as plain:
        for _ in range(5):
            one, other = made.next(), plain.next()
            for name in ("ids", "owner", "places", "targets"):
                assert np.array_equal(getattr(one, name), getattr(other, name))


def test_a_dead_maker_stops_the_training() -> None:
    with Batches(DEMO, 1, 1024, makers=2) as batches:
        batches.next()
        os.kill(batches.pids[1], signal.SIGKILL)
        with pytest.raises(MakerFailedError, match="exit code -9"):
            deque((batches.next() for _ in range(60)), maxlen=0)


def test_makers_end_with_a_training_that_is_killed() -> None:
    program = (
        "import os, signal\nfrom infra.demo_model.makers import Batches\nfrom infra.demo_model.texts import prose\n"
        "from infra.demo_model.tokenizer import DEMO\nprose.sentences = lambda: ('One.',)\n"
        "batches = Batches(DEMO, 1, 1024, makers=2)\nbatches.next()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # The makers hold the other end of the output: it ends when the last of them has ended.
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=False)
    assert done.returncode == -signal.SIGKILL


def test_the_update_of_stacked_matrices_is_that_of_torch() -> None:
    torch.manual_seed(0)
    shapes = [(24, 16), (16, 24), (16, 16), (24, 16), (16, 16), (8, 16)]
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [torch.nn.Parameter(weight.detach().clone()) for weight in ours]
    stacked = StackedMuon(ours, 0.1, weight_decay=0.05)
    muon = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape)
            other.grad = one.grad.clone()
        stacked.step()
        muon.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.02)


def test_documents_of_a_row_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    model = Llama(Shape(vocab_size=64, num_hidden_layers=2))
    first, second = torch.randint(64, (1, 5)), torch.randint(64, (1, 7))
    owner = torch.tensor([[0] * 5 + [1] * 7])
    packed = model.hidden(torch.cat((first, second), 1), document_mask(owner, torch.float32))
    # Rotary attention depends on distances only, so a document may stand anywhere in a row.
    torch.testing.assert_close(packed[:, :5], model.hidden(first), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(packed[:, 5:], model.hidden(second), rtol=1e-4, atol=1e-4)


def test_the_loss_is_that_of_the_targets() -> None:
    torch.manual_seed(0)
    model = Llama(Shape(num_hidden_layers=1))
    batch = Maker(load(), 1).batch(0, 512)
    with torch.no_grad():
        loss = loss_of(model, batch, torch.device("cpu"), torch.float32)
        owner = torch.from_numpy(batch.owner)
        hidden = model.hidden(torch.from_numpy(batch.ids).long(), document_mask(owner, torch.float32))
        scores = F.log_softmax(model.logits(hidden).flatten(0, 1), -1)
    scored = batch.targets != IGNORED
    right = scores[batch.places[scored].tolist(), batch.targets[scored].tolist()]
    torch.testing.assert_close(loss, -right.mean())


def test_the_rate_warms_up_and_falls_to_zero() -> None:
    assert pace(0.0, 0) < 0.01
    assert pace(0.2, 5000) == 1.0
    assert 0.0 < pace(0.9, 5000) < pace(0.5, 5000) < 1.0
    assert pace(1.0, 5000) == 0.0


def test_a_run_learns_and_its_checkpoint_becomes_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "demo", Shape(num_hidden_layers=1, intermediate_size=64))
    plan = Plan(
        minutes=0, steps=3, rate=2e-3, matrix_rate=4e-3, seed=1, out=tmp_path, positions=512, threads=1, float32=True
    )
    run = Run(plan)
    before = {name: weight.clone() for name, weight in run.model.state_dict().items()}
    run.run()
    assert "step 3 progress 1.000 loss " in capsys.readouterr().out
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert (state["step"], state["tokens"]) == (3, 3 * 512)
    matrices = {name: weight for name, weight in state["weights"].items() if weight.dim() == 2}
    assert all(not torch.equal(before[name].bfloat16(), weight) for name, weight in matrices.items())
    export(tmp_path / "model.pt", tmp_path, DEMO)
    assert (tmp_path / "model.safetensors").is_file()
    again = Run(Plan(**{**vars(plan), "start": tmp_path / "model.pt", "steps": 1}))
    assert (again.step, again.tokens) == (3, 3 * 512)


def test_a_model_of_another_shape_is_trained_and_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = Shape(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, head_dim=32)
    monkeypatch.setitem(SHAPES, "narrow", narrow)
    Run(
        Plan(
            minutes=0, steps=1, rate=2e-3, matrix_rate=4e-3, seed=1, out=tmp_path, positions=512, threads=1,
            float32=True, shape="narrow",
        )
    ).run()  # fmt: skip
    folder = tmp_path / "exported"
    export(tmp_path / "model.pt", folder, DEMO)
    assert not (folder / "README.md").exists(), "the note is about the demo model"
    shape = load_model(folder).shape
    assert (shape.hidden_size, shape.intermediate_size, shape.num_hidden_layers) == (64, 96, 2)
    large = SHAPES["qwen2-0.5b"]
    assert large.num_attention_heads * large.head_dim == large.hidden_size


TINY: dict[str, Any] = {"head_dim": 16, "rms_norm_eps": 1e-12}


@pytest.mark.parametrize(
    "large",
    [
        Shape(hidden_size=80, intermediate_size=150, num_hidden_layers=5, num_attention_heads=6, **TINY),
        Shape(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, **TINY),
    ],
    ids=["wider and deeper", "the same"],
)
def test_a_model_grows_into_a_larger_one_that_computes_the_same_and_learns(large: Shape) -> None:
    torch.manual_seed(1)
    small = Llama(Shape(hidden_size=32, intermediate_size=48, num_hidden_layers=2, **TINY))
    for weight in small.parameters():
        torch.nn.init.normal_(weight, mean=1.0 if weight.dim() == 1 else 0.0, std=0.1)
    model = Llama(large)
    model.load_state_dict(grown(small.state_dict(), small.shape, large))
    ids = torch.randint(0, 4096, (2, 24))
    wanted = small.logits(small.hidden(ids))
    logits = model.logits(model.hidden(ids))
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight")):
            assert weight.grad is not None
            assert weight.grad.abs().max() > 0, name


def test_only_a_shape_with_the_same_heads_grows() -> None:
    small = Shape(hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=16)
    for large in (Shape(), Shape(hidden_size=16, head_dim=16), Shape(num_hidden_layers=1, head_dim=16)):
        with pytest.raises(ValueError, match=r"same size of a head|as wide and as deep"):
            grown({}, small, large)
