"""The shard format, tokenizers, manifests and the trainer's check: what the scripts in this folder share."""

import hashlib
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parent.parent
PREPARE = "data/prepare.py 2"  # made_by in manifest.json
CONVERT = "data/convert.py 2"

SHARD_MAGIC = 20240520
SHARD_VERSION = 1
HEADER_BYTES = 1024
MAX_SHARD_TOKENS = 2**31 - 1  # the header stores the count as int32
SHARD_TOKENS = 100_000_000
MAX_VOCAB_SIZE = 1 << 16  # a shard stores uint16
BLOCK_TOKENS = 1 << 22  # read from a shard at a time

PAD, BOS, EOS, UNK = range(4)
FIRST_BYTE = 4  # of every vocabulary made here: four special tokens, then the 256 bytes
FIRST_CHAR = FIRST_BYTE + 256
BYTE_TOKENS = [b""] * FIRST_BYTE + [bytes([byte]) for byte in range(256)]
SPACE = "\u2581"  # stands for a space in SentencePiece's pieces


# ---- Shards ---------------------------------------------------------------------------------------


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_shard(path: Path) -> np.ndarray:
    """Return a shard's tokens as a memory map, uint16 (N,), N > 0.

    Raises ValueError if the file is not a shard or is damaged."""
    header = np.fromfile(path, dtype="<i4", count=3).tolist()
    if len(header) < 3 or header[:2] != [SHARD_MAGIC, SHARD_VERSION]:
        raise ValueError(f"{path} is not a token shard: it starts with the integers {header[:2]}, "
                         f"not with {[SHARD_MAGIC, SHARD_VERSION]}")
    count = header[2]
    size = path.stat().st_size
    if count < 1 or size != HEADER_BYTES + 2 * count:
        raise ValueError(f"{path} is damaged: its header announces {count} tokens, but it has {size} bytes")
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES)


def split_documents(arrays: list[np.ndarray], bos: int) -> Iterator[np.ndarray]:
    """Yield the tokens from each BOS to the next, uint16 (N,), N > 0. A document may continue in the next
    array. Tokens before the first BOS come first; without a BOS all tokens are one document."""
    parts = []
    for array in arrays:
        for start in range(0, len(array), BLOCK_TOKENS):
            block = array[start:start + BLOCK_TOKENS].astype(np.uint16)
            first, *others = np.split(block, np.flatnonzero(block == bos))
            parts.append(first)
            for document in others:
                if any(map(len, parts)):
                    yield np.concatenate(parts)
                parts = [document]
    if parts:
        yield np.concatenate(parts)


class ShardWriter:
    """Writes tokens to STEM_000000.bin, STEM_000001.bin, ... with `shard_tokens` tokens in each but the last.

    After close(), `shards` lists the file name, tokens and sha256 of each shard."""

    def __init__(self, folder: Path, stem: str, shard_tokens: int):
        self.folder = folder
        self.stem = stem
        self.shard_tokens = shard_tokens
        self.shards: list[dict] = []
        self.file = None
        self.count = 0  # tokens in the open file

    def write(self, tokens: np.ndarray) -> None:
        """Append tokens, uint16 (N,)."""
        while len(tokens):
            if self.file is None:
                path = self.folder / f"{self.stem}_{len(self.shards):06d}.bin"
                self.file = path.open("wb")
                self.file.write(bytes(HEADER_BYTES))
                self.count = 0
            room = self.shard_tokens - self.count
            part = np.ascontiguousarray(tokens[:room], dtype="<u2")
            self.file.write(part.data)
            self.count += len(part)
            tokens = tokens[room:]
            if self.count == self.shard_tokens:
                self.close()

    def close(self) -> None:
        """Complete the header of the last shard."""
        if self.file is None:
            return
        header = np.array([SHARD_MAGIC, SHARD_VERSION, self.count], dtype="<i4")
        self.file.seek(0)
        self.file.write(header.tobytes())
        self.file.close()
        path = Path(self.file.name)
        self.shards.append({"file": path.name, "tokens": self.count, "sha256": sha256_of(path)})
        self.file = None


