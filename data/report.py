"""Show what is in a folder of token shards: counts, lengths, duplicates, vocabulary, samples, and damage.

    python data/report.py data/datasets/sotu_sp1024
    python data/report.py data/datasets/fineweb --tokenizer fineweb_1024_bpe.model --samples 10
    python data/report.py data/datasets/mine --text mine.txt --picture mine.png

DATASET is a folder of NAME_train_*.bin and NAME_val_*.bin. A manifest.json is not needed; the numbers of
one that data/prepare.py made are compared with the shards. The exit status is 1 if the page has problems:
damaged shards, differences from the manifest, ids beyond the vocabulary, documents shared by train and val.
"""

import argparse
import hashlib
import json
import sys
import textwrap
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from prepare import FIRST_BYTE, FIRST_CHAR, HEADER_BYTES, MAKERS, SHARD_MAGIC, SHARD_VERSION, Progress, Tokenizer

CHUNK = 1 << 20  # tokens read at a time
IDS = 1 << 16  # of uint16: a shard may hold ids that the vocabulary does not have
BAR_BYTES = 100 << 20  # a smaller set is read before one could look at a progress bar
SAMPLE_CHARS, HEAD_CHARS, LINE_CHARS, LISTED = 300, 60, 116, 8

# ---- Tokenizer and manifest -----------------------------------------------------------------------


class Vocabulary:
    """The text of each id. It is looked up, not decoded: decoders fail on ids that no text has.

    `texts`: IDS times bytes, b"" for control and unknown tokens and for ids beyond the vocabulary.
    `lengths`: how many bytes, int64 (2, IDS); row 1 is for a token right behind BOS, where the space that
    SentencePiece's dummy prefix adds is no text. `fallback`: bool (IDS,), the bytes that stand in for
    characters without a token. `unknown`: the id of characters that could not be written, or None."""

    def __init__(self, tokenizer: Tokenizer):
        self.spec, self.kind, self.size, self.bos = tokenizer.spec, tokenizer.kind, tokenizer.vocab_size, tokenizer.bos
        self.fallback, self.unknown, self.prefix, ids = np.zeros(IDS, dtype=bool), None, b"", range(self.size)
        if self.kind == "sentencepiece":
            model, self.unknown = tokenizer.model, tokenizer.unknown
            silent = [model.is_control(i) or model.is_unknown(i) or model.is_unused(i) for i in ids]
            pieces = ["" if silent[i] else model.id_to_piece(i).replace("\u2581", " ") for i in ids]
            self.fallback[:self.size] = [model.is_byte(i) for i in ids]
            texts = [bytes.fromhex(pieces[i][3:-1]) if self.fallback[i] else pieces[i].encode() for i in ids]  # <0x0A>
            self.prefix = b" " if model.encode("a", out_type=str)[0].startswith("\u2581") else b""
        elif self.kind == "tiktoken":
            known = {tokenizer.encoding.encode_single_token(t): t for t in tokenizer.encoding.token_byte_values()}
            texts = [known.get(i, b"") for i in ids]
        else:
            texts, self.fallback[FIRST_BYTE:FIRST_CHAR] = tokenizer.tokens, self.kind == "char"
        self.texts = texts + [b""] * (IDS - self.size)
        self.lengths = np.array([[len(text) for text in self.texts],
                                 [len(text.removeprefix(self.prefix)) for text in self.texts]])

    def count_bytes(self, counts: np.ndarray) -> int:
        """Bytes of text, given how often each id occurs, (2, IDS) as Split.counts."""
        return int((counts * self.lengths).sum())

    def name(self, i: int) -> str:
        """An id as quoted text, as #ID if it has none, or in hexadecimal if its bytes are no characters."""
        text = self.texts[i].decode("utf-8", "replace")
        whole = not self.fallback[i] and "\ufffd" not in text
        return f"#{i}" if not text else repr(text) if whole else f"0x{self.texts[i].hex().upper()}"


