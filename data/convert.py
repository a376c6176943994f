"""Turn token files of other projects into shards and a manifest that train_gpt.py can read and check.

    python data/convert.py fineweb10B/ --tokenizer gpt2 --out data/datasets/fineweb_gpt2          modded-nanogpt, llm.c
    python data/convert.py edu_fineweb10B/ --tokenizer gpt2 --out data/datasets/edu_gpt2          build-nanogpt's .npy
    python data/convert.py openwebtext/ --headerless --tokenizer gpt2 --out data/datasets/owt     nanoGPT's .bin
    python data/convert.py shakespeare_char/ --headerless --tokenizer shakespeare_char/meta.pkl --out data/datasets/char
    python data/convert.py tinystories/ --tokenizer llama3/tokenizer.model --out data/datasets/stories

A FILE is a .bin or .npy of token ids, or a folder of them. Files with "val" or "test" in their names are the validation
split, the others are for training; what a file is, its first bytes tell. A vocabulary of more than 65,536 tokens has no
room in the shards: its tokens are numbered anew, in their order, and the ones that occur have to be few enough.
"""

import argparse
import base64
import pickle
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from prepare import TOKENIZER_ERRORS, Progress, ShardWriter, Tokenizer, finish, write_dataset, write_vocabulary

HEADERS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # of llm.c: magic number and version, type of a token
HEADER_BYTES = 1024
BLOCK_TOKENS = 1 << 22
SPECIAL_TOKENS = 1024  # at most, with numbers behind the ranks; llama-3 has 256
SPLIT_NAME = re.compile(r"(?:^|[_.-])(train|val|valid|validation|test)(?=[_.-])")


class PlainUnpickler(pickle.Unpickler):
    """Reads dicts, strings and numbers. Anything that would run code is refused."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def open_tokens(path: Path, headerless: bool) -> np.ndarray:
    """A file's token ids as a memory map of integers (N,). ValueError: it is of no known kind, or damaged."""
    if path.suffix == ".npy":
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # its header is Python text, which fails in many ways
            raise ValueError(f"{path} is no .npy file: {error}") from None
        if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"{path} does not hold a row of token ids")
    elif headerless:
        if path.stat().st_size % 2:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, which are no uint16 tokens")
        tokens = np.memmap(path, dtype="<u2", mode="r") if path.stat().st_size else np.zeros(0, dtype="<u2")
    else:
        header = np.fromfile(path, dtype="<i4", count=HEADER_BYTES // 4)
        dtype = HEADERS.get(tuple(header[:2].tolist()))
        if dtype is None:
            raise ValueError(f"{path} starts with the integers {header[:2].tolist()}, which is no header that is "
                             f"known; nanoGPT's files have none: --headerless")
        count, size = int(header[2]) if len(header) * 4 == HEADER_BYTES else -1, path.stat().st_size
        if count < 0 or size != HEADER_BYTES + count * np.dtype(dtype).itemsize:
            raise ValueError(f"{path} is damaged: it has {size} bytes and a header that promises {count} tokens")
        tokens = np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES) if count else np.zeros(0, dtype=dtype)
    if len(tokens) == 0:
        raise ValueError(f"{path} holds no tokens")
    return tokens


def find_files(names: list[str]) -> dict[str, list[Path]]:
    """The files of both splits, by the names of the files; ValueError if there are none for validation."""
    files = []
    for path in map(Path, names):
        found = sorted(p for p in path.iterdir() if p.suffix in (".bin", ".npy")) if path.is_dir() else [path]
        if not found or not all(p.is_file() for p in found):
            raise ValueError(f"FILE {str(path)!r} is neither a .bin or .npy file nor a folder of them")
        files += found
    if len({path.resolve() for path in files}) < len(files):
        raise ValueError(f"a FILE is named twice: {', '.join(map(str, files))}")
    files = [path for path in files if "_val_bytes_" not in path.name]  # a sidecar of older sets holds no tokens
    val = [path for path in files if SPLIT_NAME.findall(path.name)[-1:] not in ([], ["train"])]
    if not val:
        raise ValueError(f"none of {', '.join(path.name for path in files[:5])} has val or test in its name; "
                         f"the validation split has to be a file of its own")
    return {"train": [path for path in files if path not in val], "val": val}


def read_vocabulary(spec: str) -> tuple[int | None, list[bytes]] | None:
    """BOS token, None if the file does not say, and the bytes of each token, of a nanoGPT meta.pkl or a file of
    ranks as tiktoken's and llama-3's are; None for other tokenizers. ValueError: it cannot be read."""
    path = Path(spec)
    if path.suffix == ".pkl":
        try:
            with path.open("rb") as file:
                itos = PlainUnpickler(file).load()["itos"]
            return -1, [itos[i].encode("utf-8") for i in range(len(itos))]
        except Exception as error:  # a damaged pickle fails in many ways
            raise ValueError(f"--tokenizer {spec!r} is no meta.pkl of nanoGPT: {error!r}") from None
    if path.suffix not in (".model", ".tiktoken") or not path.is_file():
        return None
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {int(rank): base64.b64decode(token, validate=True) for token, rank in lines}
        return None, [ranks[i] for i in range(len(ranks))]
    except (ValueError, KeyError):  # then it is a model of SentencePiece
        return None


def blocks(arrays: list[np.ndarray], used: np.ndarray | None) -> Iterator[np.ndarray]:
    """The tokens of a split, uint16, BLOCK_TOKENS at a time; numbered anew by their places in `used`, if given."""
    for array in arrays:
        for start in range(0, len(array), BLOCK_TOKENS):
            block = array[start:start + BLOCK_TOKENS]
            yield (block if used is None else np.searchsorted(used, block)).astype(np.uint16)