# ---- Tokenizers -----------------------------------------------------------------------------------


class Tokenizer:
    """Encodes and decodes documents. Their ids are without the BOS token that a shard has in front of each.

    kind: "byte", "char", "table", "sentencepiece" or "tiktoken"; as in manifest.json.
    spec, file: what was passed to load_tokenizer; the same as a path, or None if it is a name.
    bos: the id that starts a document, or -1.
    unknown: the id of text that has no token, or -1.
    token_bytes: the UTF-8 bytes of each id; b"" for control and unknown tokens.
    prefix: b" " if the tokenizer puts a space, which is not part of the text, in front of each document."""

    kind = ""
    spec = ""
    file: Path | None = None
    bos = BOS
    unknown = -1
    token_bytes: list[bytes] = []
    prefix = b""

    @property
    def vocab_size(self) -> int:
        return len(self.token_bytes)

    def encode(self, texts: list[str], threads: int) -> list[np.ndarray]:
        """Return the ids of each document, integers (N,)."""
        raise NotImplementedError

    def decode(self, ids: np.ndarray) -> bytes:
        """Return the UTF-8 text of a document's ids."""
        return b"".join([self.token_bytes[i] for i in ids.tolist()])

    def count_bytes(self, ids: np.ndarray, decoded: bytes) -> int:
        """Return the number of bytes of a decoded document, without those that stand for unknown tokens."""
        return len(decoded)


def byte_ids(text: str) -> np.ndarray:
    """Return the ids of a text's UTF-8 bytes, uint16 (N,)."""
    return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16) + FIRST_BYTE


class SentencePieceTokenizer(Tokenizer):
    kind = "sentencepiece"

    def __init__(self, path: str):
        import sentencepiece
        self.model = model = sentencepiece.SentencePieceProcessor(model_file=path)
        self.bos = model.bos_id()
        if self.bos < 0:
            raise ValueError("it has no BOS token, which every document must start with")
        self.unknown = model.unk_id()
        self.unknown_text = model.decode([self.unknown]).encode("utf-8")
        self.token_bytes = [self.piece_bytes(i) for i in range(model.vocab_size())]
        if model.encode("a", out_type=str)[0].startswith(SPACE):
            self.prefix = b" "

    def piece_bytes(self, i: int) -> bytes:
        model = self.model
        if model.is_control(i) or model.is_unknown(i) or model.is_unused(i):
            return b""
        piece = model.id_to_piece(i)
        if model.is_byte(i):
            return bytes.fromhex(piece[3:-1])  # <0x0A>
        return piece.replace(SPACE, " ").encode("utf-8")

    def encode(self, texts: list[str], threads: int) -> list[np.ndarray]:
        return self.model.encode(texts, out_type="numpy", num_threads=threads)

    def decode(self, ids: np.ndarray) -> bytes:
        return self.model.decode(ids.tolist()).encode("utf-8")

    def count_bytes(self, ids: np.ndarray, decoded: bytes) -> int:
        unknown = int(np.count_nonzero(ids == self.unknown))
        return len(decoded) - unknown * len(self.unknown_text)


class TiktokenTokenizer(Tokenizer):
    kind = "tiktoken"

    def __init__(self, name: str):
        import tiktoken
        self.encoding = tiktoken.get_encoding(name)
        self.bos = self.encoding.eot_token
        self.token_bytes = [b""] * self.encoding.n_vocab  # special tokens and gaps stay empty
        for token in self.encoding.token_byte_values():
            self.token_bytes[self.encoding.encode_single_token(token)] = token

    def encode(self, texts: list[str], threads: int) -> list[np.ndarray]:
        encoded = self.encoding.encode_ordinary_batch(texts, num_threads=threads)
        return [np.array(ids, dtype=np.uint16) for ids in encoded]

    def decode(self, ids: np.ndarray) -> bytes:
        return self.encoding.decode_bytes(ids.tolist())


class ByteTokenizer(Tokenizer):
    kind = "byte"
    token_bytes = BYTE_TOKENS

    def encode(self, texts: list[str], threads: int) -> list[np.ndarray]:
        return [byte_ids(text) for text in texts]