def look(tree, *keys: str):
    """What lies behind the keys in parsed JSON of any shape, or None."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def find_vocabulary(folder: Path, given: str | None, manifest) -> Vocabulary:
    """That of the tokenizer that is given, or lies in the folder, or is named by the manifest; ValueError if there is
    none or it cannot be used."""
    wanted = "name one with --tokenizer: a .model or .json file, byte260, or gpt2"
    files = [str(path) for path in (folder / "tokenizer.model", folder / "tokenizer.json") if path.is_file()]
    name = look(manifest, "tokenizer", "name")
    named = isinstance(name, str) and not name.endswith((".model", ".json"))  # else it is of a file, but not there
    if not (given or files or named):
        raise ValueError(f"{folder} has no tokenizer.model or tokenizer.json, and no manifest.json that names byte260 "
                         f"or gpt2; {wanted}")
    spec = given or (files or [name])[0]
    try:
        return Vocabulary(Tokenizer(spec))
    except (ImportError, OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"the tokenizer {spec!r} cannot be used: {error!r}; {wanted}") from None


# ---- Shards ---------------------------------------------------------------------------------------


@dataclass
class Split:
    """What was counted in the tokens of one split. A document reaches from its BOS to the next one."""

    shards: list[np.ndarray]  # memory maps, uint16
    counts: np.ndarray  # int64 (2, IDS): how often an id occurs; row 1 right behind BOS, row 0 elsewhere
    starts: np.ndarray  # int64 (D,): the tokens before each document
    lengths: np.ndarray  # int64 (D,): its tokens, BOS included
    digests: np.ndarray  # uint64 (D,): the hash of its tokens
    has_bos: bool  # without any, all tokens are one document


def open_shard(path: Path) -> np.ndarray:
    """A shard's tokens as a uint16 memory map; ValueError if it is none, or damaged, or empty."""
    header, size = np.fromfile(path, dtype="<i4", count=HEADER_BYTES // 4), path.stat().st_size
    if header[:2].tolist() != [SHARD_MAGIC, SHARD_VERSION]:
        raise ValueError(f"it starts with the integers {header[:2].tolist()}, not {SHARD_MAGIC}, {SHARD_VERSION}")
    count = int(header[2]) if len(header) * 4 == HEADER_BYTES else 0
    if not size == HEADER_BYTES + 2 * count > HEADER_BYTES:
        raise ValueError(f"it has {size} bytes and a header that promises {count} tokens")
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES)


def open_shards(folder: Path, part: str, manifest, problems: list[str]) -> dict[str, np.ndarray]:
    """The readable shards of train or val by file name, in the order of names; problems are added to the list."""
    entries = look(manifest, "splits", part, "shards")
    entries = entries if isinstance(entries, list) else []
    digests = {str(look(entry, "file")): look(entry, "sha256") for entry in entries}
    sizes = {str(look(entry, "file")): look(entry, "tokens") for entry in entries}
    paths = {path.name: path for path in sorted(folder.glob(f"*_{part}_[0-9]*.bin"))}
    problems += [f"{name} is listed in manifest.json, but is not there" for name in digests if name not in paths]
    sets, shards = sorted({name.rsplit(f"_{part}_", 1)[0] for name in paths}), {}
    if len(sets) > 1:
        problems.append(f"the {part} shards are of several data sets: {', '.join(sets)}")
    for name, path in paths.items():
        try:
            shards[name] = open_shard(path)
            with path.open("rb") as file:
                if digests.get(name) and hashlib.file_digest(file, "sha256").hexdigest() != digests[name]:
                    problems.append(f"{name} does not have the sha256 of manifest.json")
            if name in sizes and sizes[name] not in (None, len(shards[name])):
                problems.append(f"{name} has {len(shards[name]):,} tokens, but manifest.json says {sizes[name]!r}")
        except (OSError, ValueError) as error:
            problems.append(f"{name} is damaged and left out: {error}")
    return shards


def spans(shards: list[np.ndarray], start: int, end: int) -> Iterator[np.ndarray]:
    """Tokens `start` to `end` of the shards in a row, as uint16 arrays of at most CHUNK."""
    for shard in shards:
        for at in range(max(start, 0), min(end, len(shard)), CHUNK):
            yield np.array(shard[at:min(at + CHUNK, end)])
        start, end = start - len(shard), end - len(shard)


def count_ids(tokens: np.ndarray, bos: int, behind_bos: bool) -> np.ndarray:
    """Occurrences of each id, int64 (2, IDS) as Split.counts; `behind_bos`: BOS came right before these tokens."""
    behind = np.append(behind_bos, tokens[:-1] == bos)
    return np.bincount(tokens + IDS * behind, minlength=2 * IDS).reshape(2, IDS)


