"""Tokenizers from elsewhere: a user's file, a class of transformers, code that comes with a model; and none at all."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from antiphon.services.detokenizer.service import DetokenizerService
from antiphon.services.tokenizer.service import TokenizerService
from antiphon.shared.actors.actor import ask
from antiphon.shared.actors.host import Host
from antiphon.shared.clock import SystemClock
from antiphon.shared.codec import Decoder, pack_ids
from antiphon.shared.config import DetokenizerSettings, ModelSettings, TokenizerSettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.messages import (
    Ack,
    ChatMessage,
    DetokenizeRequest,
    ErrorReply,
    Message,
    OpenStream,
    TextEvent,
    TokenEvent,
    TokenizeRequest,
)
from antiphon.shared.subjects import Subjects
from antiphon.shared.text.codec import Codec, choose_codec
from antiphon.shared.text.detokenization.stream import TextStream
from antiphon.shared.text.vocabulary import Vocabulary, choose_vocabulary
from tests.support.memory import MemoryBus
from tests.tokenizer_files import byte_level, write_tokenizer_files

TEXT = "The engine sings: 好的 déjà vu"
LETTERS = """
class Tokenizer:
    vocab_size = 0x110000
    all_special_ids = (0,)

    def encode(self, text):
        return [ord(letter) for letter in text]

    def decode(self, token_ids):
        return "".join(map(chr, token_ids))
"""
BY_FUNCTION = (
    LETTERS.replace("class Tokenizer", "class Letters")
    + """
def get_tokenizer(name_or_path, **options):
    assert set(options) == {"tokenizer_mode", "trust_remote_code", "revision"}, options
    open(name_or_path + "/made", "w").close()
    return Letters()
"""
)
OWN_CODE = """
from transformers import PreTrainedTokenizer