class TableTokenizer(Tokenizer):
    """A .json file with the bytes of each token.

    Kind "char" encodes characters, as bytes those that it does not have. Kind "table" only decodes."""

    def __init__(self, path: str):
        table = json.loads(Path(path).read_text(encoding="utf-8"))
        self.bos = table["bos"]
        self.token_bytes = [token.encode("latin-1") for token in table["tokens"]]
        is_char = table["kind"] == "char" and self.token_bytes[:FIRST_CHAR] == BYTE_TOKENS
        self.kind = "char" if is_char else "table"
        if is_char:
            chars = [ord(token.decode("utf-8")) for token in self.token_bytes[FIRST_CHAR:]]
            self.ids = np.zeros(sys.maxunicode + 1, dtype=np.uint16)  # of each code point; 0: none
            self.ids[chars] = np.arange(FIRST_CHAR, self.vocab_size)

    def encode(self, texts: list[str], threads: int) -> list[np.ndarray]:
        return [self.char_ids(text) for text in texts]

    def char_ids(self, text: str) -> np.ndarray:
        """Return the ids of a text's characters and, where there are none, of their bytes, uint16 (N,)."""
        ids = self.ids[np.frombuffer(text.encode("utf-32-le"), dtype="<u4")]
        parts = []
        start = 0
        for at in np.flatnonzero(ids == 0):
            parts += [ids[start:at], byte_ids(text[at])]
            start = at + 1
        return np.concatenate([*parts, ids[start:]])


def load_tokenizer(spec: str, folder: Path | None = None) -> Tokenizer:
    """Load a SentencePiece .model, a vocabulary .json, "byte260", or a tiktoken encoding by its name.

    With a folder, a file is copied there as tokenizer.model or .json, which is the tokenizer's `file`.
    Raises ValueError if it cannot be loaded or has more than 65,536 tokens."""
    is_file = spec.endswith((".model", ".json"))
    try:
        if spec.endswith(".model"):
            tokenizer = SentencePieceTokenizer(spec)
        elif spec.endswith(".json"):
            tokenizer = TableTokenizer(spec)
        elif spec == "byte260":
            tokenizer = ByteTokenizer()
        else:
            tokenizer = TiktokenTokenizer(spec)
    except Exception as error:  # the libraries raise many types for missing packages and damaged files
        raise ValueError(f"--tokenizer {spec!r} cannot be used: {error!r}; it must be a SentencePiece "
                         f".model, a vocabulary .json, byte260, or gpt2") from None
    if tokenizer.vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(f"--tokenizer {spec!r} has {tokenizer.vocab_size} tokens, but shards store uint16: "
                         f"use one with at most {MAX_VOCAB_SIZE}")
    tokenizer.spec = spec
    tokenizer.file = Path(spec) if is_file else None
    if is_file and folder:
        tokenizer.file = folder / f"tokenizer{Path(spec).suffix}"
        shutil.copyfile(spec, tokenizer.file)
    return tokenizer


def write_vocabulary(path: Path, kind: str, bos: int, tokens: list[bytes]) -> None:
    """Write a .json with the bytes of each token; `bos` is -1 if there is none."""
    table = {"kind": kind, "bos": bos, "tokens": [token.decode("latin-1") for token in tokens]}
    path.write_text(json.dumps(table) + "\n", encoding="utf-8")


# ---- Data sets ------------------------------------------------------------------------------------


