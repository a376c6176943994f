"""The shard format, manifests and the trainer's check: what the scripts in this folder share."""

import glob
import hashlib
import json
import os
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from tokenization import Tokenizer
from tqdm import tqdm

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # train_gpt.py, which is imported where it is needed: PyTorch starts slowly

SHARD_START = [20240520, 1]  # magic and version
HEADER_BYTES = 1024
SHARD_TOKENS = 100_000_000
BLOCK_TOKENS = 1 << 22  # read from a shard at a time


def escape_what_cannot_be_printed() -> None:
    """Let stdout escape what it cannot encode: a terminal may not have all characters, and names of files need not be UTF-8."""
    if hasattr(sys.stdout, "reconfigure"):  # not in a notebook
        sys.stdout.reconfigure(errors="backslashreplace")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def split_documents(arrays: list[np.ndarray], bos: int, title: str) -> Iterator[np.ndarray]:
    """Yield the tokens from each BOS to the next, uint16 (N,), N > 0, with a progress bar. A document may continue in the
    next array. Tokens before the first BOS come first; without a BOS all tokens are one document."""
    parts = []
    with tqdm(desc=title, total=sum(map(len, arrays)), unit="token", unit_scale=True) as bar:
        for array in arrays:
            for start in range(0, len(array), BLOCK_TOKENS):
                block = array[start:start + BLOCK_TOKENS].astype(np.uint16)
                first, *others = np.split(block, np.flatnonzero(block == bos))
                parts.append(first)
                for document in others:
                    if any(map(len, parts)):
                        yield np.concatenate(parts)
                    parts = [document]
                bar.update(len(block))
    if parts:
        yield np.concatenate(parts)


class ShardWriter:
    """Writes the documents of a split to FOLDER_SPLIT_000000.bin, ..., with SHARD_TOKENS tokens in each but the last."""

    def __init__(self, folder: Path, split: str):
        self.folder = folder
        self.name = f"{folder.name}_{split}"
        self.split = {"documents": 0, "bytes": 0, "tokens": 0, "shards": []}
        self.file = None
        self.room = 0  # tokens that the open file can take

    def write(self, tokens: np.ndarray, size: int) -> None:
        """Append a document: its tokens with BOS, integers (N,), and the bytes of its text."""
        self.split["documents"] += 1
        self.split["bytes"] += size
        self.split["tokens"] += len(tokens)
        while len(tokens):
            if self.file is None:
                self.file = (self.folder / f"{self.name}_{len(self.split['shards']):06d}.bin").open("wb")
                self.file.write(bytes(HEADER_BYTES))
                self.room = SHARD_TOKENS
            part = tokens[:self.room].astype("<u2")
            self.file.write(part.tobytes())
            self.room -= len(part)
            tokens = tokens[len(part):]
            if not self.room:
                self.close()

    def close(self) -> dict:
        """Complete the header of the last shard; return the split for the manifest."""
        if self.file:
            count = SHARD_TOKENS - self.room
            with self.file as file:
                file.seek(0)
                file.write(np.array([*SHARD_START, count], dtype="<i4").tobytes())
            path = Path(file.name)
            self.split["shards"].append({"file": path.name, "tokens": count, "sha256": sha256_of(path)})
            self.file = None
        return self.split