def scan(shards: dict[str, np.ndarray], vocabulary: Vocabulary, problems: list[str], progress) -> Split:
    """Counts the tokens of a split and finds its documents, which may straddle shards; without any BOS it is one.
    `progress(n)` is told of n more bytes read."""
    counts, starts, digests = np.zeros((2, IDS), dtype=np.int64), [], bytearray()
    position, behind_bos, document = 0, False, hashlib.blake2b(digest_size=8)
    for name, shard in shards.items():
        known = counts[:, vocabulary.size:].sum()
        for tokens in spans([shard], 0, len(shard)):
            found, raw = np.flatnonzero(tokens == vocabulary.bos), memoryview(tokens.tobytes())
            counts += count_ids(tokens, vocabulary.bos, behind_bos)
            behind_bos = bool(tokens[-1] == vocabulary.bos)
            starts.append(position + found)
            edges = [*(2 * found).tolist(), len(raw)]
            document.update(raw[:edges[0]])
            for start, end in pairwise(edges):
                digests += document.digest()
                document = hashlib.blake2b(raw[start:end], digest_size=8)
            position += len(tokens)
            progress(len(raw))
        if beyond := counts[:, vocabulary.size:].sum() - known:
            problems.append(f"{name} has {beyond:,} tokens beyond the vocabulary of {vocabulary.size:,}")
    starts, digests = np.concatenate(starts), np.frombuffer(digests + document.digest(), dtype=np.uint64)
    if has_bos := len(starts) > 0:
        digests = digests[1:]  # the first one is of what comes before the first BOS
    else:
        starts = np.array([0])
    return Split(list(shards.values()), counts, starts, np.diff(starts, append=position), digests, has_bos)


def find_repeats(split: Split) -> tuple[int, int, int]:
    """How many documents occur more than once; their further copies; the tokens of these."""
    order = np.argsort(split.digests, kind="stable")
    ordered = split.digests[order]
    copies = order[1:][ordered[1:] == ordered[:-1]]
    return len(np.unique(split.digests[copies])), len(copies), int(split.lengths[copies].sum())


def check(splits: dict[str, Split], vocabulary: Vocabulary, manifest, problems: list[str]) -> None:
    """Adds a problem for each number that prepare.py's `manifest`, if it is not None, has otherwise or does not have;
    and one if documents of val are also in train."""
    for part, split in splits.items() if manifest else ():
        found = {"documents": len(split.starts), "tokens": int(split.counts.sum())}
        if part == "val" or vocabulary.kind != "sentencepiece":  # it may change text: train's bytes are the original's
            found["decoded_bytes" if part == "val" else "bytes"] = vocabulary.count_bytes(split.counts)
        said = {key: look(manifest, "splits", part, key) for key in found}
        problems += [f"{part} has {value:,} {key}, but manifest.json says {said[key]!r}"
                     for key, value in found.items() if said[key] != value]
    tokenizer, digest = look(manifest, "tokenizer"), None
    if manifest and Path(vocabulary.spec).is_file():
        digest = hashlib.sha256(Path(vocabulary.spec).read_bytes()).hexdigest()
    for key, value in (("vocab_size", vocabulary.size), ("sha256", digest)) if manifest else ():
        if look(tokenizer, key) != value:
            problems.append(f"the tokenizer's {key} is {value}, but manifest.json says {look(tokenizer, key)!r}")
    if len(splits) == 2:
        val, known = splits["val"], np.sort(splits["train"].digests)
        places = np.searchsorted(known, val.digests).clip(max=len(known) - 1)
        shared = np.flatnonzero(known[places] == val.digests)
        if len(shared):
            problems.append(f"{len(shared):,} of the {len(val.starts):,} val documents are also in train, with "
                            f"{val.lengths[shared].sum():,} tokens: scores are too good; the first of them is "
                            f"{describe(val, shared[0], vocabulary, HEAD_CHARS)[1]}")


# ---- The page -------------------------------------------------------------------------------------


def facts(part: str, split: Split, vocabulary: Vocabulary, manifest) -> dict[str, str]:
    """A column of the table: what is said of one split, by the name of the row."""
    tokens, size, by_id = int(split.counts.sum()), vocabulary.count_bytes(split.counts), split.counts.sum(axis=0)
    low, median, most, nearly_all, high = np.percentile(split.lengths, [0, 50, 90, 99, 100])
    repeated, copies, copied_tokens = find_repeats(split)
    said = look(manifest, "splits", part, "bytes")
    original = f"{said:,}{' (differs)' * (said != size)}" if isinstance(said, int) else "unknown"
    ratio = f"{said / size:.6f}" if isinstance(said, int) and size else "unknown"
    values = {
        "shards": len(split.shards), "documents": len(split.starts) if split.has_bos else "1 (no BOS)",
        "tokens": tokens, "bytes of decoded text": size, "bytes of original text": original,
        "  per decoded byte": ratio, "bytes per token": f"{size / tokens:.3f}", "tokens per document: min": low,
        "  median": median, "  mean": split.lengths.mean(), "  90 %": most, "  99 %": nearly_all, "  max": high,
        "tokens before the first document": split.starts[0], "documents that occur again": repeated,
        "  further copies": copies, "  their tokens": copied_tokens}
    if vocabulary.fallback.any():
        values["byte-fallback tokens"] = f"{by_id[vocabulary.fallback].sum() / tokens:.3%}"
    if vocabulary.unknown is not None:
        values["unknown tokens"] = f"{by_id[vocabulary.unknown] / tokens:.3%}"
    return {label: value if isinstance(value, str) else f"{value:,.1f}".removesuffix(".0")
            for label, value in values.items()}


