"""The tokenizer of a model of train_gpt.py for transformers. It encodes and decodes as tokenization.py beside it does."""

import hashlib
import json
import shutil
from itertools import groupby
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizer

from .tokenization import load_tokenizer


class TrainGPTTokenizer(PreTrainedTokenizer):
    """Puts the boundary token in front of each text, as the trainer's shards do. It is also the end-of-text token.

    vocab_file: a SentencePiece .model; tokenizer: else the name, "byte260" or tiktoken's.
    "<s>" in a text is plain text. Raises ValueError if the tokenizer is not the one that config.json beside it names."""

    vocab_files_names = {"vocab_file": "tokenizer.model"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file: str | None = None, tokenizer: str = "", **kwargs):
        self.file = vocab_file
        spec = self.file or tokenizer
        self.text = load_tokenizer(spec)
        config = Path(self.file).with_name("config.json") if self.file else Path(kwargs.get("name_or_path", ""), "config.json")
        if config.is_file():
            wanted = json.loads(config.read_text(encoding="utf-8"))["variables"].get("TOKENIZER_SHA256", "")
            content = Path(self.file).read_bytes() if self.file else spec.encode()
            if wanted not in ("", hashlib.sha256(content).hexdigest()):
                raise ValueError(f"{spec} is not the tokenizer that {config} names: the text would be wrong")
        # Names of tokens must differ, and texts of tokens need not: the ids come first.
        self.names = [f"{i}:{data.decode('utf-8', 'backslashreplace')}" for i, data in enumerate(self.text.token_bytes)]
        silent = [i for i, data in enumerate(self.text.token_bytes) if not data and i != self.text.bos]
        self.names[self.text.bos] = boundary = "<s>"
        if silent:
            self.names[silent[0]] = "<pad>"
        self.ids = {name: i for i, name in enumerate(self.names)}
        defaults = {"bos_token": boundary, "eos_token": boundary, "pad_token": "<pad>" if silent else boundary,
                    "special_tokens_pattern": "bos", "split_special_tokens": True,
                    "clean_up_tokenization_spaces": False, "padding_side": "left"}
        super().__init__(tokenizer=tokenizer, **{**defaults, **kwargs})

    def _add_tokens(self, new_tokens, special_tokens: bool = False) -> int:
        """Raises ValueError for a token that is not in the vocabulary: it would get another token's number."""
        if unknown := [str(token) for token in new_tokens if str(token) not in self.ids]:
            raise ValueError(f"{', '.join(unknown)} cannot be added: the vocabulary of this model is fixed")
        return super()._add_tokens(new_tokens, special_tokens=special_tokens)

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size

    def get_vocab(self) -> dict[str, int]:
        return dict(self.ids)

    def _tokenize(self, text: str, **kwargs) -> list[str]:
        return [self.names[i] for i in self.text.encode([text])[0].tolist()]

    def _convert_token_to_id(self, token: str) -> int | None:
        return self.ids.get(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self.names[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Return the text of tokens. Bytes that are not UTF-8 become U+FFFD; special tokens keep their names."""
        parts = []
        for is_special, run in groupby(tokens, lambda token: token in self.all_special_tokens):
            ids = np.array([self.ids[token] for token in run])
            parts += [self.names[i] for i in ids] if is_special else [self.text.decode(ids).decode("utf-8", "replace")]
        return "".join(parts)

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        if not self.file:
            return ()
        path = Path(save_directory, (f"{filename_prefix}-" if filename_prefix else "") + Path(self.file).name)
        if path.resolve() != Path(self.file).resolve():
            shutil.copyfile(self.file, path)
        return (str(path),)
