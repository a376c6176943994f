"""The tokenizers: text to ids and back, and the bytes of each id."""

import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import numpy as np

MAX_VOCAB_SIZE = 1 << 16  # a shard stores uint16
PAD, BOS, EOS, UNK = range(4)
FIRST_BYTE = 4  # of every vocabulary made here: four special tokens, then the 256 bytes
SPACE = "\u2581"  # stands for a space in SentencePiece's pieces

# An operator in front of a word, and of the space before it, stands for its capital letters, so that the forms of a word share
# pieces (CaseOps: pull request 1729 of the 16 MB challenge). Their meaning: the first letter; all letters; the next letter.
TITLE, CAPITALS, NEXT = OPERATORS = "\ue001\ue002\ue003"
# In the text itself, these characters and ESCAPE become ESCAPE and two operators. The bytes stay 3: operators count as 0.
ESCAPE = "\ue004"
ESCAPED = dict(zip(OPERATORS + ESCAPE, [ESCAPE + a + b for a in OPERATORS[:2] for b in OPERATORS[:2]]))
ORIGINAL = {escaped: character for character, escaped in ESCAPED.items()}
WITH_ESCAPED = re.compile(f"[{''.join(ESCAPED)}]")
WITH_CAPITAL = re.compile(r" ?(?<![A-Za-z])[a-z]*+[A-Z][A-Za-z]*+")  # a word of ASCII letters
FOLDED = re.compile(f"{'|'.join(ORIGINAL)}|{TITLE} ?[a-z]|{CAPITALS} ?[a-z]+|{NEXT}[a-z]|[{OPERATORS}]")


def fold_word(match: re.Match) -> str:
    """Return a word with a capital letter, and the space before it, in small letters with operators."""
    spaced = match[0]
    word = spaced.lstrip(" ")
    if word[1:] == word[1:].lower():
        return TITLE + spaced.lower()
    if word == word.upper():
        return CAPITALS + spaced.lower()
    return re.sub("[A-Z]", lambda capital: NEXT + capital[0].lower(), spaced)


def fold_case(text: str) -> str:
    """Return a text in lower case with operators. `unfold_case` restores the text exactly."""
    if WITH_ESCAPED.search(text):  # rare; str.translate costs as much as the rest
        text = text.translate(str.maketrans(ESCAPED))
    return WITH_CAPITAL.sub(fold_word, text)


def unfold_case(text: str) -> str:
    """Restore the text that `fold_case` was given. Operators before no letter are dropped."""
    return FOLDED.sub(lambda match: ORIGINAL.get(match[0]) or match[0][1:].upper(), text)


class Tokenizer:
    """Encodes and decodes documents. The ids do not include the BOS token that precedes each document in a shard.

    kind: "byte", "sentencepiece" or "tiktoken"; as in manifest.json.
    spec, file: what was passed to load_tokenizer; its path, of the copy if there is one, or None if it is a name.
    bos: the id that starts a document.
    token_bytes: the UTF-8 bytes of each id; b"" for control and unknown tokens.
    operators: the ids of the operators for capital letters, with their characters; {} if it has none."""

    kind = ""
    spec = ""
    file: Path | None = None
    bos = BOS
    token_bytes: list[bytes] = []
    operators: dict[int, str] = {}

    @property
    def vocab_size(self) -> int:
        return len(self.token_bytes)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each document, integers (N,)."""
        raise NotImplementedError

    def decode(self, ids: np.ndarray) -> bytes:
        """Return the UTF-8 text of a document's ids."""
        return b"".join([self.token_bytes[i] for i in ids.tolist()])

    def count_bytes(self, ids: np.ndarray, decoded: bytes | None = None) -> int:
        """Return the number of bytes that a document's ids decode to, without those that stand for unknown tokens. `decoded` is
        what `decode` returned, if it is known."""
        return int(self.sizes[ids].sum())

    @cached_property
    def sizes(self) -> np.ndarray:
        """The number of bytes of each id, int64 (V,)."""
        return np.array([len(token) for token in self.token_bytes])


