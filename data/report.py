"""Check a folder of token shards and show what is in it.

    python data/report.py data/datasets/sotu_sp1024
    python data/report.py data/datasets/fineweb --tokenizer fineweb_1024_bpe.model --samples 10
    python data/report.py data/datasets/mine --picture mine.png

DATASET holds NAME_train_*.bin and NAME_val_*.bin, and usually a tokenizer and manifest.json. The report has
counts, lengths, repeated documents and samples. Problems are listed at its end and make the exit status 1:
damaged shards, differences from manifest.json, documents in both splits, or a refusal by train_gpt.py.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from shards import (MAKERS, MAX_VOCAB_SIZE, Tokenizer, check_with_trainer, load_tokenizer, open_shard,
                    progress_bar, sha256_of)

CHUNK = 1 << 20  # tokens read at a time
SAMPLE_CHARS = 300


@dataclass
class Split:
    """The shards of "train" or "val" and what was counted in them. A document starts with BOS."""

    shards: list[np.ndarray]  # memory maps, uint16
    counts: np.ndarray  # int64 (2, 65536): how often each id occurs; row 1 right after BOS, row 0 elsewhere
    starts: np.ndarray  # int64 (D,): the position of each document's first token
    lengths: np.ndarray  # int64 (D,): tokens, BOS included
    digests: np.ndarray  # uint64 (D,): a hash of the tokens
    has_bos: bool  # if not, all tokens are one document

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())


def get(tree, *keys: str):
    """Return the value at the keys in parsed JSON of any shape, or None."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def read_manifest(folder: Path, problems: list[str]):
    """Return the parsed manifest.json, or None if there is none or it cannot be read."""
    path = folder / "manifest.json"
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"manifest.json cannot be read: {error}")
        return None


def find_tokenizer(folder: Path, spec: str | None, manifest) -> Tokenizer:
    """Load the tokenizer that is given, is in the folder, or is named in the manifest. Raises ValueError."""
    name = get(manifest, "tokenizer", "name")
    files = [str(path) for path in (folder / "tokenizer.model", folder / "tokenizer.json") if path.is_file()]
    if isinstance(name, str) and not name.endswith((".model", ".json")):
        files.append(name)
    if not spec and not files:
        raise ValueError(f"{folder} has no tokenizer.model or .json, and no manifest.json that names byte260 "
                         f"or gpt2: choose one with --tokenizer")
    return load_tokenizer(spec or files[0])


def open_shards(folder: Path, part: str, manifest, problems: list[str]) -> dict[str, np.ndarray]:
    """Return the valid shards of "train" or "val" by file name, sorted; add the problems of others."""
    listed = get(manifest, "splits", part, "shards")
    listed = listed if isinstance(listed, list) else []
    entries = {str(get(entry, "file")): entry for entry in listed}
    paths = {path.name: path for path in sorted(folder.glob(f"*_{part}_[0-9]*.bin"))}
    problems += [f"{name} is listed in manifest.json, but missing" for name in entries if name not in paths]
    sets = sorted({name.rsplit(f"_{part}_", 1)[0] for name in paths})
    if len(sets) > 1:
        problems.append(f"the {part} shards are of several data sets: {', '.join(sets)}")
    shards = {}
    for name, path in paths.items():
        try:
            shards[name] = open_shard(path)
        except (OSError, ValueError) as error:
            problems.append(str(error))
            continue
        digest = get(entries.get(name), "sha256")
        if digest and sha256_of(path) != digest:
            problems.append(f"{name} does not have the sha256 in manifest.json")
    return shards


def read_tokens(shards: list[np.ndarray], start: int, end: int) -> Iterator[np.ndarray]:
    """Yield the tokens from position `start` to `end` of all shards in a row, uint16 (N,), N <= CHUNK."""
    for shard in shards:
        for at in range(max(start, 0), min(end, len(shard)), CHUNK):
            yield np.array(shard[at:min(at + CHUNK, end)])
        start -= len(shard)
        end -= len(shard)


def count_ids(tokens: np.ndarray, bos: int, after_bos: bool) -> np.ndarray:
    """Return how often each id occurs, int64 (2, 65536) as Split.counts; after_bos: tokens[0] follows BOS."""
    is_after = np.append(after_bos, tokens[:-1] == bos)
    keys = tokens + MAX_VOCAB_SIZE * is_after
    return np.bincount(keys, minlength=2 * MAX_VOCAB_SIZE).reshape(2, MAX_VOCAB_SIZE)


def count_bytes(counts: np.ndarray, tokenizer: Tokenizer) -> int:
    """Return the UTF-8 bytes of the text of tokens that occur as often as in `counts`, (2, 65536)."""
    texts = tokenizer.token_bytes
    lengths = [[len(text) for text in texts], [len(text.removeprefix(tokenizer.prefix)) for text in texts]]
    return int((counts[:, :len(texts)] * np.array(lengths)).sum())