def use_of_vocabulary(splits: dict[str, Split], vocabulary: Vocabulary) -> list[str]:
    """Lines about tokens that are never used and tokens that are used most."""
    counts, textual = {part: split.counts.sum(axis=0) for part, split in splits.items()}, vocabulary.lengths[0] > 0
    unused = np.flatnonzero(textual & (sum(counts.values()) == 0))
    first = unused[np.argsort(vocabulary.fallback[unused], kind="stable")][:LISTED].tolist()  # bytes come last
    lines = [f"in no document, {len(unused):,} of the {textual.sum():,} tokens that stand for text: "
             + (", ".join(map(vocabulary.name, first)) or "none")]
    for part, count in counts.items():
        ids = np.argsort(-count, kind="stable")[:min(LISTED, np.count_nonzero(count))].tolist()
        lines.append(f"most frequent in {part}: " + ", ".join(
            f"{vocabulary.name(i)} {count[i] / count.sum():.2%}" for i in ids))
    return lines


def describe(split: Split, index: int, vocabulary: Vocabulary, chars: int) -> tuple[int, str]:
    """The bytes of a document's text, and its first `chars` characters, quoted."""
    start, length = int(split.starts[index]), int(split.lengths[index])
    counts = sum(count_ids(part, vocabulary.bos, False) for part in spans(split.shards, start, start + length))
    # BOS and up to four tokens a character: a document may be too long to be decoded as a whole.
    head = np.concatenate(list(spans(split.shards, start, start + min(length, 1 + 4 * chars))))
    text = b"".join(vocabulary.texts[i] for i in head.tolist()).removeprefix(vocabulary.prefix)
    return vocabulary.count_bytes(counts), repr(text.decode("utf-8", "replace")[:chars])