def import_sentencepiece():
    """Import sentencepiece. Raises ValueError if it cannot return NumPy arrays yet, and ImportError."""
    import sentencepiece
    found = version("sentencepiece")
    if [int(part) for part in re.findall(r"\d+", found)[:3]] < [0, 2, 2]:
        raise ValueError(f"sentencepiece 0.2.2 or newer is needed, not {found}: pip install -U sentencepiece")
    return sentencepiece


class SentencePieceTokenizer(Tokenizer):
    kind = "sentencepiece"

    def __init__(self, model):
        self.model = model
        self.bos = model.bos_id()
        if self.bos < 0:
            raise ValueError("it has no BOS token, which every document must start with")
        self.unknown = model.unk_id()
        self.unknown_text = model.decode([self.unknown]).encode("utf-8")
        ids = [model.piece_to_id(operator) for operator in OPERATORS]
        # With --tokenizer caseopsN, they are pieces by definition, whose score is 0; else they come from the text.
        self.operators = {} if self.unknown in ids or any(map(model.get_score, ids)) else dict(zip(ids, OPERATORS))
        self.token_bytes = [self.piece_bytes(i) for i in range(model.vocab_size())]

    def piece_bytes(self, i: int) -> bytes:
        model = self.model
        if model.is_control(i) or model.is_unknown(i) or model.is_unused(i) or i in self.operators:
            return b""
        piece = model.id_to_piece(i)
        if model.is_byte(i):
            return bytes.fromhex(piece[3:-1])  # <0x0A>
        return piece.replace(SPACE, " ").encode("utf-8")

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        texts = [fold_case(text) for text in texts] if self.operators else texts
        return self.model.encode(texts, out_type="numpy", num_threads=1)

    def decode(self, ids: np.ndarray) -> bytes:
        text = self.model.decode(ids.tolist())
        return (unfold_case(text) if self.operators else text).encode("utf-8")

    def count_bytes(self, ids: np.ndarray, decoded: bytes | None = None) -> int:
        unknown = int(np.count_nonzero(ids == self.unknown))
        text = self.decode(ids) if decoded is None else decoded
        return len(text) - unknown * len(self.unknown_text)


class TiktokenTokenizer(Tokenizer):
    kind = "tiktoken"

    def __init__(self, encoding):
        self.encoding = encoding
        self.bos = encoding.eot_token
        self.token_bytes = [b""] * encoding.n_vocab  # special tokens and gaps stay empty
        for token in encoding.token_byte_values():
            self.token_bytes[encoding.encode_single_token(token)] = token

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return [self.encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]


class ByteTokenizer(Tokenizer):
    kind = "byte"
    token_bytes = [b""] * FIRST_BYTE + [bytes([byte]) for byte in range(256)]

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16) + FIRST_BYTE for text in texts]


def load_tokenizer(spec: str, folder: Path | None = None) -> Tokenizer:
    """Load a SentencePiece .model, "byte260", or a tiktoken encoding by its name.

    With a folder, a .model is copied there as tokenizer.model, which is the tokenizer's `file`.
    Raises ValueError if it cannot be loaded or has more than 65,536 tokens."""
    try:
        if spec.endswith(".model"):
            sentencepiece = import_sentencepiece()
            tokenizer = SentencePieceTokenizer(sentencepiece.SentencePieceProcessor(model_file=spec))
        elif spec == "byte260":
            tokenizer = ByteTokenizer()
        else:
            import tiktoken
            if spec not in tiktoken.list_encoding_names():
                raise ValueError("there is no such name")
            tokenizer = TiktokenTokenizer(tiktoken.get_encoding(spec))
    except Exception as error:  # the libraries raise many types for missing packages and damaged files
        raise ValueError(f"tokenizer {spec!r} cannot be used: {error}; it must be a SentencePiece .model, byte260, gpt2 "
                         "or, in prepare.py, one to learn: spN, unigramN, caseopsN or char") from None
    if tokenizer.vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(f"tokenizer {spec!r} has {tokenizer.vocab_size} tokens; use one with at most {MAX_VOCAB_SIZE}")
    tokenizer.spec = spec
    if spec.endswith(".model"):
        tokenizer.file = folder / "tokenizer.model" if folder else Path(spec)
        if folder:
            shutil.copyfile(spec, tokenizer.file)
    return tokenizer


