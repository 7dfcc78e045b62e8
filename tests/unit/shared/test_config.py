"""Settings: flags beat the environment, the environment beats defaults, mistakes are named."""

import argparse
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.shared import limits
from antiphon.shared.config import DetokenizerSettings, EngineSettings, GatewaySettings, TokenizerSettings
from antiphon.shared.flags import SettingsError, add_flags, flag, flags_of, normalise, parse, to_argv, values_of
from antiphon.shared.settings.bus import BusSettings

KINDS = [BusSettings, EngineSettings, TokenizerSettings, DetokenizerSettings, GatewaySettings]


def read(kind, argv=(), environ=None):
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_flags(parser, kind)
    return parse(kind, parser.parse_args(normalise(argv)), environ or {})


@pytest.mark.parametrize("kind", KINDS)
def test_without_flags_and_environment_everything_has_its_default(kind):
    assert read(kind) == kind()


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_has_a_help_text(kind, capsys):
    parser = argparse.ArgumentParser()
    add_flags(parser, kind)
    text = " ".join(parser.format_help().split())
    for item in flags_of(kind):
        assert f"--{item.name.replace('_', '-')}" in text
        assert item.metadata["help"]


def test_a_flag_beats_the_environment_and_the_environment_beats_the_default():
    environ = {"MAX_MODEL_LEN": "100", "DTYPE": "float32"}
    settings = read(EngineSettings, ["--max-model-len", "200"], environ)
    assert (settings.scheduler.max_model_len, settings.execution.dtype, settings.execution.threads) == (
        200,
        "float32",
        0,
    )


def test_an_empty_variable_counts_as_unset():
    assert read(EngineSettings, [], {"MAX_MODEL_LEN": "", "DTYPE": ""}) == EngineSettings()


def test_dashes_and_underscores_in_flags_are_the_same():
    for spelling in ("--max-num-seqs", "--max_num_seqs", "--max_num-seqs"):
        assert read(EngineSettings, [spelling, "7"]).scheduler.max_num_seqs == 7
        assert read(EngineSettings, [f"{spelling}=7"]).scheduler.max_num_seqs == 7


def test_underscores_in_values_are_kept():
    assert read(EngineSettings, ["--served-model-name=my_model"]).served_model_name == "my_model"
    assert normalise(["--a_b=c_d", "e_f"]) == ["--a-b=c_d", "e_f"]


def test_an_alias_sets_the_same_field():
    assert read(EngineSettings, ["--model-path", "/m"]).model == "/m"
    assert read(GatewaySettings, ["--api-key", "k"]).api_keys == "k"


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--enable-prefix-caching"], True),
        (["--enable-prefix-caching=false"], False),
        (["--enable-prefix-caching", "0"], False),
        (["--enable-prefix-caching", "TRUE"], True),
    ],
)
def test_a_boolean_flag_stands_alone_or_has_a_value(words, value):
    assert read(EngineSettings, words).cache.enable_prefix_caching is value


@pytest.mark.parametrize(
    ("name", "text"), [("MAX_MODEL_LEN", "many"), ("DTYPE", "float8"), ("GPU_MEMORY_UTILIZATION", "half")]
)
def test_a_malformed_variable_is_named_with_its_value(name, text):
    with pytest.raises(SettingsError, match=f"{name}.*{text}"):
        read(EngineSettings, [], {name: text})


@pytest.mark.parametrize(
    "words", [["--dtype", "float8"], ["--max-num-seqs", "many"], ["--enable-prefix-caching", "yes"]]
)
def test_a_malformed_flag_is_refused(words):
    with pytest.raises(argparse.ArgumentError):
        read(EngineSettings, words)


@pytest.mark.spec("S-SRV-041", "S-SRV-042", "S-SRV-050", "S-SRV-106")
@pytest.mark.parametrize(
    ("name", "fine", "wrong"),
    [
        ("gpu_memory_utilization", ["0.01", "1"], ["0", "1.01", "-1", "nan"]),
        ("block_size", ["1", "16", "64"], ["0", "12", "-4"]),
        ("num_gpu_blocks_override", ["1"], ["0"]),
        ("max_num_seqs", ["1"], ["0", "-1"]),
        ("max_num_batched_tokens", ["1"], ["0"]),
        ("max_model_len", ["1"], ["0"]),
        ("kv_cache_memory_gb", ["0.1"], ["0", "nan"]),
        ("threads", ["0", "4"], ["-1"]),
    ],
)
def test_a_value_out_of_its_range_is_named_with_the_rule(name, fine, wrong):
    word = f"--{name.replace('_', '-')}"
    for value in fine:
        assert values_of(read(EngineSettings, [f"{word}={value}"]))[name] == float(value)
    for value in wrong:
        with pytest.raises(SettingsError, match=f"{word}: .* is not (at least|above|a power)"):
            read(EngineSettings, [f"{word}={value}"])


