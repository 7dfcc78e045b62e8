"""The models that one launcher serves: that of the command line, of `--also`, of `--models`, and of orders.

Each model gets complete settings, as if it were the only model. A model of `--also` or of the file given by `--models`
has the settings of the command line, except those that name the first model or its files (`OF_ONE_MODEL`), and its own
entry overrides them; so does a model that an order loads while the server runs. Called by the launcher.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from antiphon.settings import ServeSettings
from antiphon.shared.config import DetokenizerSettings, EngineSettings, TokenizerSettings, VisionSettings
from antiphon.shared.flags import SettingsError, flags_of, parse_words, values_of
from antiphon.shared.limits import MODEL_ALIASES_MAX, MODELS_MAX
from antiphon.shared.models.model_files import described, model_aliases, model_name
from antiphon.shared.settings.allowed_values import MODEL_NAME
from antiphon.shared.settings.bus import BusSettings

S = TypeVar("S", bound=ServeSettings)
OF_ONE_MODEL = (
    "model",
    "given_model",
    "revision",
    "hf_overrides",
    "model_id",
    "served_model_name",
    "served_model_alias",
    "tokenizer",
    "tokenizer_revision",
    "tokenizer_extension_path",
    "chat_template",
    "conv_template",
    "lora_modules",
    "prompt_adapters",
)
"""Settings that name a model or its files. Their values on the command line apply only to the first model."""
AT_START_ONLY = ("trust_remote_code", "tokenizer_extension_path", "nnode", "node_rank", "pod_ips")
"""Settings that an order cannot give: they let Python code run, or are about other machines."""
_NOT_SHARED = ("kv_events_config",)
"""Settings of the command line that a model loaded by an order does not take over: two would use the same ports."""
_COUNTS = frozenset({"tokenizers", "engines", "prefill", "decode", "detokenizers", "visions"})


def models_of(serve: S) -> list[S]:
    """Returns the settings of each model, in the order in which the models are named. Raises SettingsError.

    The model of the command line comes first. With `--models`, that model is included only if the command line names
    it; the default model is not added to the models of the file.
    """
    entries = [*map(_also, serve.also), *(_of_file(Path(serve.models).expanduser()) if serve.models else ())]
    defaults = _defaults(serve, OF_ONE_MODEL)
    named = not serve.models or serve.model != defaults["model"]
    if not named:
        _refuse_unused(serve, defaults)
    further = replace(serve, **{**defaults, "served_model_alias": ""})
    models = [*([serve] if named else []), *(replace(further, **entry) for entry in entries)]
    models = _named_apart([described(model) for model in models])
    default = next((model_name(model) for model in models if serve.default_model in model_aliases(model)), "")
    if default:
        models = [replace(model, default_model=default) for model in models]
    _check_together(models, default or serve.default_model, shared_bus=bool(serve.nats))
    return models


def loaded_model(serve: S, name: str, entry: Mapping[str, Any], beside: Sequence[ServeSettings]) -> S:
    """Returns the settings of a model that an order loads under a name. Raises SettingsError.

    `serve`: the settings of the command line. `entry`: as in a file of models, with `model`. `beside`: the models with
    which the launcher was started.
    """
    values = _entry(entry, "settings")
    for setting in AT_START_ONLY:
        if setting in values:
            raise SettingsError(f"settings: {setting.replace('_', '-')!r} can only be given when the server starts")
    if "served_model_name" in values:
        raise SettingsError(f"settings: leave out 'served-model-name': the model is loaded as {name!r}")
    plain = replace(serve, **{**_defaults(serve, (*OF_ONE_MODEL, *_NOT_SHARED)), "served_model_alias": ""})
    model = described(replace(plain, **values, served_model_name=name))
    if model.parallel.nnode > 1:
        raise SettingsError("--nnode: this server is on several machines, and loads no further models")
    _check_together([*(one for one in beside if model_name(one) != name), model], "", shared_bus=True)
    return model


def version_of(first: S, directory: str) -> S:
    """Returns the settings of another version of a model, without those that name the model's files."""
    files = ("revision", "given_model", "tokenizer", "tokenizer_revision", "tokenizer_extension_path", "model_id")
    # Clients may go on to use the path of the first version.
    aliases = [alias for alias in model_aliases(first) if "," not in alias and MODEL_NAME.holds(alias)]
    own = {
        "model": directory,
        "served_model_name": model_name(first),
        "served_model_alias": ",".join(aliases[:MODEL_ALIASES_MAX]),
    }
    return replace(first, **{**dict.fromkeys(files, ""), **own})