def scan(shards: list[np.ndarray], bos: int, advance) -> Split:
    """Count the tokens of a split and find its documents, which may continue in the next shard."""
    counts = np.zeros((2, MAX_VOCAB_SIZE), dtype=np.int64)
    starts = []
    digests = bytearray()
    position = 0
    after_bos = False
    document = hashlib.blake2b(digest_size=8)
    for tokens in read_tokens(shards, 0, sum(map(len, shards))):
        counts += count_ids(tokens, bos, after_bos)
        after_bos = bool(tokens[-1] == bos)
        found = np.flatnonzero(tokens == bos)
        starts.append(position + found)
        document.update(tokens[:found[0]] if len(found) else tokens)
        for start, end in pairwise([*found, len(tokens)]):
            digests += document.digest()
            document = hashlib.blake2b(tokens[start:end], digest_size=8)
        position += len(tokens)
        advance(2 * len(tokens))
    digests = np.frombuffer(digests + document.digest(), dtype=np.uint64)
    starts = np.concatenate(starts)
    has_bos = len(starts) > 0
    if has_bos:
        digests = digests[1:]  # the first is of the tokens before the first BOS
    else:
        starts = np.array([0])
    return Split(shards, counts, starts, np.diff(starts, append=position), digests, has_bos)


def compare(splits: dict[str, Split], tokenizer: Tokenizer, manifest) -> list[str]:
    """Return the differences between the counts and a manifest of prepare.py or convert.py."""
    problems = []
    for part, split in splits.items():
        counted = {"documents": len(split.starts), "tokens": split.tokens}
        if part == "val":
            counted["decoded_bytes"] = count_bytes(split.counts, tokenizer)
        elif tokenizer.kind != "sentencepiece":  # it may change text; `bytes` are of the original
            counted["bytes"] = count_bytes(split.counts, tokenizer)
        for key, value in counted.items():
            listed = get(manifest, "splits", part, key)
            if listed != value:
                problems.append(f"{part} has {value:,} {key}, but manifest.json says {listed!r}")
    digest = sha256_of(tokenizer.file) if tokenizer.file else None
    for key, value in {"vocab_size": tokenizer.vocab_size, "sha256": digest}.items():
        listed = get(manifest, "tokenizer", key)
        if listed != value:
            problems.append(f"the tokenizer's {key} is {value}, but manifest.json says {listed!r}")
    return problems


def find_shared(splits: dict[str, Split], tokenizer: Tokenizer) -> list[str]:
    """Return a problem if validation documents are also in train."""
    if len(splits) < 2:
        return []
    val = splits["val"]
    shared = np.flatnonzero(np.isin(val.digests, splits["train"].digests))
    if len(shared) == 0:
        return []
    return [f"{len(shared):,} of the {len(val.starts):,} val documents are also in train, which makes scores "
            f"too good; the first is {describe(val, shared[0], tokenizer)}"]


def describe(split: Split, index: int, tokenizer: Tokenizer) -> str:
    """Return a document's number, length, and the beginning of its text, quoted."""
    start = int(split.starts[index])
    length = int(split.lengths[index])
    # BOS, and up to four tokens for a character.
    head = [*read_tokens(split.shards, start, start + min(length, 1 + 4 * SAMPLE_CHARS))]
    ids = [i for i in np.concatenate(head).tolist() if i < tokenizer.vocab_size]
    text = b"".join(tokenizer.token_bytes[i] for i in ids).removeprefix(tokenizer.prefix)
    return f"document {index + 1:,} ({length:,} tokens): {text.decode('utf-8', 'replace')[:SAMPLE_CHARS]!r}"


def column(part: str, split: Split, tokenizer: Tokenizer, manifest) -> dict[str, str]:
    """Return a split's column of the table by the names of the rows."""
    size = count_bytes(split.counts, tokenizer)
    original = get(manifest, "splits", part, "bytes")
    is_known = isinstance(original, int)
    by_id = split.counts.sum(axis=0)
    _, copies = np.unique(split.digests, return_counts=True)
    values = {
        "shards": len(split.shards),
        "documents": len(split.starts) if split.has_bos else "1 (no BOS)",
        "tokens": split.tokens,
        "bytes of decoded text": size,
        "bytes of original text": original if is_known else "unknown",
        "  per decoded byte": f"{original / size:.6f}" if is_known and size else "unknown",
        "bytes per token": f"{size / split.tokens:.3f}",
        "tokens per document: min": split.lengths.min(),
        "  median": np.median(split.lengths),
        "  mean": split.lengths.mean(),
        "  max": split.lengths.max(),
        "tokens before the first document": split.starts[0],
        "documents that occur again": np.count_nonzero(copies > 1),
        "  their further copies": len(split.digests) - len(copies),
        "tokens of the vocabulary in use": np.count_nonzero(by_id),
    }
    if tokenizer.unknown >= 0:
        values["unknown tokens"] = by_id[tokenizer.unknown]
    for row, value in values.items():
        if not isinstance(value, str):
            values[row] = f"{value:,.1f}".removesuffix(".0")
    return values


