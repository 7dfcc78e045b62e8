"""Settings as keyword arguments: the same dataclass as the server's, the same ranges, nothing ignored in silence."""

import json
import subprocess
import sys
import warnings
from typing import Any

import pytest

from antiphon import EngineArgs
from antiphon.offline.engine_args import engine_args
from antiphon.settings import ServeSettings
from antiphon.shared.config import EngineSettings
from antiphon.shared.distributed import world
from antiphon.shared.flags import flags_of


@pytest.mark.spec("S-SRV-007")
def test_every_online_parameter_is_an_argument_and_feeds_the_same_dataclass() -> None:
    assert issubclass(EngineArgs, EngineSettings)
    args = engine_args(model="m", block_size=8, max_num_seqs=4, enable_prefix_caching=False, kv_cache_dtype="fp8")
    settings = args.settings()
    assert type(settings) is EngineSettings
    assert (settings.model, settings.cache.block_size, settings.scheduler.max_num_seqs) == ("m", 8, 4)
    assert (settings.cache.enable_prefix_caching, settings.cache.kv_cache_dtype) == (False, "fp8")
    of_engine = {item.name for item in flags_of(EngineArgs)}
    for item in flags_of(ServeSettings):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            engine_args(**{item.name: item.default})
        engine_side = item.name in of_engine or item.default is None
        assert engine_side or any(f"'{item.name}' has no effect" in str(one.message) for one in told), item.name


def test_none_means_the_default() -> None:
    args = engine_args(model="m", tokenizer=None, revision=None, enforce_eager=None, swap_space=None)
    assert (args.tokenizer, args.revision, args.enforce_eager, args.swap_space) == ("", "", False, None)
    assert args.seed == 0


@pytest.mark.spec("S-OFF-020")
def test_an_unknown_argument_is_a_type_error_with_the_nearest_name() -> None:
    with pytest.raises(TypeError, match="unknown argument 'max_num_sequences': did you mean 'max_num_seqs'"):
        engine_args(model="m", max_num_sequences=3)


@pytest.mark.parametrize(
    ("values", "kind", "said"),
    [
        ({"block_size": 7}, ValueError, "block_size: 7 is not a power of two"),
        ({"gpu_memory_utilization": 1.5}, ValueError, "gpu_memory_utilization: 1.5 is not above 0 and at most 1"),
        ({"dtype": "float8"}, ValueError, "dtype: 'float8' is not one of auto"),
        ({"max_num_seqs": "4"}, TypeError, "max_num_seqs: '4' is not a value of type int"),
        ({"max_num_seqs": True}, TypeError, "max_num_seqs: True is not a value of type int"),
        ({"quantization": "int3"}, ValueError, "quantization: 'int3' is not one of none, None, auto, ifq"),
        ({"enable_lora_bias": True}, ValueError, "enable_lora_bias=True is not supported here: "),
        ({"lora_modules": [1]}, TypeError, r"lora_modules: \[1\] is not a list of texts"),
    ],
)
def test_an_impossible_value_is_refused_and_named(values: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        engine_args(model="m", **values)


def test_what_has_no_effect_warns_and_what_asks_for_nothing_passes() -> None:
    for values in (
        {"disable_custom_all_reduce": True},
        {"preemption_mode": "swap"},
        {"host": "0.0.0.0"},
        {"guided_decoding_backend": "outlines"},
    ):
        with pytest.warns(UserWarning, match=f"'?{next(iter(values))}'? has no effect"):
            engine_args(model="m", **values)
    nothing = {"tensor_parallel_size": 1, "quantization": None, "enable_lora": False, "speculative_model": None}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine_args(model="m", **nothing)


def test_speculation_as_vllm_has_it_is_read_as_the_settings_here() -> None:
    args = engine_args(model="m", speculative_config={"method": "mtp", "num_speculative_tokens": 2})
    assert (args.use_mtp, args.use_lookahead, args.num_speculative_tokens) == (True, False, 2)
    assert engine_args(model="m", speculative_config=None).use_mtp is False
    with pytest.raises(ValueError, match=r"speculative_config=.* is not supported here: the methods are ngram"):
        engine_args(model="m", speculative_config={"method": "eagle", "model": "x"})


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys; import antiphon; from antiphon import SamplingParams, RequestOutput, EngineArgs;"
        "print(*({'torch', 'transformers', 'fastapi', 'nats', 'numpy', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


def test_fields_of_the_config_are_a_dict_or_json() -> None:
    given = {"text_config": {"rope_theta": 5}}
    for value in (given, json.dumps(given)):
        assert json.loads(engine_args(model="m", hf_overrides=value).settings().hf_overrides) == given
    assert engine_args(model="m", hf_overrides=None).hf_overrides == ""
    for value in ("[1]", "{", '"a"'):
        with pytest.raises(ValueError, match=r"hf_overrides: .* is not a JSON object with fields of config\.json"):
            engine_args(model="m", hf_overrides=value)
    with pytest.raises(TypeError, match=r"hf_overrides: .* is not a value of type str"):
        engine_args(model="m", hf_overrides=lambda config: config)


def test_settings_about_images_are_dicts_or_json() -> None:
    given = {"mm_processor_kwargs": {"max_pixels": 50176}, "limit_mm_per_prompt": {"image": 2, "video": 0}}
    args = engine_args(model="m", enable_mm=True, **given)
    assert {name: json.loads(getattr(args, name)) for name in given} == given
    assert engine_args(model="m", enable_mm=True, limit_mm_per_prompt='{"image": 2}').limit_mm_per_prompt
    assert engine_args(model="m", enable_mm=True, limit_mm_per_prompt="image=2").limit_mm_per_prompt == "image=2"
    for name, value, said in (
        ("mm_processor_kwargs", {"max_pixels": 1}, "needs enable_mm=True"),
        ("limit_mm_per_prompt", {"image": 33}, "at most 32 images"),
        ("limit_mm_per_prompt", {"video": 1}, "neither videos nor audio"),
        ("limit_mm_per_prompt", "[1]", "neither videos nor audio"),
        ("vision_device", "cuda", "encoded on the CPU"),
    ):
        with pytest.raises(ValueError, match=said):
            engine_args(model="m", **{name: value})


@pytest.mark.spec("S-OFF-020", "S-SRV-090", "S-SRV-007")
def test_an_argument_may_have_each_name_of_its_flag() -> None:
    args = engine_args(model_path="/m", num_gpus=2, tensor_parallel_size=1, enabe_mm=True)
    assert (args.model, args.tensor_parallel_size, args.enable_mm) == ("/m", 2, True)
    with pytest.raises(TypeError, match="'num_gpus' is another name of 'tensor_parallel_size': give one of them"):
        engine_args(model="/m", num_gpus=2, tensor_parallel_size=4)
    with pytest.warns(UserWarning, match="'engines' has no effect"):
        engine_args(model="/m", worker_num=2)


@pytest.mark.spec("S-SRV-072")
def test_the_former_argument_of_ray_names_its_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "has_ray", lambda: True)
    assert engine_args(model="/m", num_gpus=2, worker_use_ray=True).distributed_executor_backend == "ray"
    assert engine_args(model="/m", worker_use_ray=False).distributed_executor_backend == "auto"