class LettersTokenizer(PreTrainedTokenizer):
    def __init__(self, **options):
        self.letters = {chr(code): code - 32 for code in range(32, 127)}
        super().__init__(**options)

    @property
    def vocab_size(self):
        return len(self.letters)

    def get_vocab(self):
        return dict(self.letters)

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.letters.get(token, 0)

    def _convert_id_to_token(self, index):
        return chr(index + 32)

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)
"""


def both(directory: Path, **settings: Any) -> tuple[Codec, Vocabulary]:
    """What the tokenizer and the detokenizer make of the same settings."""
    given = ModelSettings(model=str(directory), **settings)
    return choose_codec(given, directory), choose_vocabulary(given, directory, directory)


def streamed(vocabulary: Vocabulary, token_ids: list[int]) -> str:
    """The text of tokens that come one by one."""
    stream = TextStream(
        OpenStream(sequence_id="r", attempt=1, model="m", reply_subject="reply", engine_subject="engine"), vocabulary
    )
    parts: list[str] = []
    for position, token_id in enumerate(token_ids):
        reason = "stop" if position + 1 == len(token_ids) else None
        event = TokenEvent(sequence_id="r", attempt=1, position=position, token_ids=(token_id,), finish_reason=reason)
        parts += [text.text for text in stream.push(event)]
    return "".join(parts)


@pytest.fixture
def extension(tmp_path: Path) -> Any:
    def write(source: str) -> str:
        path = tmp_path / "vllm_extension.py"
        path.write_text(source)
        return str(path)

    return write


@pytest.mark.spec("S-SRV-023")
@pytest.mark.parametrize("source", [LETTERS, BY_FUNCTION], ids=["class", "function"])
def test_a_users_own_tokenizer_encodes_decodes_and_streams(source: str, extension: Any, tmp_path: Path) -> None:
    codec, vocabulary = both(tmp_path, tokenizer_extension_path=extension(source))
    [token_ids] = codec.encode([TEXT], add_special_tokens=True)
    assert token_ids == list(map(ord, TEXT))
    assert codec.decode(token_ids) == TEXT
    assert codec.token_text(ord("s")) == "s"
    assert (codec.knows(5), codec.knows(0x110000)) == (True, False)
    assert streamed(vocabulary, token_ids) == TEXT
    assert vocabulary.special_ids == {0}
    assert (tmp_path / "made").exists() == (source is BY_FUNCTION)


@pytest.mark.spec("S-SRV-023")
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1", "has neither get_tokenizer(name_or_path, **options) nor a class Tokenizer"),
        ("class Tokenizer:\n    def encode(self, text): ...", "lacks encode(text) or decode(token_ids)"),
        ("def get_tokenizer(path, **options): return 5", "lacks encode(text) or decode(token_ids)"),
        ("raise RuntimeError('no luck')", "failed: RuntimeError: no luck"),
        ("no python", "failed: SyntaxError"),
    ],
)
def test_an_extension_that_is_none_ends_the_start(source: str, said: str, extension: Any) -> None:
    path = extension(source)
    for service in (TokenizerService(TokenizerSettings(tokenizer_extension_path=path)),
                    DetokenizerService(DetokenizerSettings(tokenizer_extension_path=path))):  # fmt: skip
        with pytest.raises(SettingsError) as raised:
            service._load()  # pyright: ignore[reportPrivateUsage]
        assert str(raised.value).startswith("--tokenizer-extension-path")
        assert said in str(raised.value)


@pytest.mark.spec("S-SRV-023")
def test_an_extension_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--tokenizer-extension-path: there is no file /no/such\.py"):
        choose_codec(ModelSettings(tokenizer_extension_path="/no/such.py"), tmp_path)


@pytest.mark.spec("S-SRV-022")
def test_auto_reads_the_file_and_slow_asks_transformers_with_the_same_result(tmp_path: Path) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    directory = write_tokenizer_files(tmp_path, byte_level(), **config)
    fast, fast_vocabulary = both(directory, tokenizer_mode="auto")
    slow, slow_vocabulary = both(directory, tokenizer_mode="slow")
    assert isinstance(fast, Codec)
    assert isinstance(slow, Codec)
    [token_ids] = fast.encode([TEXT], add_special_tokens=True)
    assert slow.encode([TEXT], add_special_tokens=True) == [token_ids]
    assert slow.decode(token_ids) == fast.decode(token_ids) == TEXT
    assert streamed(slow_vocabulary, token_ids) == streamed(fast_vocabulary, token_ids) == TEXT
    assert slow.special_ids == fast.special_ids
    assert [slow.token_text(i) for i in token_ids] == [fast.token_text(i) for i in token_ids]
    assert isinstance(fast._tokenizer, Tokenizer)  # pyright: ignore[reportPrivateUsage]
    assert not isinstance(slow._tokenizer, Tokenizer)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.spec("S-SRV-022")
def test_where_a_tokenizer_has_a_fast_and_a_slow_form_slow_takes_the_one_in_python(own_code: Path) -> None:
    """The file says one thing and the class another, so that it shows which of them encoded."""
    fast = byte_level()
    shutil.copy(write_tokenizer_files(own_code.parent / "plain", fast) / "tokenizer.json", own_code)
    [by_file] = both(own_code, tokenizer_mode="auto", trust_remote_code=True)[0].encode(
        ["sing"], add_special_tokens=False
    )
    [by_class] = both(own_code, tokenizer_mode="slow", trust_remote_code=True)[0].encode(
        ["sing"], add_special_tokens=False
    )
    assert by_file == fast.encode("sing", add_special_tokens=False).ids
    assert by_class == [ord(letter) - 32 for letter in "sing"] != by_file


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tokenizer whose class lies beside it; what runs of it is copied below the temporary directory."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    directory = tmp_path / "letters"
    directory.mkdir()
    marker = f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
    (directory / "tokenization_letters.py").write_text(marker + OWN_CODE)
    classes = {"AutoTokenizer": ["tokenization_letters.LettersTokenizer", None]}
    facts = {"tokenizer_class": "LettersTokenizer", "auto_map": classes}
    (directory / "tokenizer_config.json").write_text(json.dumps(facts))
    (directory / "config.json").write_text(json.dumps({"vocab_size": 95}))
    return directory


@pytest.mark.spec("S-SRV-025")
def test_a_tokenizers_own_code_runs_when_it_is_trusted(own_code: Path) -> None:
    codec, vocabulary = both(own_code, trust_remote_code=True)
    [token_ids] = codec.encode(["sing"], add_special_tokens=False)
    assert token_ids == [ord(letter) - 32 for letter in "sing"]
    assert streamed(vocabulary, token_ids) == "sing"


@pytest.mark.spec("S-SRV-025")
@pytest.mark.parametrize("settings", [{}, {"tokenizer_mode": "slow"}])
def test_a_tokenizers_own_code_does_not_run_unless_it_is_trusted(own_code: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="tokenizer"):
        both(own_code, **settings)
    assert not (own_code.parent / "ran").exists()


@pytest.mark.spec("S-SRV-025")
def test_a_plain_file_beats_code_even_when_it_is_trusted(own_code: Path, tmp_path: Path) -> None:
    shutil.copy(write_tokenizer_files(tmp_path / "plain", byte_level()) / "tokenizer.json", own_code)
    codec, _ = both(own_code, trust_remote_code=True)
    assert codec.decode(codec.encode([TEXT], add_special_tokens=False)[0]) == TEXT
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """A model without any tokenizer file."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 7}))
    return str(tmp_path)