def write_dataset(fill: Callable, options) -> None:
    """Create the folder options.out by fill(folder, options) and print the summary that it returns.

    The folder is hidden until it is complete. Raises ValueError if options.out is not new or empty."""
    out = Path(options.out).resolve()
    if out.is_mount() or (out.exists() and any(out.iterdir())):
        raise ValueError(f"--out {options.out!r} is not empty: delete it or choose another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as parent:
        folder = Path(parent, out.name)
        folder.mkdir()
        summary = fill(folder, options)
        if out.exists():
            out.rmdir()
        os.replace(folder, out)
    print(summary)


def finish(folder: Path, out: str, origin: dict, tokenizer: Tokenizer, splits: dict) -> str:
    """Write manifest.json and check the data set with the trainer; return a summary with the next command.

    `origin` has the manifest's made_by, sources and split. `splits` has documents, tokens, bytes and shards
    of "train" and "val", and for "val" decoded_bytes and changed_documents. Raises ValueError if the trainer
    refuses the data set."""
    val = splits["val"]
    if not val["decoded_bytes"]:
        raise ValueError("the validation tokens decode to no text, so there would be no score per byte")
    val["original_per_decoded_byte"] = val["bytes"] / val["decoded_bytes"]
    manifest = {
        "made_by": origin["made_by"],
        "name": folder.name,
        "sources": [Path(source).name for source in origin["sources"]],
        "split": origin["split"],
        "tokenizer": {
            "kind": tokenizer.kind,
            "name": tokenizer.file.name if tokenizer.file else tokenizer.spec,
            "vocab_size": tokenizer.vocab_size,
            "sha256": sha256_of(tokenizer.file) if tokenizer.file else None,
            "changes_text": bool(val["changed_documents"]),
        },
        "splits": splits,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    check_with_trainer(folder, tokenizer, has_training=bool(splits["train"]["documents"]))
    return summarize(out.rstrip("/"), tokenizer, splits)


def check_with_trainer(folder: Path, tokenizer: Tokenizer, has_training: bool) -> None:
    """Load the data set with train_gpt.py. Raises ValueError if a shard or an id is invalid, or if the bytes
    that it counts in the validation split are not the decoded_bytes in manifest.json."""
    if str(REPOSITORY) not in sys.path:
        sys.path.append(str(REPOSITORY))
    import train_gpt  # needs torch, which nothing else here does
    config = train_gpt.Config(data_path=str(folder), tokenizer_path=str(tokenizer.file or tokenizer.spec),
                              vocab_size=tokenizer.vocab_size, train_seq_len=1)
    try:
        train_gpt.load_validation(config)
        for path in train_gpt.find_shards(config, "train") if has_training else ():
            train_gpt.check_ids(train_gpt.open_shard(path), tokenizer.vocab_size, path)
    except ValueError as error:
        raise ValueError(f"train_gpt.py cannot use this data set: {error}") from None


def summarize(out: str, tokenizer: Tokenizer, splits: dict) -> str:
    """Return lines with the counts of each split and the next command for the data set in `out`."""
    lines = []
    for part, counts in splits.items():
        if counts["documents"]:
            per_token = counts["bytes"] / counts["tokens"]
            lines.append(f"{part}: {counts['documents']:,} documents, {counts['bytes']:,} bytes, "
                         f"{counts['tokens']:,} tokens, {per_token:.3f} bytes per token, "
                         f"{len(counts['shards'])} shards")
    if dropped := splits["train"].get("dropped_documents"):
        lines.append(f"{dropped:,} training documents were left out: they are also validation documents")
    val = splits["val"]
    if val["changed_documents"]:
        lines.append(f"The tokenizer changes {val['changed_documents']:,} of the {val['documents']:,} "
                     f"validation documents. The split's {val['bytes']:,} bytes become "
                     f"{val['decoded_bytes']:,}. Divide val_bpb by {val['original_per_decoded_byte']:.6f} "
                     f"to get bits per original byte.")
    here = Path.cwd() == REPOSITORY  # where run.sh reads paths from
    place = out if here else str(Path(out).resolve())
    path = f"{place}/{tokenizer.file.name}" if tokenizer.file else tokenizer.spec
    settings = [f"DATA_PATH={place}", f"TOKENIZER_PATH={path}", f"VOCAB_SIZE={tokenizer.vocab_size}"]
    if splits["train"]["documents"]:  # run.sh sets what suits the machine
        command = ["./run.sh" if here else os.path.relpath(REPOSITORY / "run.sh"), *settings]
    else:
        script = "train_gpt.py" if here else os.path.relpath(REPOSITORY / "train_gpt.py")
        command = ["python", script, *settings, "ITERATIONS=0", "INIT_FROM=final_model.int8.ptz"]
    lines.append("next: " + shlex.join(command))
    return "\n".join(lines)
