"""Convert token files of other projects into shards with a manifest that train_gpt.py can check.

    python data/convert.py fineweb10B/ --tokenizer gpt2 --out data/datasets/fineweb_gpt2
    python data/convert.py edu_fineweb10B/ --tokenizer gpt2 --out data/datasets/edu_gpt2
    python data/convert.py openwebtext/ --headerless --tokenizer gpt2 --out data/datasets/owt
    python data/convert.py chars/ --headerless --tokenizer chars/meta.pkl --out data/datasets/chars

A FILE is a .bin of modded-nanogpt or llm.c, a .npy of build-nanogpt, a .bin of nanoGPT (--headerless), or a
folder of them. Files with "val", "valid", "validation" or "test" in their names become the validation split, the others the
training split.
"""

import argparse
import json
import pickle
import re
from pathlib import Path

import numpy as np
from shards import ShardWriter, finish, split_documents, write_dataset
from tokenization import Tokenizer, load_tokenizer

SPLIT_NAME = re.compile(r"(?:^|[_.-])(train|val|valid|validation|test)(?=[_.-])")


class PlainUnpickler(pickle.Unpickler):
    """Reads dicts, strings and numbers, and refuses anything that would run code."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def open_tokens(path: Path, headerless: bool, dtype: str) -> np.ndarray:
    """Return a file's token ids as a memory map of integers (N,), N > 0.

    Raises ValueError if the file is of another kind or damaged."""
    try:
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r")
        elif headerless:
            tokens = np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")
        else:
            import train_gpt
            return train_gpt.open_shard(path)
    except Exception as error:  # NumPy raises many types
        hint = "" if path.suffix == ".npy" or headerless else "; ids without a header, as nanoGPT's, need --headerless"
        raise ValueError(f"{path} cannot be read: {error}{hint}") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or len(tokens) == 0:
        raise ValueError(f"{path} does not hold a row of token ids")
    if headerless and len(tokens) > 1 and not tokens[1::2].any():  # id 0 is a common token of GPT-2's, without an error
        raise ValueError(f"{path} has a 0 after each id: it holds wider ids than {dtype}; choose another --dtype")
    return tokens


def find_files(names: list[str]) -> dict[str, list[Path]]:
    """Return the files of "train" and "val" by their names. Raises ValueError if there are none for val."""
    files = []
    for path in map(Path, names):
        if path.is_dir():
            found = sorted(p for p in path.iterdir() if p.suffix in (".bin", ".npy"))
        else:
            found = [path] if path.is_file() else []
        if not found:
            raise ValueError(f"FILE {str(path)!r} is neither a .bin or .npy file nor a folder of them")
        files += found
    splits = {"train": [], "val": []}
    for path in files:
        last = SPLIT_NAME.findall(path.name)[-1:]
        splits["train" if last in ([], ["train"]) else "val"].append(path)
    if not splits["val"]:
        raise ValueError(f"none of {', '.join(path.name for path in files[:5])} has val or test in its name; "
                         f"the validation split must be a file of its own")
    return splits


def write_vocabulary(meta: str, path: Path) -> None:
    """Write the characters of nanoGPT's meta.pkl as a vocabulary .json. Raises ValueError if it is none."""
    try:
        with open(meta, "rb") as file:
            characters = PlainUnpickler(file).load()["itos"]
        tokens = [characters[i].encode("utf-8").decode("latin-1") for i in range(len(characters))]
    except Exception as error:  # a damaged pickle fails in many ways
        raise ValueError(f"--tokenizer {meta!r} is not a meta.pkl of nanoGPT: {error!r}") from None
    path.write_text(json.dumps({"kind": "table", "bos": -1, "tokens": tokens}) + "\n", encoding="utf-8")


def move_bos(arrays: list[np.ndarray], bos: int) -> list[np.ndarray]:
    """Return the arrays so that each document starts with BOS; in nanoGPT's files each ends with it."""
    if not arrays or int(arrays[0][0]) == bos or int(arrays[-1][-1]) != bos:
        return arrays
    return [arrays[-1][-1:], *arrays[:-1], arrays[-1][:-1]]


def write_split(folder: Path, part: str, arrays: list[np.ndarray], tokenizer: Tokenizer) -> dict:
    """Write a split as shards; return it for the manifest."""
    writer = ShardWriter(folder, part)
    for document in split_documents(arrays, tokenizer.bos, part):
        writer.write(document, tokenizer.count_bytes(document[document != tokenizer.bos]))
    return writer.close()


def convert(folder: Path, options) -> str:
    """Write the data set into an empty folder; return a summary."""
    files = find_files(options.files)
    arrays = {part: [open_tokens(path, options.headerless, options.dtype) for path in files[part]] for part in files}
    if options.tokenizer.endswith(".pkl"):
        path = folder / "tokenizer.json"
        write_vocabulary(options.tokenizer, path)
        tokenizer = load_tokenizer(str(path))
    else:
        tokenizer = load_tokenizer(options.tokenizer, folder)
    for part, paths in files.items():
        for path, array in zip(paths, arrays[part]):
            for token in (int(array.min()), int(array.max())):
                if not 0 <= token < tokenizer.vocab_size:
                    raise ValueError(f"{path} holds token {token}, but --tokenizer {options.tokenizer!r} has "
                                     f"{tokenizer.vocab_size} tokens")
        arrays[part] = move_bos(arrays[part], tokenizer.bos)
    splits = {part: write_split(folder, part, arrays[part], tokenizer) for part in files}
    # The original text is not known: what the tokens decode to stands for it.
    splits["val"].update(decoded_bytes=splits["val"]["bytes"], changed_documents=0)
    origin = {"made_by": "data/convert.py 2", "sources": [path.name for paths in files.values() for path in paths],
              "split": {"val_files": [path.name for path in files["val"]]}}
    return finish(folder, options.out, origin, tokenizer, splits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE", help=".bin or .npy files, or folders of them")
    parser.add_argument("--tokenizer", required=True, help="gpt2 or another encoding of tiktoken, byte260, a "
                        "SentencePiece .model, a vocabulary .json, or nanoGPT's meta.pkl")
    parser.add_argument("--out", required=True, help="folder of the data set; its name is the shards' name")
    parser.add_argument("--headerless", action="store_true", help=".bin files hold only ids (nanoGPT)")
    parser.add_argument("--dtype", default="uint16", choices=["uint16", "uint32", "int32", "int64"],
                        help="type of the ids with --headerless (default %(default)s)")
    write_dataset("convert.py", convert, parser.parse_args())


if __name__ == "__main__":
    main()