async def _asked(service: Any, subject: str, *messages: Message) -> list[Message]:
    bus = MemoryBus()
    own, peer = bus.connect("service"), bus.connect("peer")
    await service.start(Host(transport=own, subjects=Subjects(), clock=SystemClock(), id="s1", instance_id="b1"))
    replies = Decoder([Ack, ErrorReply])
    found: list[Message] = []
    for message in messages:
        try:
            found.append(await ask(peer, subject, message, replies, timeout_s=60))
        except ServiceError as error:
            found.append(ErrorReply(error.code, error.message, error.param))
    await service._actor.stop()
    await own.close()
    await peer.close()
    return found


@pytest.mark.spec("S-SRV-024")
async def test_without_a_tokenizer_text_is_refused_with_what_to_give_instead(bare: str) -> None:
    service = TokenizerService(TokenizerSettings(model=bare, served_model_name="m", skip_tokenizer_init=True))
    refusals = await _asked(
        service,
        Subjects().tokenize("m"),
        TokenizeRequest(request_id="r1", model="m", prompts=("text",)),
        TokenizeRequest(request_id="r2", model="m", messages=(ChatMessage(role="user", content="text"),)),
        TokenizeRequest(request_id="r3", model="m", prompts=("long" * 5000,)),
        DetokenizeRequest("r4", "m", pack_ids([1, 2])),
    )
    for refusal in refusals:
        assert isinstance(refusal, ErrorReply)
        assert refusal.code == "invalid_value"
        assert "--skip-tokenizer-init" in refusal.message
        assert "token ids" in refusal.message


@pytest.mark.spec("S-SRV-024")
async def test_without_a_tokenizer_a_stop_string_is_refused_and_stop_tokens_are_named(bare: str) -> None:
    service = DetokenizerService(DetokenizerSettings(model=bare, served_model_name="m", skip_tokenizer_init=True))
    plain = OpenStream(sequence_id="r1", attempt=1, model="m", reply_subject="reply", engine_subject="engine")
    stopping = OpenStream(
        sequence_id="r2", attempt=1, model="m", reply_subject="reply", engine_subject="engine", stop=("end",)
    )
    accepted, refused = await _asked(service, Subjects().detokenizer_control("s1", "b1"), plain, stopping)
    assert accepted == Ack("r1")
    assert isinstance(refused, ErrorReply)
    assert (refused.code, refused.param) == ("invalid_value", "stop")
    assert "stop_token_ids" in refused.message


@pytest.mark.spec("S-SRV-024")
def test_without_a_tokenizer_tokens_pass_with_empty_text(bare: str) -> None:
    settings = ModelSettings(model=bare, skip_tokenizer_init=True)
    vocabulary = choose_vocabulary(settings, Path(bare), Path(bare))
    stream = TextStream(
        OpenStream(sequence_id="r", attempt=1, model="m", reply_subject="reply", engine_subject="engine"), vocabulary
    )
    events: list[TextEvent] = stream.push(
        TokenEvent(sequence_id="r", attempt=1, position=0, token_ids=(3, 6, 0), finish_reason="length")
    )
    assert [(event.token_ids, event.text, event.finish_reason) for event in events] == [((3, 6, 0), "", "length")]
    assert vocabulary.token_text(5) == ""