def documents(part: str, split: Split, vocabulary: Vocabulary, samples: int) -> list[str]:
    """Lines about the longest documents of a split, and about samples from even distances."""
    longest, total, lines = np.argsort(-split.lengths, kind="stable")[:5], len(split.starts), []
    even = sorted({(2 * i + 1) * total // (2 * samples) for i in range(samples)})
    for title, indices, chars in (("longest", longest, HEAD_CHARS), ("samples", even, SAMPLE_CHARS)):
        lines += ["", f"{part}, {title}: document, tokens, bytes, beginning"] if len(indices) else []
        for index in indices:
            size, text = describe(split, index, vocabulary, chars)
            lines += textwrap.wrap(f"{index + 1:>12,}{split.lengths[index]:>14,}{size:>14,}  {text}", LINE_CHARS,
                                   subsequent_indent=42 * " ", drop_whitespace=False)
    return lines


def report(folder: Path, given: str | None, samples: int) -> tuple[list[str], list[str], dict[str, Split]]:
    """Reads a data set. Returns the lines of the page, the problems among them, and the splits that can be read.
    ValueError if there are no shards, or no tokenizer that can be used."""
    if not [*folder.glob("*_train_[0-9]*.bin"), *folder.glob("*_val_[0-9]*.bin")]:
        raise ValueError(f"DATASET {str(folder)!r} has no *_train_*.bin and no *_val_*.bin; data/prepare.py makes them")
    problems, splits, manifest, path = [], {}, None, folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"manifest.json cannot be read: {error}")
    vocabulary = find_vocabulary(folder, given, manifest)
    shards = {part: open_shards(folder, part, manifest, problems) for part in ("train", "val")}
    size = sum(shard.nbytes for opened in shards.values() for shard in opened.values())
    # stdout is for the page alone: without tqdm, Progress prints to it.
    with redirect_stdout(sys.stderr), (Progress("reading", size) if size > BAR_BYTES
                                       else nullcontext(lambda size: None)) as progress:
        for part, opened in shards.items():
            if opened:
                splits[part] = scan(opened, vocabulary, problems, progress)
    ours = manifest if look(manifest, "made_by") in MAKERS else None  # the counts of others may mean something else
    check(splits, vocabulary, ours, problems)
    compared = "compared" if ours else "of another maker, only sha256 are compared" if manifest else "none"
    lines = [f"data set: {folder.resolve().name}", f"manifest.json: {compared}",
             f"tokenizer: {vocabulary.spec}, {vocabulary.kind}, {vocabulary.size:,} tokens, BOS {vocabulary.bos}"]
    if splits:
        columns = {part: facts(part, split, vocabulary, ours) for part, split in splits.items()}
        lines += ["", f"{'':<34}" + "".join(f"{part:>24}" for part in columns)]
        lines += [f"{label:<34}" + "".join(f"{column[label]:>24}" for column in columns.values())
                  for label in next(iter(columns.values()))]
        lines += ["", *use_of_vocabulary(splits, vocabulary)]
        for part, split in splits.items():
            lines += documents(part, split, vocabulary, samples)
    return [*lines, "", f"problems: {len(problems) or 'none'}", *(f"  {line}" for line in problems)], problems, splits


def draw(path: str, name: str, splits: dict[str, Split]) -> None:
    """Writes a PNG of 1600 x 700 pixels: lengths of documents, and frequencies of tokens by rank. ValueError without
    matplotlib."""
    try:
        from matplotlib import figure
    except ImportError:
        raise ValueError("--picture needs matplotlib: pip install matplotlib") from None
    picture = figure.Figure(figsize=(16, 7), dpi=100, layout="constrained")
    picture.get_layout_engine().set(w_pad=0.15, h_pad=0.15)
    left, right = picture.subplots(1, 2)
    lengths = np.concatenate([split.lengths for split in splits.values()])
    # Lengths are whole: no bin may lie between two of them.
    edges = np.unique(np.geomspace(lengths.min(), lengths.max() + 1, 50).round())
    for (part, split), colour in zip(splits.items(), ("tab:blue", "tab:orange")):
        documents, tokens, median = len(split.lengths), split.counts.sum(), np.median(split.lengths)
        left.hist(split.lengths, edges, weights=np.full(documents, 100 / documents), color=colour, alpha=0.5,
                  label=f"{part}: {documents:,} documents, median {median:,.0f} tokens (dashed)")
        left.axvline(median, color=colour, linestyle="--")
        shares = np.sort(split.counts.sum(axis=0))[::-1] * (100 / tokens)
        used = np.count_nonzero(shares)
        right.plot(np.arange(1, used + 1), shares[:used], color=colour,
                   label=f"{part}: {tokens:,} tokens, {used:,} different ones")
    left.set(title="Document lengths", xscale="log", xlabel="tokens of a document, BOS included",
             ylabel="documents (% of the split's)")
    right.set(title="Token frequencies", xscale="log", yscale="log", xlabel="rank of a token by frequency",
              ylabel="occurrences (% of the split's tokens)")
    left.margins(y=0.2)  # room for the legend
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(framealpha=1)
    tokens = sum(split.counts.sum() for split in splits.values())
    picture.suptitle(f"{name}: {len(lengths):,} documents, {tokens:,} tokens", fontsize=16)
    picture.savefig(path, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", metavar="DATASET", help="folder of the shards")
    parser.add_argument("--tokenizer", metavar="SPEC", help="a .model or .json file, byte260, or gpt2 (default: the "
                                                            "file in DATASET, or the name in its manifest.json)")
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="per split (default %(default)s)")
    parser.add_argument("--text", metavar="FILE", help="write the page to this file too")
    parser.add_argument("--picture", metavar="FILE.png", help="draw lengths and frequencies (needs matplotlib)")
    options = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may not have all characters of the text
    folder = Path(options.dataset)
    try:
        lines, problems, splits = report(folder, options.tokenizer, options.samples)
        print("\n".join(lines), flush=True)
        if options.text:
            Path(options.text).write_text("\n".join(lines) + "\n", encoding="utf-8")
        if options.picture and splits:
            draw(options.picture, folder.resolve().name, splits)
    except (ValueError, OSError) as error:
        sys.exit(f"report.py: {error}")
    if problems:
        sys.exit(f"report.py: problems: {len(problems)}, see the end of the page")


if __name__ == "__main__":
    main()