def documents(parts: Iterator[np.ndarray], bos: int) -> Iterator[np.ndarray]:
    """The tokens from each BOS to the next; the parts as they are where the vocabulary has none."""
    if bos < 0:
        yield from parts
        return
    rest = np.zeros(0, dtype=np.uint16)
    for part in parts:
        joined = np.concatenate((rest, part))
        *whole, rest = np.split(joined, np.flatnonzero(joined == bos))
        yield from whole
    yield rest


def bos_first(arrays: list[np.ndarray], bos: int) -> list[np.ndarray]:
    """The arrays with the token that ends each document, as in nanoGPT's files, moved to where the next one starts."""
    if not arrays or int(arrays[0][0]) == bos or int(arrays[-1][-1]) != bos:
        return arrays
    return [arrays[-1][-1:], *arrays[:-1], arrays[-1][:-1]]


def write_split(folder: Path, part: str, arrays: list[np.ndarray], used: np.ndarray | None, tokenizer: Tokenizer,
                shard_tokens: int) -> dict:
    """Writes a split as shards; returns its counts for the manifest."""
    writer, counts = ShardWriter(folder, f"{folder.name}_{part}", shard_tokens), {"documents": 0, "bytes": 0}
    total = sum(len(array) for array in arrays)
    with Progress(part, total, unit="token") as progress:
        for document in documents(blocks(arrays, used), tokenizer.bos):
            writer.write(document)
            progress(len(document))
            ids = document[document != tokenizer.bos]
            counts["documents"] += len(ids) < len(document)
            counts["bytes"] += tokenizer.decoded_size(ids)
    writer.close()
    counts["documents"] = max(counts["documents"], int(total > 0))
    return {**counts, "tokens": total, "shards": writer.shards}


def open_vocabulary(spec: str, arrays: dict[str, list[np.ndarray]]) -> tuple[int, int, list[bytes] | None]:
    """The number of tokens that a file may hold, the BOS token (-1: none), and the bytes of each token where the
    tokenizer is one that only this script reads."""
    vocabulary = read_vocabulary(spec)
    if vocabulary is None:
        try:
            tokenizer = Tokenizer(spec)
        except TOKENIZER_ERRORS as error:
            raise ValueError(f"--tokenizer {spec!r} cannot be used: {error!r}") from None
        return tokenizer.vocab_size, tokenizer.bos, None
    bos, tokens = vocabulary
    if bos is None:  # special tokens have no ranks, but numbers behind them; the first of a file starts its document
        first, largest = int(arrays["val"][0][0]), max(int(array.max()) for array in sum(arrays.values(), []))
        if largest >= len(tokens) + SPECIAL_TOKENS:
            raise ValueError(f"token {largest} occurs, but --tokenizer {spec!r} has {len(tokens)} ranks: these tokens "
                             f"are of another vocabulary")
        bos = first if first >= len(tokens) else -1
        tokens += [b""] * (largest + 1 - len(tokens))
    return len(tokens), bos, tokens


def convert(folder: Path, options) -> str:
    """Writes the data set into the empty folder; returns what is to be said about it."""
    files, spec, file, used = find_files(options.files), options.tokenizer, None, None
    arrays = {part: [open_tokens(path, options.headerless) for path in paths] for part, paths in files.items()}
    vocab_size, bos, tokens = open_vocabulary(spec, arrays)
    for part, paths in files.items():
        for path, array in zip(paths, arrays[part]):
            for token in (int(array.min()), int(array.max())):
                if not 0 <= token < vocab_size:
                    raise ValueError(f"{path} holds token {token}, but --tokenizer {spec!r} has {vocab_size}")
        arrays[part] = bos_first(arrays[part], bos)
    if tokens is not None:
        if vocab_size > 1 << 16:
            used = np.unique(np.concatenate([np.unique(array) for array in sum(arrays.values(), [])]))
            tokens, bos = [tokens[i] for i in used], int(np.searchsorted(used, bos)) if bos >= 0 else -1
        if len(tokens) > 1 << 16:
            raise ValueError(f"{len(tokens)} different tokens occur, but a shard holds uint16: convert less text")
        file = folder / "tokenizer.json"
        write_vocabulary(file, "table", bos, tokens)
    elif spec.endswith((".model", ".json")):
        file = folder / f"tokenizer{Path(spec).suffix}"
        shutil.copyfile(spec, file)
    tokenizer = Tokenizer(str(file or spec))
    splits = {part: write_split(folder, part, arrays[part], used, tokenizer, options.shard_tokens) for part in arrays}
    # What the tokens decode to is all there is; the text that they were made from is not known.
    splits["val"].update(decoded_bytes=splits["val"]["bytes"], changed_documents=0)
    return finish(folder, options.out, "data/convert.py 2", [path.name for paths in files.values() for path in paths],
                  {"val_files": [path.name for path in files["val"]]}, tokenizer, file, splits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE", help=".bin or .npy files, or folders of them")
    parser.add_argument("--tokenizer", required=True, help="gpt2 or another of tiktoken's names, byte260, a "
                        "SentencePiece .model, a file of ranks (.tiktoken, llama-3's tokenizer.model), or a meta.pkl "
                        "of nanoGPT")
    parser.add_argument("--out", required=True, help="folder of the dataset; its name is the shards' name")
    parser.add_argument("--headerless", action="store_true", help=".bin files are nothing but uint16 tokens")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, help="default %(default)s")
    options = parser.parse_args()
    try:
        if not 0 < options.shard_tokens < 2**31:
            raise ValueError(f"--shard-tokens {options.shard_tokens} has to be in 1..2**31-1")
        write_dataset(convert, options)
    except (ValueError, OSError) as error:
        sys.exit(f"convert.py: {error}")


if __name__ == "__main__":
    main()
