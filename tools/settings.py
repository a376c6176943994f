"""Files with settings, such as the presets in records/presets, and settings as words."""

from pathlib import Path

PRESETS = Path(__file__).resolve().parent.parent / "records" / "presets"


def read_settings(path: str | Path) -> tuple[dict[str, str], str]:
    """Return the settings in a file, one VARIABLE=value a line, as the trainer reads it, and the tokenizer that a comment names, or
    "". Raises ValueError with the file's name, and OSError."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
        settings = pairs_of([line for line in lines if line and not line.startswith("#")])
    except FileNotFoundError:
        raise ValueError(f"there is no {path}; presets in records/presets: {' '.join(presets())}") from None
    except ValueError as error:
        hint = "; save the file as UTF-8" if isinstance(error, UnicodeError) else ""
        raise ValueError(f"{path}: {error}{hint}") from None
    tokenizers = [line.removeprefix("# tokenizer: ") for line in lines if line.startswith("# tokenizer: ")]
    return settings, tokenizers[-1].strip() if tokenizers else ""


def presets() -> list[str]:
    """Return the names of the presets that name their tokenizer: the others only add to a preset."""
    return sorted(path.stem for path in PRESETS.glob("*.env") if b"# tokenizer: " in path.read_bytes())  # even with a mistake


def pairs_of(words: list[str]) -> dict[str, str]:
    """Return VARIABLE=value words as a dict. Raises ValueError for a word of another form."""
    for word in words:
        if "=" not in word:
            raise ValueError(f"{word!r} is not VARIABLE=value")
    return dict(word.split("=", 1) for word in words)


def words_of(settings: dict[str, object]) -> list[str]:
    """Return settings as VARIABLE=value words."""
    return [f"{name}={value}" for name, value in settings.items()]


if __name__ == "__main__":
    print(f"usage: other scripts import this file. {__doc__}")