def write_dataset(script: str, fill: Callable, options) -> None:
    """Create the folder options.out by fill(folder, options) and print the summary that it returns.

    The folder is hidden until it is complete. If that fails, ends the program with the script's name and the reason."""
    for name in {"SIGTERM", "SIGHUP"} & set(signal.Signals.__members__):  # so that an incomplete folder is removed
        if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN:  # nohup ignores one
            signal.signal(signal.Signals[name], signal.default_int_handler)
    try:
        out = Path(options.out).resolve()
        if out.is_mount():
            raise ValueError(f"--out {options.out!r} is a mounted file system: name a folder in it")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            use = f"train on its data set (DATA_PATH={options.out}), " if (out / "manifest.json").is_file() else ""
            raise ValueError(f"--out {options.out!r} is not an empty folder: {use}delete it, or choose another --out")
        if re.search(r"_(train|val)_[0-9]", out.name):
            raise ValueError(f"--out {out.name!r} looks like the name of a shard: choose another name")
        import train_gpt  # noqa: F401 it checks the data set: if PyTorch is missing, say so before hours of encoding
        out.parent.mkdir(parents=True, exist_ok=True)
        for left in sorted(out.parent.glob(f".{glob.escape(out.name)}-{8 * '?'}")):  # as tempfile names them
            print(f"{script}: {left} was left by another run with this --out; delete it unless that run still goes on",
                  file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as parent:
            folder = Path(parent, out.name)
            folder.mkdir()
            summary = fill(folder, options)
            if out.exists():
                out.rmdir()
            os.replace(folder, out)
    except KeyboardInterrupt:
        sys.exit(f"{script}: stopped; --out is as it was before")
    except ImportError as error:  # of a package that few sources need
        package = "backports.zstd" if str(error.name).startswith("backports") else error.name
        can_install = package and package.split(".")[0].removeprefix("_") not in sys.stdlib_module_names
        sys.exit(f"{script}: {error}" + f": pip install {package}" * bool(can_install))
    except (ValueError, OSError) as error:
        sys.exit(f"{script}: {error}")
    print(summary)


def finish(folder: Path, out: str, origin: dict, tokenizer: Tokenizer, splits: dict) -> str:
    """Write manifest.json and check the data set with the trainer; return a summary with the next command.

    `origin` has the manifest's made_by, sources and split. `splits` has documents, tokens, bytes and shards
    of "train" and "val", and for "val" decoded_bytes and changed_documents. Raises ValueError if the trainer
    refuses the data set."""
    val = splits["val"]
    if not val["decoded_bytes"]:
        raise ValueError("the validation tokens decode to no text, so there would be no score per byte")
    val["original_per_decoded_byte"] = val["bytes"] / val["decoded_bytes"]
    about = {"kind": tokenizer.kind, "name": tokenizer.file.name if tokenizer.file else tokenizer.spec,
             "vocab_size": tokenizer.vocab_size, "sha256": sha256_of(tokenizer.file) if tokenizer.file else None,
             "changes_text": bool(val["changed_documents"])}
    manifest = {**origin, "name": folder.name, "tokenizer": about, "splits": splits}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    check_with_trainer(folder, tokenizer)
    return summarize(out, splits)


def check_with_trainer(folder: Path, tokenizer: Tokenizer) -> dict[str, list[np.ndarray]]:
    """Load the data set with train_gpt.py; return the tokens of each shard of "train" and "val". Raises ValueError if a shard
    or an id is invalid, or if the bytes that it counts in the validation split are not the decoded_bytes in manifest.json."""
    import train_gpt
    try:
        config = train_gpt.Config(data_path=str(folder), tokenizer_path=str(tokenizer.file or tokenizer.spec),
                                  vocab_size=tokenizer.vocab_size, train_seq_len=1)
        train_gpt.Validation(config, train_gpt.Ranks(0, 1, train_gpt.torch.device("cpu")))
        names = [name for name in ("train", "val") if any(folder.glob(f"*_{name}_[0-9]*.bin"))]
        splits = {name: train_gpt.open_split(config, name) for name in names}
        for path in splits.get("train", {}):
            train_gpt.read_shard(path, tokenizer.vocab_size)
    except ValueError as error:
        raise ValueError(f"train_gpt.py cannot use this data set: {error}") from None
    return {name: list(map(map_shard, paths)) for name, paths in splits.items()}


def map_shard(path: Path) -> np.ndarray:
    """The tokens of a shard that the trainer accepts, uint16 (N,), as a memory map."""
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES)


def summarize(out: str, splits: dict) -> str:
    """Return lines with the counts of each split and the next command for the data set in `out`."""
    lines = []
    for name, split in splits.items():
        if split["documents"]:
            lines.append(f"{name}: {split['documents']:,} documents, {split['bytes']:,} bytes, {split['tokens']:,} tokens, "
                         f"{split['bytes'] / split['tokens']:.3f} bytes per token, {len(split['shards'])} shards")
    if dropped := splits["train"].get("dropped_documents"):
        lines.append(f"{dropped:,} training documents were left out: they are also validation documents")
    val = splits["val"]
    if val["changed_documents"]:
        lines.append(f"The tokenizer changes {val['changed_documents']:,} of the {val['documents']:,} validation documents. "
                     f"The split's {val['bytes']:,} bytes become {val['decoded_bytes']:,}. Divide val_bpb by "
                     f"{val['original_per_decoded_byte']:.6f} to get bits per original byte.")
    here = os.path.relpath(REPOSITORY)
    if splits["train"]["documents"]:  # run.sh sets what suits the machine, and reads paths from its own folder
        command = [os.path.join(here, "run.sh"), f"DATA_PATH={os.path.relpath(out, REPOSITORY)}"]
    else:
        command = ["python", os.path.join(here, "train_gpt.py"), f"DATA_PATH={out}", "ITERATIONS=0", "INIT_FROM=RUN_ID"]
    lines.append("next: " + shlex.join(command))
    return "\n".join(lines)