# ---- Encoding in processes ----------------------------------------------------------------------


def encode_batch(tokenizer: Tokenizer, batch: list[tuple[str, bytes]]) -> dict[str, tuple[np.ndarray, Counter]]:
    """Encode documents, given as their split, "train" or "val", and their UTF-8 text. Return the tokens of each split, uint16
    (N,), with BOS before each document, and counts: documents, bytes and, of "val", decoded_bytes and changed_documents.

    Raises ValueError if a tokenizer other than SentencePiece, which may normalise, changes the validation text."""
    bos = np.array([tokenizer.bos])
    tokens = {"train": [], "val": []}
    counts = {"train": Counter(), "val": Counter()}
    texts = [raw.decode("utf-8") for _, raw in batch]
    for (split, raw), text, ids in zip(batch, texts, tokenizer.encode(texts)):
        tokens[split] += [bos, ids]
        counts[split].update(documents=1, bytes=len(raw))
        if split == "val":
            decoded = tokenizer.decode(ids)
            if decoded != raw and tokenizer.kind != "sentencepiece":
                raise ValueError(f"{tokenizer.spec} does not decode to the text that it encoded: {text[:60]!r}")
            counts[split].update(decoded_bytes=tokenizer.count_bytes(ids, decoded), changed_documents=int(decoded != raw))
    return {split: (np.concatenate(parts, dtype=np.uint16, casting="unsafe"), counts[split])
            for split, parts in tokens.items() if parts}


def end_with_parent() -> None:
    """End this process when the one that started it has ended in any way, even by kill -9."""
    multiprocessing.parent_process().join()
    os._exit(1)


def start_process(tokenizer: Tokenizer) -> None:
    """Prepare a process that encodes. Ctrl-C is for the one that started it, which ends this one by SIGTERM, if need be."""
    global process_tokenizer
    process_tokenizer = tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=end_with_parent, daemon=True).start()


def encode_here(batch: list[tuple[str, bytes]]) -> dict[str, tuple[np.ndarray, Counter]]:
    return encode_batch(process_tokenizer, batch)


def encode_in_order(tokenizer: Tokenizer, batches: Iterator[tuple[object, list]], processes: int) -> Iterator[tuple[object, dict]]:
    """Yield the mark of each batch, with what encode_batch returns, in the order of the batches. Two batches for each process are
    read in advance. Raises ValueError as encode_batch does, and if a process dies."""
    if processes == 1:
        for mark, batch in batches:
            yield mark, encode_batch(tokenizer, batch)
        return
    # A forked process has the tokenizer at once. It runs none of the libraries whose threads and locks it may have inherited.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(processes, context, start_process, (tokenizer,))
    waiting = deque()
    try:
        for mark, batch in batches:
            waiting.append((mark, pool.submit(encode_here, batch)))
            if len(waiting) > 2 * processes:
                yield waiting[0][0], waiting[0][1].result()
                waiting.popleft()
        while waiting:
            yield waiting[0][0], waiting[0][1].result()
            waiting.popleft()
    except BrokenProcessPool:
        raise ValueError("a process that encodes was killed, perhaps because memory ran out; taskset -c 0 COMMAND needs "
                         "the least") from None
    finally:
        pool.shutdown(cancel_futures=True)
        waiting.clear()  # An exception would hold its future, which holds it, and so the progress bar would end too late.
