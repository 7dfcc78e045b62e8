"""Small random models that take images, as the field writes them, and what transformers answers with them."""

import functools
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.models import VOCAB_SIZE, randomise, write_tokenizer

VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = (VOCAB_SIZE - number for number in (4, 3, 2, 1))
_VISION_TOKENS = {
    VISION_START: "<|vision_start|>",
    VISION_END: "<|vision_end|>",
    IMAGE_PAD: "<|image_pad|>",
    VIDEO_PAD: "<|video_pad|>",
}
_OTHER_TOKENS: dict[str, dict[int, str]] = {
    "idefics3": {
        VISION_START: "<fake_token_around_image>",
        VISION_END: "<end_of_utterance>",
        IMAGE_PAD: "<image>",
        VIDEO_PAD: "<video>",
    },
    "smolvlm": {
        **_VISION_TOKENS,
        **{VISION_START - 2 * row - column: f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)},
        VISION_START - 2: "<whole>",
    },
}
"""Special tokens of families with other ones. Those of Idefics 3 have the names that its processor expects."""
FAMILIES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "glm4v",
    "glm46v",
    "glm4v_moe",
    "gemma3",
    "gemma4",
    "gemma4_mutual",
    "idefics3",
    "smolvlm",
    "internvl",
    "mistral3",
    "llava",
    "llava_siglip",
    "llava_next",
    "llava_onevision",
)
VISION_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The structure of the template that Qwen publishes with these models."""
_OTHER_PLACES = {
    "gemma3": ("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|>"),
    "idefics3": ("<|vision_start|><|image_pad|><|vision_end|>", "<image>"),
    "internvl": ("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>"),
}
"""What the template of a family writes for an image."""
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "num_heads": 2,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "num_heads": 2,
        "patch_size": 14,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 1],
    },
    "glm4v": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "num_heads": 2,
        "image_size": 84,
    },
}
_VISION |= {
    "qwen3_vl_moe": _VISION["qwen3_vl"],
    "qwen3_5": {name: value for name, value in _VISION["qwen3_vl"].items() if name != "deepstack_visual_indexes"},
    "glm46v": _VISION["glm4v"],
    "glm4v_moe": _VISION["glm4v"],
}
_VISION["qwen3_5_moe"] = _VISION["qwen3_5"]
_EXPERTS: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_DELTA: dict[str, Any] = {
    "head_dim": 32,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
    },
}
_MORE_TEXT: dict[str, dict[str, Any]] = {
    "glm4v": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 2, 1],
        },
    },
    "qwen3_vl": {
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
    },
}
_MORE_TEXT |= {
    "qwen3_vl_moe": {**_MORE_TEXT["qwen3_vl"], "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "qwen3_5": _DELTA,
    "qwen3_5_moe": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 72},
    "glm46v": _MORE_TEXT["glm4v"],
    "glm4v_moe": {
        **_MORE_TEXT["glm4v"],
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}
_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 56 * 56,
    "max_pixels": 28 * 28 * 64,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


_LLAVA_TEXT = {name: value for name, value in _TEXT.items() if name != "rope_parameters"}
_SIDE = 42
"""Side of the images that the encoders of LLaVA take: 9 patches."""
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": _SIDE,
    "patch_size": 14,
}
_GEMMA_SIDE = 112
"""Side of the images of Gemma 3: 64 patches, of which each 4 are one token."""
_TILES: dict[str, Any] = {
    "text_config": {"model_type": "llama", **_LLAVA_TEXT},
    "vision_config": {**_TOWER, "image_size": 56},
    "scale_factor": 2,
}
"""A tile is 16 patches, of which each 4 are one token."""
_PINPOINTS = [[_SIDE, 2 * _SIDE], [2 * _SIDE, _SIDE], [2 * _SIDE, 2 * _SIDE]]
_LARGE_PINPOINTS = [*_PINPOINTS, [4 * _SIDE, 4 * _SIDE]]
"""With one of more than nine tiles, so that patches are interpolated."""
_LLAVA: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {"model_type": "llama", **_LLAVA_TEXT},
        "vision_config": {"model_type": "clip_vision_model", **_TOWER},
    },
    "llava_siglip": {
        "text_config": {"model_type": "qwen2", **_LLAVA_TEXT, "tie_word_embeddings": True},
        "vision_config": {"model_type": "siglip_vision_model", **_TOWER},
        "vision_feature_select_strategy": "full",
    },
    "gemma3": {
        "text_config": {
            **_LLAVA_TEXT,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 12,
        },
        "vision_config": {**_TOWER, "image_size": _GEMMA_SIDE, "vision_use_head": False},
        "mm_tokens_per_image": 16,
        "boi_token_index": VISION_START,
        "eoi_token_index": VISION_END,
    },
    "gemma4": {
        "text_config": {
            **_LLAVA_TEXT,
            "pad_token_id": 0,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "global_head_dim": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 40,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "num_kv_shared_layers": 2,
        },
        "vision_config": {
            **{name: value for name, value in _TOWER.items() if name != "image_size"},
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "position_embedding_size": 256,
            "standardize": True,
        },
        "boi_token_id": VISION_START,
        "eoi_token_id": VISION_END,
        "video_token_id": VIDEO_PAD,
        "audio_token_id": VIDEO_PAD,
    },
    "idefics3": _TILES,
    "smolvlm": _TILES,
    "internvl": {
        "text_config": {"model_type": "qwen3", **_LLAVA_TEXT, "head_dim": 16},
        "vision_config": {**_TOWER, "image_size": [56, 56], "patch_size": [14, 14]},
        "image_seq_length": 4,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **_LLAVA_TEXT, "head_dim": 16, "rms_norm_eps": 1e-3},
        "vision_config": {"model_type": "pixtral", **_TOWER, "image_size": 112, "head_dim": 16},
        "tie_word_embeddings": False,
    },
    "llava_next": {
        "text_config": {"model_type": "mistral", **_LLAVA_TEXT, "sliding_window": None},
        "vision_config": {"model_type": "clip_vision_model", **_TOWER},
        "image_grid_pinpoints": _PINPOINTS,
    },
    "llava_onevision": {
        "text_config": {"model_type": "qwen2", **_LLAVA_TEXT},
        "vision_config": {"model_type": "siglip_vision_model", **_TOWER, "vision_use_head": False},
        "image_grid_pinpoints": _LARGE_PINPOINTS,
        "video_token_index": VIDEO_PAD,
    },
}
_LLAVA["gemma4_mutual"] = {
    **_LLAVA["gemma4"],
    "text_config": {**_LLAVA["gemma4"]["text_config"], "use_bidirectional_attention": "vision"},
}
_WITH_ID = ("gemma4", "gemma4_mutual", "internvl", "idefics3", "smolvlm")
"""Families whose configs call the image token `image_token_id` in place of `image_token_index`."""
_IN_TILES = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
_OTHER_PROCESSORS: dict[str, dict[str, Any]] = {
    "glm4v": {
        "image_processor_type": "Glm4vImageProcessor",
        "size": {"shortest_edge": 2 * 56 * 56, "longest_edge": 2 * 28 * 28 * 64},
    },
    "glm46v": {
        "image_processor_type": "Glm46VImageProcessor",
        "size": {"shortest_edge": 2 * 56 * 56, "longest_edge": 2 * 28 * 28 * 64},
    },
    "glm4v_moe": {
        "image_processor_type": "Glm4vImageProcessor",
        "size": {"shortest_edge": 2 * 56 * 56, "longest_edge": 2 * 28 * 28 * 64},
    },
    "idefics3": {"image_processor_type": "Idefics3ImageProcessor", **_IN_TILES},
    "smolvlm": {"image_processor_type": "SmolVLMImageProcessor", **_IN_TILES},
    "mistral3": {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": 112},
        "patch_size": {"height": 14, "width": 14},
    },
    "internvl": {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": 56, "width": 56},
        "crop_to_patches": False,
        "max_patches": 4,
    },
    "gemma3": {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": _GEMMA_SIDE, "width": _GEMMA_SIDE},
        "image_seq_length": 16,
        "do_pan_and_scan": None,
    },
    "gemma4": {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "max_soft_tokens": 70},
    "gemma4_mutual": {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "max_soft_tokens": 70},
    "llava": {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": _SIDE},
        "crop_size": {"height": _SIDE, "width": _SIDE},
    },
    "llava_siglip": {"image_processor_type": "SiglipImageProcessor", "size": {"height": _SIDE, "width": _SIDE}},
    "llava_next": {
        "image_processor_type": "LlavaNextImageProcessor",
        "size": {"shortest_edge": _SIDE},
        "crop_size": {"height": _SIDE, "width": _SIDE},
        "image_grid_pinpoints": _PINPOINTS,
    },
    "llava_onevision": {
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "size": {"height": _SIDE, "width": _SIDE},
        "image_grid_pinpoints": _LARGE_PINPOINTS,
    },
}


def small_vision_config(family: str) -> dict[str, Any]:
    """The content of config.json of a model that `make_vision_model` would write."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    config = _config(family)
    return {**config.to_diff_dict(), "architectures": [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[config.model_type]]}


