"""Check a folder of token shards and show what is in it.

    python data/report.py data/datasets/sotu_sp1024
    python data/report.py data/datasets/fineweb --tokenizer fineweb_1024_bpe.model --samples 10

DATASET holds NAME_train_*.bin and NAME_val_*.bin, and usually a tokenizer and manifest.json. The report has
counts, lengths, repeated documents and samples. Problems are listed at its end and make the exit status 1:
damaged shards, differences from manifest.json, documents in both splits, or a refusal by train_gpt.py.
"""

import argparse
import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from shards import check_with_trainer, open_shard, sha256_of, split_documents
from tokenization import MAX_VOCAB_SIZE, Tokenizer, load_tokenizer
from tqdm import tqdm

SAMPLE_CHARS = 300


@dataclass
class Split:
    """The shards of "train" or "val" and what was counted in them. A document starts with BOS."""

    shards: list[np.ndarray]  # memory maps, uint16
    lengths: np.ndarray  # int64 (D,): tokens of each document, BOS included
    digests: np.ndarray  # uint64 (D,): a hash of the tokens
    before_first: int  # tokens before the first BOS
    has_bos: bool  # if not, all tokens are one document
    bytes: int  # UTF-8 bytes of the text that the tokens decode to
    different: int  # how many ids of the vocabulary occur
    unknown: int  # unknown tokens


