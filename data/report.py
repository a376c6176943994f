"""Check a folder of token shards and show what is in it.

    python data/report.py data/datasets/sotu_sp1024
    python data/report.py data/datasets/fineweb10B_sp1024 --tokenizer data/tokenizers/fineweb_1024_bpe.model

DATASET holds NAME_train_*.bin and NAME_val_*.bin, and usually a tokenizer and manifest.json. Problems are listed at the
end and make the exit status 1: files that differ from manifest.json, documents in both splits, or a refusal by
train_gpt.py, which checks the shards, their ids, and the number of bytes in the validation split.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from shards import check_with_trainer, escape_what_cannot_be_printed, given_path, map_shard, sha256_of, split_documents
from tokenization import Tokenizer, load_tokenizer

SAMPLES = 3  # documents of each split that are shown
SAMPLE_CHARS = 300


def compare_files(folder: Path) -> tuple[str, list[str]]:
    """Return the tokenizer's path or name, and the problems of the files that manifest.json lists. Files that it does not list
    are the trainer's to find. Raises ValueError if it is damaged."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
        digests = {str(shard["file"]): shard["sha256"] for split in manifest["splits"].values() for shard in split["shards"]}
        name = str(manifest["tokenizer"]["name"])
        if manifest["tokenizer"]["sha256"]:
            digests[name] = manifest["tokenizer"]["sha256"]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from None
    problems = []
    for file, digest in digests.items():
        if not (folder / file).is_file():
            problems.append(f"{file} is listed in manifest.json, but missing")
        elif sha256_of(folder / file) != digest:
            problems.append(f"{file} does not have the sha256 in manifest.json")
    return str(folder / name) if name in digests else name, problems


def decode(document: np.ndarray, tokenizer: Tokenizer) -> str:
    """Return the text of a document, whose tokens may begin with BOS."""
    return tokenizer.decode(document[document != tokenizer.bos]).decode("utf-8", "replace")


def read_split(part: str, shards: dict[Path, int], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the documents in shards, which are opened one after the other: there may be more than can be open at once."""
    return split_documents(map(map_shard, shards), tokenizer.bos, part, sum(shards.values()))


def show_split(part: str, shards: dict[Path, int], tokenizer: Tokenizer) -> np.ndarray:
    """Print the counts and the first documents of a split; return a hash of each document that has text, uint64 (D,)."""
    digests = bytearray()
    heads = []
    count = 0
    has_text = np.array([bool(token.strip()) for token in tokenizer.token_bytes])  # by id
    for document in read_split(part, shards, tokenizer):
        count += 1
        if has_text[document].any():  # empty ones are alike, which is no leak
            digests += hashlib.blake2b(document[document != tokenizer.bos], digest_size=8).digest()
        if len(heads) < SAMPLES:
            heads.append(document[:4 * SAMPLE_CHARS])  # a character has up to four tokens
    print(f"{part}: {len(shards)} shards, {count:,} documents, {sum(shards.values()):,} tokens")
    for number, head in enumerate(heads, 1):
        print(f"{part}, document {number}: {decode(head, tokenizer)[:SAMPLE_CHARS]!r}")
    return np.frombuffer(digests, dtype=np.uint64)


def report(options) -> list[str]:
    """Print what is in a data set; return its problems. Raises ValueError if the tokenizer or manifest.json cannot be used, and
    FileExistsError if --texts names a file that is there."""
    folder = Path(options.dataset)
    has_manifest = (folder / "manifest.json").exists()
    name, problems = compare_files(folder) if has_manifest else ("", [])
    if not options.tokenizer and not name:
        raise ValueError(f"there is no {folder / 'manifest.json'} that names a tokenizer: name another DATASET, or a --tokenizer")
    try:
        tokenizer = load_tokenizer(options.tokenizer or name)
        shards = check_with_trainer(folder, tokenizer)
    except ValueError as error:
        return [*problems, str(error)]
    documents = {part: show_split(part, shards[part], tokenizer) for part in shards}
    if "train" in documents and (shared := np.isin(documents["val"], documents["train"]).sum()):
        problems.append(f"{shared:,} of the {len(documents['val']):,} validation documents are also in the training split, "
                        "which makes scores too good")
    if options.texts:
        path = Path(options.texts)
        path.touch(exist_ok=False)
        try:
            with path.open("w", encoding="utf-8") as file:
                for document in read_split("writing", shards["val"], tokenizer):
                    file.write(json.dumps({"text": decode(document, tokenizer)}) + "\n")
        except BaseException:  # A part of the documents could be taken for all.
            path.unlink()
            raise
        print(f"wrote the validation documents to {options.texts}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=given_path, metavar="DATASET", help="folder of the shards")
    parser.add_argument("--tokenizer", type=given_path, metavar="SPEC",
                        help="a .model file, byte260, or gpt2 (default: the one in manifest.json)")
    parser.add_argument("--texts", type=given_path, metavar="FILE", help="also write the validation documents, as .jsonl")
    escape_what_cannot_be_printed()
    try:
        problems = report(parser.parse_args())
    except (ValueError, OSError, ImportError, KeyboardInterrupt) as error:
        sys.exit(f"report.py: {str(error) or 'stopped'}")
    if problems:
        sys.exit("\n".join(["report.py: problems found", *problems]))
    print("no problems")


if __name__ == "__main__":
    main()
