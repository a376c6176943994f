"""The shard format, manifests and the trainer's check: what the scripts in this folder share."""

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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


def count_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the number of CPU cores that this process may use, as train_gpt.py does, whose import takes a second and 120 MB."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    used, period = quota.read_text().split() if quota.exists() else ("max", "1")  # microseconds
    return cores if used == "max" else max(1, min(cores, int(used) // int(period)))


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """See that what was written to a file is on the disk, where it outlives a power cut."""
    with path.open("rb") as file:  # It may be a copy of a file that nobody may write.
        os.fsync(file.fileno())


def split_documents(arrays: Iterable[np.ndarray], bos: int, title: str, total: int) -> Iterator[np.ndarray]:
    """Yield the tokens from each BOS to the next, uint16 (N,), N > 0, with a progress bar. A document may continue in the
    next array. Tokens before the first BOS come first; without a BOS all tokens are one document. `total` is the number of
    tokens."""
    parts = []
    with tqdm(desc=title, total=total, unit="token", unit_scale=True) as bar:
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
    """Writes the documents of a split to NAME_SPLIT_000000.bin, ..., with SHARD_TOKENS tokens in each but the last. `split` is
    what the manifest says of them."""

    def __init__(self, folder: Path, split: str, name: str | None = None, saved: dict | None = None):
        """`saved` is the `split` of a writer that was stopped; this one goes on from there. NAME is that of the folder by default.

        Raises ValueError if a file is shorter than `saved` says."""
        self.folder = folder
        self.name = f"{name or folder.name}_{split}"
        self.split = saved or {"documents": 0, "bytes": 0, "tokens": 0, "shards": []}
        self.file = None
        self.room = 0  # tokens that the open file can take
        counts = [shard["tokens"] for shard in self.split["shards"]]
        counts.append(self.split["tokens"] - sum(counts))
        for number, count in enumerate(counts):
            path = self.path(number)
            if count and (not path.exists() or path.stat().st_size < HEADER_BYTES + 2 * count):
                raise ValueError(f"{path} is missing or has become shorter; delete {folder.parent} to begin again")
        if counts[-1]:
            self.file = self.path(len(counts) - 1).open("r+b")
            self.file.truncate(HEADER_BYTES + 2 * counts[-1])
            self.file.seek(0, os.SEEK_END)
            self.room = SHARD_TOKENS - counts[-1]

    def path(self, number: int) -> Path:
        return self.folder / f"{self.name}_{number:06d}.bin"

    def write(self, tokens: np.ndarray, size: int, documents: int = 1) -> None:
        """Append documents: their tokens with BOS, integers (N,), and the bytes of their text."""
        self.split["documents"] += documents
        self.split["bytes"] += size
        self.split["tokens"] += len(tokens)
        while len(tokens):
            if self.file is None:
                self.file = self.path(len(self.split["shards"])).open("wb")
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
                self.sync()
            path = Path(file.name)
            self.split["shards"].append({"file": path.name, "tokens": count, "sha256": sha256_of(path)})
            self.file = None
        return self.split

    def sync(self) -> None:
        """See that what was written is on the disk."""
        if self.file:
            self.file.flush()
            os.fsync(self.file.fileno())


def given_path(text: str) -> str:
    """Return the path in an argument, with ~ as the trainer takes it. Raises ArgumentTypeError if it is empty."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty: is its variable set?")
    return os.path.expanduser(text)


def at_least(least: int, what: str) -> Callable[[str], int]:
    """Return a type for argparse: a whole number of `least` or more. `what` is counted, and ends the message of an error."""
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of {what}")
        return int(text)

    return parse


def lock(path: Path, wait: bool = False):
    """Open a file that no other process can have until it is closed, or until this one ends. If another one has it, waits or raises
    ValueError. Does nothing more where files have no locks."""
    file = path.open("w")
    try:
        import fcntl
        fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (BlockingIOError, PermissionError):
        raise ValueError(f"another run is writing {path.with_suffix('')}: wait for it, or choose another --out") from None
    except (ImportError, OSError):  # Windows; some network file systems
        pass
    return file


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP do what Ctrl-C does, unless nohup ignores them. Then they are as before, for notebooks."""
    numbers = [signal.Signals[name] for name in {"SIGTERM", "SIGHUP"} & set(signal.Signals.__members__)]
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@ended_by_signals()
def write_dataset(script: str, fill: Callable, options) -> None:
    """Create the folder options.out by fill(folder, options) and print the summary that it returns.

    The folder is OUT.unfinished/NAME until it has a manifest. If that fails, ends the program with the script's name and the
    reason. OUT.unfinished is then deleted, unless prepare.py has saved there what the same command can use."""
    options.held = []  # locks: this part's, then that for joining
    try:
        out = Path(options.out).resolve()
        if out.is_mount():
            raise ValueError(f"--out {options.out!r} is a mounted file system: name a folder in it")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            use = f"train on its data set (DATA_PATH={options.out}), delete it, or " if (out / "manifest.json").is_file() else ""
            raise ValueError(f"--out {options.out!r} is not an empty folder: {use}choose another --out")
        if re.search(r"_(train|val)_[0-9]", out.name):
            raise ValueError(f"--out {out.name!r} looks like the name of a shard: choose another name")
        if importlib.util.find_spec("torch") is None:  # the last check needs it: say so before hours of encoding
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        unfinished = out.with_name(f"{out.name}.unfinished")
        folder = unfinished / out.name
        unfinished.mkdir(parents=True, exist_ok=True)
        if any(unfinished.iterdir()) and not any(unfinished.glob("part-*.lock")):
            raise ValueError(f"{unfinished}, where the data set would grow, holds other files: choose another --out")
        part, parts = options.part
        options.held.append(lock(unfinished / f"part-{part}-of-{parts}.lock"))
        if not is_saved(unfinished):
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
        elif script != "prepare.py":
            raise ValueError(f"{unfinished} was begun by prepare.py: delete it, or choose another --out")
        folder.mkdir(exist_ok=True)
        summary = fill(folder, options)
        if (folder / "manifest.json").exists():
            for path in folder.iterdir():  # else OUT may hold shards and, after a power cut, an empty manifest.json
                sync(path)
            if out.exists():
                out.rmdir()
            os.replace(folder, out)
            for file in options.held:  # an open one keeps the folder, on network file systems and Windows
                file.close()
                shutil.rmtree(unfinished, ignore_errors=True)
        print(summary)
        return
    except KeyboardInterrupt:
        problem = "stopped"
    except ImportError as error:  # of a package that few sources need
        package = "backports.zstd" if str(error.name).startswith("backports") else error.name
        can_install = package and package.split(".")[0].removeprefix("_") not in sys.stdlib_module_names
        problem = f"{error}" + f": pip install {package}" * bool(can_install)
    except MemoryError:
        problem = "out of memory"
    except (ValueError, OSError) as error:
        problem = str(error)
    if options.held and is_saved(unfinished):
        problem += f"; the same command goes on from {unfinished}" * (str(unfinished) not in problem)
    elif options.held:
        problem += "; --out is as it was before" * (problem == "stopped")
        options.held[0].close()
        if len(list(unfinished.glob("*.lock"))) == 1:  # no other part runs
            shutil.rmtree(unfinished)
    sys.exit(f"{script}: {problem}")


def is_saved(unfinished: Path) -> bool:
    return any(unfinished.glob("part-*/progress.json"))


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


def check_with_trainer(folder: Path, tokenizer: Tokenizer) -> dict[str, dict[Path, int]]:
    """Load the data set with train_gpt.py; return the tokens in each shard of "train" and "val". Raises ValueError if a shard
    or an id is invalid, or if the bytes that it counts in the validation split are not the decoded_bytes in manifest.json."""
    import train_gpt
    try:
        config = train_gpt.Config(data_path=str(folder), tokenizer_path=str(tokenizer.file or tokenizer.spec),
                                  vocab_size=tokenizer.vocab_size, train_seq_len=1)
        train_gpt.Validation(config, train_gpt.Ranks(0, 1, train_gpt.torch.device("cpu")))
        names = [name for name in ("train", "val") if any(folder.glob(f"*_{name}_[0-9]*.bin"))]
        splits = {name: train_gpt.open_split(config, name) for name in names}
        for path, count in splits.get("train", {}).items():
            for start in range(0, count, BLOCK_TOKENS):
                train_gpt.read_shard(path, tokenizer.vocab_size, start, min(BLOCK_TOKENS, count - start))
    except ValueError as error:
        raise ValueError(f"train_gpt.py cannot use this data set: {error}") from None
    return splits


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
        command = ["python", os.path.join(here, "train_gpt.py"), f"DATA_PATH={out}", "ITERATIONS=0", "INIT_FROM=FILE"]
    lines.append("next: " + shlex.join(command))
    return "\n".join(lines)