def _config(family: str) -> Any:
    from transformers import AutoConfig

    if family in _LLAVA:
        named = "image_token_id" if family in _WITH_ID else "image_token_index"
        kind = family.removesuffix("_siglip").removesuffix("_mutual")
        return AutoConfig.for_model(kind, **{named: IMAGE_PAD}, **_LLAVA[family])
    return AutoConfig.for_model(
        family,
        text_config={**_TEXT, **_MORE_TEXT.get(family, {})},
        vision_config=_VISION[family],
        image_token_id=IMAGE_PAD,
        video_token_id=VIDEO_PAD,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )


def make_vision_model(directory: Path, family: str = "qwen2_vl", *, seed: int = 0, old_config: bool = False) -> Path:
    """Writes a model with its processor and tokenizer. With `old_config` config.json has the form of 2024."""
    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_config(_config(family), dtype=torch.float32)
    randomise(model, seed)
    model.save_pretrained(directory)
    write_tokenizer(directory, VOCAB_SIZE, _TEXT["max_position_embeddings"])
    template = VISION_TEMPLATE.replace(*_OTHER_PLACES.get(family, ("", "")))
    _write_vision_tokens(directory, template, _OTHER_TOKENS.get(family, _VISION_TOKENS))
    (directory / "preprocessor_config.json").write_text(json.dumps(_OTHER_PROCESSORS.get(family, _PROCESSOR)))
    if family == "mistral3":
        named = {"image_break_token": "<|video_pad|>", "image_end_token": "<|vision_end|>"}
        (directory / "processor_config.json").write_text(json.dumps(named))
    if old_config:
        _write_old_config(directory)
    return directory


