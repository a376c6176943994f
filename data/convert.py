"""Convert token files of other projects into shards with a manifest that train_gpt.py can check.

    python data/convert.py fineweb10B/ --tokenizer gpt2 --out data/datasets/fineweb_gpt2
    python data/convert.py openwebtext/ --dtype uint16 --tokenizer gpt2 --out data/datasets/owt

A FILE is a .bin of modded-nanogpt or llm.c, a .npy of build-nanogpt, a .bin of nanoGPT (with --dtype), or a folder of them.
Files with "val", "valid", "validation", "dev" or "test" in their names become the validation split, the others the training split.
If none has, folders of these names decide.
"""

import argparse
from collections.abc import Iterator
from filecmp import cmp
from itertools import product
from pathlib import Path

import numpy as np
from shards import (
    SHARD_START, ShardWriter, escape_what_cannot_be_printed, finish, given_path, map_shard, split_documents, write_dataset,
)
from sources import PLACEHOLDER, PLACEHOLDER_ADVICE, SPLITS, words_of
from tokenization import load_tokenizer


def open_tokens(path: Path, dtype: str | None) -> np.ndarray:
    """Return a file's token ids as a memory map of integers (N,), N > 0. `dtype` is that of a .bin without a header.

    Raises ValueError if the file is of another kind or damaged."""
    with path.open("rb") as file:
        start = file.peek(8)
        if PLACEHOLDER.match(start):
            raise ValueError(f"{path} {PLACEHOLDER_ADVICE}")
        if dtype and start.startswith((np.array(SHARD_START, dtype="<i4").tobytes(), b"\x93NUMPY")):
            raise ValueError(f"{path} has a header: leave out --dtype, and name it .npy if it is NumPy's")
    try:
        if path.suffix.lower() == ".npy":
            tokens = np.load(path, mmap_mode="r")
        elif dtype:
            tokens = np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")
        else:
            import train_gpt
            train_gpt.count_tokens(path)
            return map_shard(path)
    except Exception as error:  # NumPy raises many types
        hint = "" if path.suffix.lower() == ".npy" or dtype else "; ids without a header, as nanoGPT's, need --dtype uint16"
        raise ValueError(f"{path} cannot be read: {error}{hint}") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or len(tokens) == 0:
        raise ValueError(f"{path} does not hold a row of token ids")
    if dtype and len(tokens) > 1 and not tokens[1::2].any():  # id 0 is a common token of GPT-2's, without an error
        raise ValueError(f"{path} has a 0 after each id: it holds wider ids than {dtype}; choose another --dtype")
    return tokens


def is_validation(name: str) -> bool:
    """Whether the last word of a name that is one of a split is not "train"."""
    splits = [SPLITS[word] for word in words_of(name) if word in SPLITS]
    return splits[-1:] not in ([], ["train"])


def find_files(names: list[str]) -> dict[str, list[Path]]:
    """Return the files of "train" and "val" by their names, or, if those say nothing, by the names of their folders. Raises
    ValueError if there are none for val."""
    once = {}  # by the files' real paths
    for name in names:
        found = sorted(path for path in Path(name).glob("[!.]*") if path.suffix.lower() in (".bin", ".npy")) or [Path(name)]
        if not found[0].is_file():
            raise ValueError(f"FILE {name!r} is neither a .bin or .npy file nor a folder of them")
        for path in found:
            once.setdefault(path.resolve(), path)
    paths = [*once.values()]
    val = [path for path in paths if is_validation(path.name)]
    in_folders = [path for path in paths if SPLITS.get(path.parent.name.lower()) in ("val", "test")]
    if not val and len(in_folders) < len(paths):  # else the folder may have its name for another reason
        val = in_folders
    if not val:
        raise ValueError(f"none of {', '.join(path.name for path in paths[:5])} has val or test in its name; the "
                         "validation split must be a file of its own")
    return {"train": [path for path in paths if path not in val], "val": val}


def read_files(paths: list[Path], dtype: str | None, bos: int) -> Iterator[np.ndarray]:
    """Yield the tokens of files, which are opened one after the other: there may be more than can be open at once. Each document
    then starts with BOS; in nanoGPT's files each ends with it."""
    if paths:
        last = open_tokens(paths[-1], dtype)
        is_at_end = int(open_tokens(paths[0], dtype)[0]) != bos and int(last[-1]) == bos
        end = len(last) - is_at_end
        yield last[end:]
        for path in paths[:-1]:
            yield open_tokens(path, dtype)
        yield last[:end]


def convert(folder: Path, options) -> str:
    """Write the data set into an empty folder; return a summary."""
    files = find_files(options.files)
    tokenizer = load_tokenizer(options.tokenizer, folder)
    splits = {}
    for part, paths in files.items():
        total = 0
        for path in paths:
            array = open_tokens(path, options.dtype)
            total += len(array)
            least, largest = int(array.min()), int(array.max())
            if least < 0 or largest >= tokenizer.vocab_size:
                raise ValueError(f"{path} holds tokens {least} to {largest}, but --tokenizer {options.tokenizer!r} has "
                                 f"{tokenizer.vocab_size} tokens")
        writer = ShardWriter(folder, part)
        arrays = read_files(paths, options.dtype, tokenizer.bos)
        for document in split_documents(arrays, tokenizer.bos, part, total):
            writer.write(document, tokenizer.count_bytes(document[document != tokenizer.bos]))
        splits[part] = writer.close()
    # The original text is not known: what the tokens decode to stands for it.
    splits["val"].update(decoded_bytes=splits["val"]["bytes"], changed_documents=0)
    origin = {"made_by": "data/convert.py 2", "sources": [path.name for paths in files.values() for path in paths],
              "split": {"val_files": [path.name for path in files["val"]]}}
    copies = [f"warning: {one} and {other} are equal: the model would be trained on text that it is scored on"
              for one, other in product(files["train"], files["val"]) if cmp(one, other, shallow=False)]
    return "\n".join([*copies[:1], finish(folder, options.out, origin, tokenizer, splits)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=given_path, metavar="FILE", help=".bin or .npy files, or folders of them")
    parser.add_argument("--tokenizer", required=True, type=given_path,
                        help="gpt2 or another encoding of tiktoken, byte260, or a SentencePiece .model")
    parser.add_argument("--out", required=True, type=given_path, help="folder of the data set; its name is the shards' name")
    parser.add_argument("--dtype", choices=["uint16", "uint32", "int32", "int64"],
                        help=".bin files have no header, only ids of this type (nanoGPT: uint16)")
    parser.set_defaults(part=(1, 1))  # all of it
    escape_what_cannot_be_printed()
    write_dataset("convert.py", convert, parser.parse_args())


if __name__ == "__main__":
    main()