def report(folder: Path, spec: str | None, samples: int) -> tuple[list[str], list[str], dict[str, Split]]:
    """Read a data set; return the report's lines, its problems, and the splits with valid shards.

    Raises ValueError if there are no shards, or no tokenizer that can be used."""
    if not any(folder.glob("*_train_[0-9]*.bin")) and not any(folder.glob("*_val_[0-9]*.bin")):
        raise ValueError(f"DATASET {str(folder)!r} has no *_train_*.bin and no *_val_*.bin: "
                         f"data/prepare.py makes them")
    problems = []
    manifest = read_manifest(folder, problems)
    tokenizer = find_tokenizer(folder, spec, manifest)
    opened = {part: open_shards(folder, part, manifest, problems) for part in ("train", "val")}
    splits = {}
    size = sum(shard.nbytes for shards in opened.values() for shard in shards.values())
    with progress_bar("reading", size) as advance:
        for part, shards in opened.items():
            if shards:
                splits[part] = scan(list(shards.values()), tokenizer.bos, advance)
    ours = manifest if get(manifest, "made_by") in MAKERS else None  # others may count something else
    if ours:
        problems += compare(splits, tokenizer, ours)
    problems += find_shared(splits, tokenizer)
    proof = "not run, because of the problems below" if problems else "not run, without a validation split"
    if not problems and "val" in splits:
        try:
            check_with_trainer(folder, tokenizer, "train" in splits)
            proof = "passed"
        except ValueError as error:
            proof = "failed"
            problems.append(str(error))
    compared = "none"
    if manifest:
        compared = "compared" if ours else "of another maker, only sha256 are compared"
    lines = [f"data set: {folder.resolve().name}",
             f"manifest.json: {compared}",
             f"train_gpt.py's check: {proof}",
             f"tokenizer: {tokenizer.spec}, {tokenizer.kind}, {tokenizer.vocab_size:,} tokens"]
    columns = [column(part, split, tokenizer, ours) for part, split in splits.items()]
    if columns:
        lines += ["", f"{'':<34}" + "".join(f"{part:>24}" for part in splits)]
        lines += [f"{row:<34}" + "".join(f"{values[row]:>24}" for values in columns) for row in columns[0]]
    for part, split in splits.items():
        documents = len(split.starts)
        chosen = sorted({(2 * i + 1) * documents // (2 * samples) for i in range(samples)})
        lines += ["", *(f"{part}, {describe(split, index, tokenizer)}" for index in chosen)]
    lines += ["", f"problems: {len(problems) or 'none'}", *(f"  {problem}" for problem in problems)]
    return lines, problems, splits


def draw(path: str, name: str, splits: dict[str, Split]) -> None:
    """Write a PNG of 1600 x 700 pixels with document lengths and token frequencies. Raises ValueError without
    matplotlib."""
    try:
        from matplotlib import figure
    except ImportError:
        raise ValueError("--picture needs matplotlib: pip install matplotlib") from None
    picture = figure.Figure(figsize=(16, 7), dpi=100, layout="constrained")
    left, right = picture.subplots(1, 2)
    lengths = np.concatenate([split.lengths for split in splits.values()])
    # Lengths are integers: rounded edges leave no bin without one.
    edges = np.unique(np.geomspace(lengths.min(), lengths.max() + 1, 50).round())
    for part, split in splits.items():
        documents = len(split.lengths)
        left.hist(split.lengths, edges, weights=np.full(documents, 100 / documents), alpha=0.5,
                  label=f"{part}: {documents:,} documents, median {np.median(split.lengths):,.0f} tokens")
        counts = np.sort(split.counts.sum(axis=0))[::-1]
        used = np.count_nonzero(counts)
        right.plot(np.arange(1, used + 1), counts[:used] * (100 / split.tokens),
                   label=f"{part}: {split.tokens:,} tokens, {used:,} different ones")
    left.set(title="Document lengths", xscale="log", xlabel="tokens of a document, BOS included",
             ylabel="documents (% of the split's)")
    right.set(title="Token frequencies", xscale="log", yscale="log", xlabel="rank of a token by frequency",
              ylabel="occurrences (% of the split's tokens)")
    left.margins(y=0.2)  # room for the legend
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    picture.suptitle(name)
    picture.savefig(path, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", metavar="DATASET", help="folder of the shards")
    parser.add_argument("--tokenizer", metavar="SPEC", help="a .model or .json file, byte260, or gpt2 "
                        "(default: the file in DATASET, or the name in its manifest.json)")
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="per split (default %(default)s)")
    parser.add_argument("--picture", metavar="FILE.png",
                        help="draw document lengths and token frequencies (needs matplotlib)")
    options = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may not have all characters of the text
    folder = Path(options.dataset)
    try:
        lines, problems, splits = report(folder, options.tokenizer, options.samples)
        print("\n".join(lines), flush=True)
        if options.picture and splits:
            draw(options.picture, folder.resolve().name, splits)
    except (ValueError, OSError) as error:
        sys.exit(f"report.py: {error}")
    if problems:
        sys.exit(f"report.py: {len(problems)} problems; they are listed at the end of the report")


if __name__ == "__main__":
    main()
