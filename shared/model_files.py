"""Where a model's files lie and what the model is called: what every service with a model asks."""

from pathlib import Path

from shared.config import ModelSettings, SettingsError

DEMO_DIRECTORY = Path(__file__).resolve().parent.parent / "antiphon" / "demo"
DEMO_NAME = "antiphon-demo"


def model_directory(settings: ModelSettings) -> Path:
    """The model's directory. Raises SettingsError when there is none."""
    return _existing(Path(settings.model) if settings.model else DEMO_DIRECTORY, "--model")


def tokenizer_directory(settings: ModelSettings) -> Path:
    """The tokenizer's directory: the model's unless one is named. Raises SettingsError."""
    return _existing(Path(settings.tokenizer), "--tokenizer") if settings.tokenizer else model_directory(settings)


def model_name(settings: ModelSettings) -> str:
    """What requests call the model: the served name, else its path as given, else the demo's name."""
    return settings.served_model_name or settings.model or DEMO_NAME


def _existing(path: Path, flag: str) -> Path:
    if not path.is_dir():
        raise SettingsError(f"{flag}: there is no directory {path}. Give the path of a model in Hugging Face layout.")
    return path.resolve()