def read_manifest(folder: Path, problems: list[str]) -> tuple[str, dict, dict]:
    """Return what manifest.json lists: the tokenizer's name, the sha256 of each file (None for a built-in
    tokenizer) and the bytes of original text of each split; nothing if it is missing or damaged."""
    path = folder / "manifest.json"
    if not path.exists():
        return "", {}, {}
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        splits = manifest["splits"]
        name = str(manifest["tokenizer"]["name"])
        digests = {str(shard["file"]): shard["sha256"] for split in splits.values() for shard in split["shards"]}
        digests[name] = manifest["tokenizer"]["sha256"]
        return name, digests, {part: int(split["bytes"]) for part, split in splits.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problems.append(f"manifest.json cannot be read: {error!r}")
        return "", {}, {}


def compare_files(folder: Path, digests: dict) -> list[str]:
    """Return the problems of files that manifest.json lists, and of shards that it does not."""
    problems = []
    for name, digest in digests.items():
        if digest and not (folder / name).is_file():
            problems.append(f"{name} is listed in manifest.json, but missing")
        elif digest and sha256_of(folder / name) != digest:
            problems.append(f"{name} does not have the sha256 in manifest.json")
    if any(name.endswith(".bin") for name in digests):  # the trainer reads all shards that it finds
        found = {path.name for part in ("train", "val") for path in folder.glob(f"*_{part}_[0-9]*.bin")}
        problems += [f"{name} is not listed in manifest.json" for name in sorted(found - digests.keys())]
    return problems


def find_tokenizer(folder: Path, spec: str | None, name: str) -> Tokenizer:
    """Load the tokenizer `spec`, else the file in the folder, else the built-in `name`. Raises ValueError."""
    found = [str(path) for path in (folder / "tokenizer.model", folder / "tokenizer.json") if path.is_file()]
    if name and not name.endswith((".model", ".json")):
        found.append(name)
    if not spec and not found:
        raise ValueError(f"{folder} has no tokenizer.model or .json, and no manifest.json that names byte260 "
                         f"or gpt2: choose one with --tokenizer")
    return load_tokenizer(spec or found[0])


def open_shards(folder: Path, part: str, problems: list[str]) -> list[np.ndarray]:
    """Return the valid shards of "train" or "val" in the order of their names; add the problems of others."""
    shards = []
    for path in sorted(folder.glob(f"*_{part}_[0-9]*.bin")):
        try:
            shards.append(open_shard(path))
        except (OSError, ValueError) as error:
            problems.append(str(error))
    return shards


def scan(shards: list[np.ndarray], tokenizer: Tokenizer, bar: tqdm) -> Split:
    """Count what is in the shards of a split."""
    texts = tokenizer.token_bytes
    sizes = np.zeros(MAX_VOCAB_SIZE, dtype=np.int64)  # 0 for ids that the tokenizer does not have
    sizes[:len(texts)] = [len(text) for text in texts]
    first_sizes = np.zeros(MAX_VOCAB_SIZE, dtype=np.int64)  # of a document's first token
    first_sizes[:len(texts)] = [len(text.removeprefix(tokenizer.prefix)) for text in texts]
    in_use = np.zeros(MAX_VOCAB_SIZE, dtype=bool)
    lengths = []
    digests = bytearray()
    size = 0
    unknown = 0
    for document in split_documents(shards, tokenizer.bos):
        lengths.append(len(document))
        digests += hashlib.blake2b(document, digest_size=8).digest()
        in_use[document] = True
        first = 2 if document[0] == tokenizer.bos else 0
        size += int(first_sizes[document[:first]].sum() + sizes[document[first:]].sum())
        unknown += int(np.count_nonzero(document == tokenizer.unknown))
        bar.update(2 * len(document))
    starts_with_bos = bool(shards[0][0] == tokenizer.bos)
    has_bos = starts_with_bos or len(lengths) > 1
    before_first = 0
    if has_bos and not starts_with_bos:  # the first piece is no document
        before_first = lengths.pop(0)
        del digests[:8]
    return Split(shards, lengths=np.array(lengths), digests=np.frombuffer(digests, dtype=np.uint64),
                 before_first=before_first, has_bos=has_bos, bytes=size,
                 different=int(np.count_nonzero(in_use)), unknown=unknown)


def find_shared(splits: dict[str, Split], tokenizer: Tokenizer) -> list[str]:
    """Return a problem if validation documents are also in train."""
    if len(splits) < 2:
        return []
    val = splits["val"]
    shared = np.flatnonzero(np.isin(val.digests, splits["train"].digests))
    if len(shared) == 0:
        return []
    return [f"{len(shared):,} of the {len(val.lengths):,} val documents are also in train, which makes "
            f"scores too good; the first is {describe(val, int(shared[0]), tokenizer)}"]


def describe(split: Split, index: int, tokenizer: Tokenizer) -> str:
    """Return a document's number, length, and the beginning of its text, quoted."""
    start = split.before_first + int(split.lengths[:index].sum())
    length = int(split.lengths[index])
    count = min(length, 1 + 4 * SAMPLE_CHARS)  # BOS, and up to four tokens for a character
    head = []
    for shard in split.shards:
        head += shard[start:][:count - len(head)].tolist()
        start = max(0, start - len(shard))
    text = b"".join(tokenizer.token_bytes[i] for i in head if i < tokenizer.vocab_size)
    text = text.removeprefix(tokenizer.prefix).decode("utf-8", "replace")
    return f"document {index + 1:,} ({length:,} tokens): {text[:SAMPLE_CHARS]!r}"


def column(split: Split, original: int | None, tokenizer: Tokenizer) -> dict[str, str]:
    """Return a split's column of the table by the names of the rows. `original`: bytes of original text."""
    tokens = sum(map(len, split.shards))
    _, copies = np.unique(split.digests, return_counts=True)
    values = {
        "shards": len(split.shards),
        "documents": len(split.lengths) if split.has_bos else "1 (no BOS)",
        "tokens": tokens,
        "bytes of decoded text": split.bytes,
        "bytes of original text": "unknown" if original is None else original,
        "  per decoded byte": f"{original / split.bytes:.6f}" if original and split.bytes else "unknown",
        "bytes per token": f"{split.bytes / tokens:.3f}",
        "tokens per document: min": split.lengths.min(),
        "  median": np.median(split.lengths),
        "  mean": split.lengths.mean(),
        "  max": split.lengths.max(),
        "tokens before the first document": split.before_first,
        "documents that occur again": np.count_nonzero(copies > 1),
        "  their further copies": len(split.digests) - len(copies),
        "tokens of the vocabulary in use": split.different,
    }
    if tokenizer.unknown >= 0:
        values["unknown tokens"] = split.unknown
    return {row: value if isinstance(value, str) else f"{value:,.1f}".removesuffix(".0")
            for row, value in values.items()}


def report(folder: Path, spec: str | None, samples: int) -> tuple[list[str], list[str]]:
    """Read a data set; return the report's lines and its problems.

    Raises ValueError if there are no shards, or no tokenizer that can be used."""
    if not any(folder.glob("*_train_[0-9]*.bin")) and not any(folder.glob("*_val_[0-9]*.bin")):
        raise ValueError(f"DATASET {str(folder)!r} has no *_train_*.bin and no *_val_*.bin: "
                         f"data/prepare.py makes them")
    problems = []
    name, digests, original = read_manifest(folder, problems)
    tokenizer = find_tokenizer(folder, spec, name)
    problems += compare_files(folder, digests)
    opened = {part: open_shards(folder, part, problems) for part in ("train", "val")}
    size = sum(shard.nbytes for shards in opened.values() for shard in shards)
    with tqdm(desc="reading", total=size, unit="B", unit_scale=True) as bar:
        splits = {part: scan(shards, tokenizer, bar) for part, shards in opened.items() if shards}
    problems += find_shared(splits, tokenizer)
    proof = "not run, because of the problems below" if problems else "not run, without a validation split"
    if not problems and "val" in splits:
        try:
            check_with_trainer(folder, tokenizer, "train" in splits)
            proof = "passed"
        except ValueError as error:
            proof = "failed"
            problems.append(str(error))
    lines = [f"data set: {folder.resolve().name}",
             f"manifest.json: {'compared' if digests else 'none'}",
             f"train_gpt.py's check: {proof}",
             f"tokenizer: {tokenizer.spec}, {tokenizer.kind}, {tokenizer.vocab_size:,} tokens"]
    columns = [column(split, original.get(part), tokenizer) for part, split in splits.items()]
    if columns:
        lines += ["", f"{'':<34}" + "".join(f"{part:>24}" for part in splits)]
        lines += [f"{row:<34}" + "".join(f"{values[row]:>24}" for values in columns) for row in columns[0]]
    for part, split in splits.items():
        documents = len(split.lengths)
        chosen = sorted({(2 * i + 1) * documents // (2 * samples) for i in range(samples)})
        lines += ["", *(f"{part}, {describe(split, index, tokenizer)}" for index in chosen)]
    lines += ["", f"problems: {len(problems) or 'none'}", *(f"  {problem}" for problem in problems)]
    return lines, problems


def write_texts(folder: Path, spec: str | None, path: Path) -> str:
    """Write the validation documents to a .jsonl file, {"text": ...} a line; return what was done. Raises ValueError."""
    tokenizer = find_tokenizer(folder, spec, read_manifest(folder, [])[0])
    count = 0
    if path.exists():  # it may be a text of the user's
        raise ValueError(f"--texts {path} exists: it is where the documents are written; name a new file")
    with path.open("w", encoding="utf-8") as file:
        for document in split_documents(open_shards(folder, "val", []), tokenizer.bos):
            known = document[(document != tokenizer.bos) & (document < tokenizer.vocab_size)]
            text = tokenizer.decode(known).decode("utf-8", "replace")
            file.write(json.dumps({"text": text}) + "\n")
            count += 1
    return f"wrote {path}: {count:,} validation documents"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", metavar="DATASET", help="folder of the shards")
    parser.add_argument("--tokenizer", metavar="SPEC", help="a .model or .json file, byte260, or gpt2 "
                        "(default: the file in DATASET, or the name in its manifest.json)")
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="per split (default %(default)s)")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="also write the validation documents, as .jsonl")
    options = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may not have all characters of the text
    try:
        lines, problems = report(Path(options.dataset), options.tokenizer, options.samples)
        print("\n".join(lines), flush=True)
        if options.texts:
            print(write_texts(Path(options.dataset), options.tokenizer, options.texts), flush=True)
    except (ValueError, OSError) as error:
        sys.exit(f"report.py: {error}")
    if problems:
        sys.exit(f"report.py: {len(problems)} problems; they are listed at the end of the report")


if __name__ == "__main__":
    main()