def _defaults(serve: ServeSettings, names: Sequence[str]) -> dict[str, Any]:
    return {item.name: item.default for item in flags_of(type(serve)) if item.name in names}


def _named_apart(models: Sequence[S]) -> list[S]:
    """Returns the models, those with names that are the same part of different paths under their whole paths."""
    twice = set(_repeated(map(model_name, models)))
    return [
        replace(model, served_model_name=model.model)
        if (name := model_name(model)) in twice and name not in (model.served_model_name, model.model_id)
        else model
        for model in models
    ]


def _also(word: str) -> dict[str, Any]:
    """Returns the settings of one `--also DIR=NAME`. The last `=` separates, so that DIR may contain `=`."""
    model, _, name = word.rpartition("=")
    if not model or not name:
        raise SettingsError(f"--also: {word!r} is not DIR=NAME, a model's directory or hub name and its served name")
    return {"model": model, "served_model_name": name}


def _of_file(path: Path) -> list[dict[str, Any]]:
    content = _read(path)
    tables: Any = content.get("models")
    if set(content) != {"models"} or not isinstance(tables, list) or not tables:
        raise SettingsError(
            f"--models: {path} must hold a list 'models' and nothing else: in TOML a table [[models]] for each model"
        )
    return [_entry(table, f"--models: {path}, model {number}") for number, table in enumerate(tables, 1)]


def _read(path: Path) -> Mapping[str, Any]:
    import tomllib  # slow to import, and only needed with --models

    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise SettingsError(f"--models: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise SettingsError(f"--models: {path} is not valid {kind}: {error}") from error
    return content if isinstance(content, dict) else {}


def _entry(table: Any, source: str) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise SettingsError(f"{source}: give a table of settings, not {table!r}")
    words: Mapping[str, Any] = table
    values = parse_words(ServeSettings, {name: _word(words[name], f"{source}: {name}") for name in words}, source)
    kinds = (EngineSettings, TokenizerSettings, DetokenizerSettings, VisionSettings)
    allowed = {item.name for kind in kinds for item in flags_of(kind)} - {item.name for item in flags_of(BusSettings)}
    for name in values:
        if name not in allowed | _COUNTS:
            flag = name.replace("_", "-")
            raise SettingsError(f"{source}: {flag!r} is for the whole server: give --{flag} on the command line")
    if not values.get("model"):
        raise SettingsError(f"{source}: 'model' is missing, the model's directory or hub name")
    return values


def _word(value: Any, source: str) -> str:
    """Returns a value of the file as text, as on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        return "\n".join(value)
    if isinstance(value, dict):
        return json.dumps(value)
    if value is None or isinstance(value, str | int | float):
        return "none" if value is None else str(value)
    raise SettingsError(f"{source}: {value!r} is no text, number, truth value, list of texts or table")


def _refuse_unused(serve: ServeSettings, defaults: Mapping[str, Any]) -> None:
    given = values_of(serve)
    for name, default in defaults.items():
        if given[name] != default:
            flag = name.replace("_", "-")
            raise SettingsError(f"--{flag} is about the model of --model, and only --models names models: put it there")


def _check_together(models: Sequence[ServeSettings], default_model: str, *, shared_bus: bool) -> None:
    if len(models) > MODELS_MAX:
        raise SettingsError(f"--also, --models: {len(models)} models are more than {MODELS_MAX}")
    for model in models:
        if not MODEL_NAME.holds(name := model.served_model_name):
            raise SettingsError(f"the served name {name[:64]!r} is not {MODEL_NAME.text}")
    names = [model_name(model) for model in models]
    for name in _repeated([*names, *(alias for model in models for alias in model_aliases(model))]):
        raise SettingsError(f"two models are called {name!r}: give each a served name of its own")
    # On a shared bus another launcher may serve the default model.
    if default_model and default_model not in names and not shared_bus:
        raise SettingsError(f"--default-model: {default_model!r} is not served. Served: {', '.join(map(repr, names))}")


def _repeated(names: Iterable[str]) -> list[str]:
    seen = set[str]()
    return [name for name in names if name in seen or seen.add(name)]