def image(width: int, height: int, seed: int = 0, kind: str = "PNG") -> bytes:
    """Returns the file of a random image, with large areas so that resizing keeps something of it."""
    import numpy as np
    from PIL import Image

    cells = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    target = io.BytesIO()
    Image.fromarray(cells).resize((width, height), Image.Resampling.BILINEAR).save(target, kind)
    return target.getvalue()


def expanded(token_ids: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Returns a prompt with each placeholder repeated as often as its image has tokens."""
    rest = iter(counts)
    return [each for token in token_ids for each in ([token] * next(rest) if token == IMAGE_PAD else [token])]


def in_rows(token_ids: Sequence[int], sizes: Sequence[Sequence[int]]) -> list[int]:
    """Returns a prompt with images of so many rows and columns of tokens as the processor of Pixtral writes them."""
    rest, found = iter(sizes), list[int]()
    for token in token_ids:
        if token == IMAGE_PAD:
            rows, columns = next(rest)
            found += [*([IMAGE_PAD] * columns + [VIDEO_PAD]) * (rows - 1), *[IMAGE_PAD] * columns, VISION_END]
        else:
            found.append(token)
    return found


def in_tiles(directory: Path, token_ids: Sequence[int], tiles: Sequence[tuple[int, int]]) -> list[int]:
    """Returns a prompt with images of so many rows and columns of tiles as the processor of SmolVLM writes them."""
    from tokenizers import Tokenizer
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    whole = "<global-img>" if tokenizer.token_to_id("<whole>") is None else "<whole>"
    around, image = map(tokenizer.id_to_token, (VISION_START, IMAGE_PAD))
    rest, found = iter(tiles), list[int]()
    for token in token_ids:
        if token == IMAGE_PAD:
            text = get_image_prompt_string(*next(rest), 4, around, image, whole)
            found += tokenizer.encode(text, add_special_tokens=False).ids
        else:
            found.append(token)
    return found


def vision_reference(
    directory: Path, prompt: Sequence[int], images: Sequence[bytes], num_tokens: int
) -> tuple[list[int], list[int]]:
    """Returns the prompt with repeated placeholders, and what transformers generates greedily, ignoring the end.

    `prompt` has one placeholder for each image.
    """
    import torch

    model = _loaded(directory)[0]
    whole, inputs = _inputs(directory, prompt, images)
    with torch.inference_mode():
        found = model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
    return whole, found[0, len(whole) :].tolist()


def vision_log_probabilities(directory: Path, prompt: Sequence[int], images: Sequence[bytes]) -> Any:
    """Returns the log probabilities of the token behind the prompt, [vocab] float32."""
    import torch

    with torch.inference_mode():
        logits = _loaded(directory)[0](**_inputs(directory, prompt, images)[1], use_cache=False).logits
    return logits[0, -1].log_softmax(-1)


def _inputs(directory: Path, prompt: Sequence[int], files: Sequence[bytes]) -> tuple[list[int], dict[str, Any]]:
    """Returns the prompt with repeated placeholders, and what the model of transformers takes for it."""
    import torch
    from PIL import Image

    model, processor = _loaded(directory)
    kind = model.config.model_type
    rows_of_tiles = {"return_row_col_info": True}
    of_processor = {
        "internvl": {"crop_to_patches": True},
        "mistral3": {"patch_size": 28},
        "idefics3": rows_of_tiles,
        "smolvlm": rows_of_tiles,
    }
    more: dict[str, Any] = of_processor.get(kind, {})
    images = [Image.open(io.BytesIO(each)).convert("RGB") for each in files]
    pixels = dict(processor(images, return_tensors="pt", **more)) if images else {}
    tiles = pixels.pop("num_patches", None)
    pixels.pop("num_crops", None)
    # The processor has taken all images as those of one text.
    grids = [pixels.pop(name, [[]])[0] for name in ("rows", "cols")]
    with torch.inference_mode():
        found: Any = model.get_image_features(**pixels, return_dict=True).pooler_output if images else []
    if kind in ("idefics3", "smolvlm"):
        whole = in_tiles(directory, prompt, list(zip(*grids, strict=True)))
    elif kind == "mistral3" and images:
        whole = in_rows(prompt, [[int(side) // 28 for side in size] for size in pixels["image_sizes"]])
    else:
        counts = [len(each) for each in found] if tiles is None else [int(each) * len(found[0]) for each in tiles]
        whole = expanded(prompt, counts)
    ids = torch.tensor([whole])
    of_image = (ids == IMAGE_PAD).int()
    kinds = {"mm_token_type_ids": of_image} if "image_grid_thw" in pixels else {}
    if kind == "gemma3" and images:
        kinds = {"token_type_ids": of_image}
    if kind == "gemma4":
        pixels.pop("num_soft_tokens_per_image", None)
        kinds = {"mm_token_type_ids": of_image}
    return whole, {"input_ids": ids, "attention_mask": torch.ones_like(ids), **kinds, **pixels}


@functools.lru_cache(maxsize=2)
def _loaded(directory: Path) -> Any:
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(directory, dtype="float32", attn_implementation="eager").eval()
    return model, AutoImageProcessor.from_pretrained(directory, backend="pil")


def _write_vision_tokens(directory: Path, template: str, names: dict[int, str]) -> None:
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    for token in tokenizer["added_tokens"]:
        if token["id"] in names:
            token.update(content=names[token["id"]], special=True)
    path.write_text(json.dumps(tokenizer))
    path = directory / "tokenizer_config.json"
    named = {"start_image_token": "<|vision_start|>", "end_image_token": "<|vision_end|>"}
    if "<whole>" in names.values():
        named = {"fake_image_token": "<|vision_start|>", "global_image_token": "<whole>"}
    if "<image>" in names.values():
        named = {}
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template, **named}))


def _write_old_config(directory: Path) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    for name in ("model_type", "layer_types"):
        text.pop(name, None)
    path.write_text(json.dumps({**text, **config, "torch_dtype": "float32"}))