@pytest.mark.parametrize("name", ["model_id", "served_model_name", "served_model_alias"])
def test_a_models_names_are_short_enough_for_heartbeats_and_labels_of_metrics(name: str):
    word, longest = f"--{name.replace('_', '-')}", "n" * limits.MODEL_NAME_CHARS_MAX
    assert getattr(read(EngineSettings, [f"{word}={longest}"]), name) == longest
    for wrong in (f"{longest}n", "a\nb", "n" * 100_000):
        with pytest.raises(SettingsError, match=rf"{word}: (?s:.*) is not .*at most 256 printable") as refused:
            read(EngineSettings, [f"{word}={wrong}"])
        assert len(str(refused.value)) < 400


def test_a_model_has_a_limited_number_of_names():
    most = ",".join(f"name-{n}" for n in range(limits.MODEL_ALIASES_MAX))
    assert read(EngineSettings, [f"--served-model-alias={most}"]).served_model_alias == most
    with pytest.raises(SettingsError, match="is not at most 64 names"):
        read(EngineSettings, [f"--served-model-alias={most},one-more"])


def test_a_variable_out_of_its_range_is_named_too():
    with pytest.raises(SettingsError, match=r"GPU_MEMORY_UTILIZATION: 2\.0 is not above 0 and at most 1"):
        read(EngineSettings, [], {"GPU_MEMORY_UTILIZATION": "2"})
    flag_beats = read(EngineSettings, ["--gpu-memory-utilization=1"], {"GPU_MEMORY_UTILIZATION": "2"})
    assert (flag_beats.cache.gpu_memory_utilization, EngineSettings().cache.gpu_memory_utilization) == (1.0, 0.9)


def test_settings_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        read(EngineSettings).execution.threads = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_a_launcher_that_has_a_flag_already_keeps_it():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=1)
    add_flags(parser, GatewaySettings, skip=frozenset({"listen_fd", "other_listen_fds"}))
    options = parser.parse_args([])
    assert options.port == 1
    assert not hasattr(options, "listen_fd")


TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)


@given(
    st.builds(
        EngineSettings,
        nats=TEXT,
        model=TEXT,
        served_model_name=TEXT.filter(str.isprintable),
        dtype=st.sampled_from(["auto", "float32"]),
        max_model_len=st.none() | st.integers(1, 10**6),
        gpu_memory_utilization=st.floats(0.1, 1.0),
        enable_prefix_caching=st.booleans(),
        threads=st.integers(min_value=0),
    )
)
def test_settings_as_flags_give_the_same_settings_again(settings):
    assert read(EngineSettings, to_argv(settings)) == settings


def test_the_word_none_stands_for_none_where_a_setting_may_be():
    class Seeded(BusSettings):
        seed: int | None = flag(3, "a seed", env="SEED", group="http")

    assert [read(Seeded, words).seed for words in ([], ["--seed=4"], ["--seed", "None"])] == [3, 4, None]
    assert read(Seeded, [], {"SEED": "none"}).seed is None
    assert read(Seeded, to_argv(Seeded(seed=None))) == Seeded(seed=None)
    with pytest.raises(SettingsError, match="SEED"):
        read(Seeded, [], {"SEED": "nothing"})


def test_settings_are_compared_by_their_values_and_have_only_their_fields():
    settings = EngineSettings(threads=2)
    assert settings == EngineSettings(threads=2)
    assert hash(settings) == hash(EngineSettings(threads=2))
    assert settings != EngineSettings()
    assert BusSettings() != Seed()
    assert dataclasses.replace(settings, threads=3).execution.threads == 3
    assert "threads=2" in repr(settings)
    with pytest.raises(TypeError, match="EngineSettings has no field thread"):
        EngineSettings(thread=2)  # pyright: ignore[reportCallIssue]
    with pytest.raises(dataclasses.FrozenInstanceError):
        del settings.execution.threads  # pyright: ignore[reportAttributeAccessIssue]


class Seed(BusSettings):
    """Settings with the fields of their base class."""
