"""Fetch published token shards and their tokenizer. What was interrupted continues where it stopped.

    python data/download.py --variant sp1024 --train-shards 10
    python data/download.py --variant gpt2 --train-shards 1 --out data/datasets/small_gpt2

spN and byte260 come from the challenge's dataset repository, whose manifest.json says what there is;
gpt2 comes from a repository of bare shards. Shards go to data/datasets/NAME and the tokenizer to
data/tokenizers; with --out, both go to OUT. The validation split is always fetched whole. Every file
is checked before it gets its name there: size, published sha256, and a shard's header.

It needs huggingface_hub, whose variables hold: HF_HOME (with its cache), HF_ENDPOINT, HF_TOKEN, those
for proxies; HF_HUB_OFFLINE=1 takes files from the cache alone. The client itself throws away the
beginning of a file when its process ends or its connection is reset. So this script fills the file's
place in the cache by plain HTTP with Range, and the client finds it there.
"""

import argparse
import hashlib
import itertools
import json
import os
import posixpath
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from prepare import HEADER_BYTES, MAKERS, REPOSITORY, SHARD_MAGIC, SHARD_VERSION, Progress

SOURCE, GPT2_SOURCE = ("willdepueoai/parameter-golf", "datasets"), ("kjj0/fineweb10B-gpt2", "")  # and the folder
PREFIX = "fineweb10B_"  # the name of a data set is this and the variant
BUILT_IN = {"byte260": 260, "gpt2": 50257}  # tokenizers that the trainer knows without a file
DOCUMENTS = ("docs_selected.jsonl", "docs_selected.source_manifest.json")
IDLE_REQUESTS = 5  # so many in a row that bring nothing end the download
ADVICE = {  # for the client's errors; the first that fits
    "GatedRepoError": "the repository is gated: accept its terms on its page and set HF_TOKEN",
    "RepositoryNotFoundError": "no such repository, or not for you: check --repo; a private one needs HF_TOKEN",
    "RevisionNotFoundError": "no such revision: check --revision",
    "RemoteEntryNotFoundError": "it is not there: check --repo and --folder",
}


class Remote(NamedTuple):
    """A file of the repository, as the listing has it."""

    path: str
    size: int
    digest: str | None  # sha256 of a large file, git's sha1 of a small one; unknown offline


class DataSet(NamedTuple):
    """What is published of a variant."""

    folder: str  # within the repository's folder
    tokenizer: str  # a path in there, or one of BUILT_IN
    vocab_size: int
    stats: dict[str, int | None]  # files_val, files_train, tokens_val, tokens_train


class Repository:
    """A folder of a dataset repository at one revision, and the hub's cache of it.

    Offline the cache stands in for the listing: sizes are its files', and hashes are unknown."""

    def __init__(self, repo: str, revision: str, folder: str):
        """ValueError if the client is missing, or the folder cannot be listed."""
        try:
            import huggingface_hub
            from huggingface_hub import constants, errors, file_download, utils
            from huggingface_hub.utils import http_stream_backoff
        except ImportError as error:
            raise ValueError(f"huggingface_hub 1.0 or newer is needed: pip install huggingface_hub ({error})") from None
        self.hub, self.errors, self.utils, self.stream = huggingface_hub, errors, utils, http_stream_backoff
        self.offline, self.timeout = constants.HF_HUB_OFFLINE, constants.HF_HUB_DOWNLOAD_TIMEOUT
        self.repo, self.folder, self.at = repo, folder, {"repo_type": "dataset", "revision": revision}
        self.title = f"{repo} at {revision!r}" + " in the cache (HF_HUB_OFFLINE is set)" * self.offline
        self.cache = Path(constants.HF_HUB_CACHE, file_download.repo_folder_name(repo_id=repo, repo_type="dataset"))
        self.files = {} if self.offline else self.list_files()

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Turns the client's errors into a ValueError of one line that says what to do."""
        try:
            yield
        except (self.errors.HTTPError, self.errors.LocalEntryNotFoundError) as error:
            if isinstance(error, self.errors.LocalEntryNotFoundError):  # it hides why the hub was of no help
                error = error.__cause__ or error
            advice = [text for name, text in ADVICE.items() if isinstance(error, getattr(self.errors, name))]
            if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
                advice.append(ADVICE["RepositoryNotFoundError"])
            advice.append(f"{' '.join(str(error).split()) or type(error).__name__}; the same command continues")
            raise ValueError(f"{what} of {self.title} could not be fetched: {advice[0]}") from None

    def list_files(self) -> dict[str, Remote]:
        """All files below the folder, by path."""
        try:
            with self.explained(f"the list of {self.folder or 'files'}"):
                entries = list(self.hub.HfApi().list_repo_tree(
                    self.repo, self.folder or None, recursive=True, **self.at))
            files = [Remote(entry.path, entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id)
                     for entry in entries if hasattr(entry, "blob_id")]  # a folder has none
            if not all(re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", file.digest) for file in files):
                raise TypeError("files without a hash")
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the list of {self.title} is not what a hub sends ({error!r}): check HF_ENDPOINT "
                             f"and proxies") from None
        return {file.path: file for file in files}

    def find(self, path: str) -> Remote | None:
        """The file at `path` in the folder, or None."""
        path = posixpath.join(self.folder, path)
        if not self.offline:
            return self.files.get(path)
        cached = self.hub.try_to_load_from_cache(self.repo, path, **self.at)
        return Remote(path, os.path.getsize(cached), None) if isinstance(cached, str) else None

    def need(self, path: str) -> Remote:
        """The same, but ValueError instead of None."""
        if (file := self.find(path)) is None:
            raise ValueError(f"{self.title} lacks {posixpath.join(self.folder, path)}")
        return file

    def fetch(self, file: Remote, progress: Callable[[int], None]) -> Path:
        """Where in the cache the file lies, whole and checked. `progress(n)` is told of n more bytes.
        ValueError if it cannot be had, or is still wrong after it was fetched anew."""
        for last in (self.offline, True):  # offline there is no second time
            with self.explained(file.path):
                if not self.offline:
                    self.complete(file, progress)
                pointer = Path(self.hub.hf_hub_download(self.repo, file.path, **self.at))
            if not (problem := find_problem(pointer, file)):
                return pointer.resolve()
            if not self.offline:
                for name in (pointer.resolve(), pointer, self.cache / "blobs" / file.digest):
                    name.unlink(missing_ok=True)
                progress(-file.size)
            if last:
                raise ValueError(f"{file.path} of {self.title} is damaged: it has {problem}")

    def complete(self, file: Remote, progress: Callable[[int], None]) -> None:
        """Fetches what the cache lacks of the file; other processes wait for the one that does. OSError
        or the client's error after IDLE_REQUESTS that brought nothing."""
        blob = self.cache / "blobs" / file.digest
        partial = blob.with_name(f"{file.digest}.incomplete")
        lock = self.cache.parent / ".locks" / self.cache.name / f"{file.digest}.lock"
        blob.parent.mkdir(parents=True, exist_ok=True)
        lock.parent.mkdir(parents=True, exist_ok=True)
        with self.utils.WeakFileLock(lock):
            if blob.exists():
                progress(file.size)
                return
            partial.touch()
            progress(partial.stat().st_size)
            idle = 0
            while (have := partial.stat().st_size) < file.size:
                error = OSError(f"{file.path} of {self.title}: the server ends after {have} of {file.size} bytes")
                try:
                    self.append(file, partial, have, progress)
                except self.errors.HfHubHTTPError:  # an answer; the client has repeated what can be repeated
                    raise
                except self.errors.HTTPError as broken:  # the connection
                    error = broken
                idle = 0 if partial.stat().st_size > have else idle + 1
                if idle == IDLE_REQUESTS:
                    raise error
                time.sleep(idle)
            os.replace(partial, blob)

    def append(self, file: Remote, partial: Path, have: int, progress: Callable[[int], None]) -> None:
        """One request for what follows the first `have` bytes of the file."""
        url = self.hub.hf_hub_url(self.repo, file.path, **self.at)
        headers = {**self.utils.build_hf_headers(), "Range": f"bytes={have}-", "Accept-Encoding": "identity"}
        with self.stream("GET", url, headers=headers, timeout=self.timeout, retry_on_exceptions=()) as answer:
            self.utils.hf_raise_for_status(answer)
            continues = answer.status_code == 206  # else the server sends the whole file
            progress(0 if continues else -have)
            with partial.open("ab" if continues else "wb") as output:
                for block in answer.iter_bytes():
                    output.write(block)
                    progress(len(block))


def find_problem(path: Path, file: Remote) -> str:
    """What is wrong with a local copy of the file, as found and as wanted; empty if nothing is."""
    size = path.stat().st_size
    if size != file.size:
        return f"{size} bytes, not {file.size}"
    if file.digest:
        empty = hashlib.sha256() if len(file.digest) == 64 else hashlib.sha1(b"blob %d\0" % size)
        with path.open("rb") as content:
            digest = hashlib.file_digest(content, lambda: empty).hexdigest()
        if digest != file.digest:
            return f"{empty.name} {digest}, not {file.digest}"
    if file.path.endswith(".bin"):
        header, wanted = np.fromfile(path, "<i4", 3).tolist(), [SHARD_MAGIC, SHARD_VERSION, count_tokens([file])]
        if header != wanted or not size == HEADER_BYTES + 2 * wanted[2] > HEADER_BYTES:
            return f"{size} bytes and the header {header}; a shard of that size would have {wanted}"
    return ""


def count_tokens(shards: list[Remote]) -> int:
    """The tokens of shards of these sizes."""
    return sum((shard.size - HEADER_BYTES) // 2 for shard in shards)


def find_dataset(repository: Repository, variant: str) -> DataSet:
    """By the manifest or, where there is none, at the usual places. ValueError for unknown variants."""
    if manifest := repository.find("manifest.json"):
        return read_manifest(repository.fetch(manifest, lambda size: None), repository.title, variant)
    folder = "" if variant == "gpt2" else f"datasets/{PREFIX}{variant}"
    if variant in BUILT_IN:
        return DataSet(folder, variant, BUILT_IN[variant], {})
    if not re.fullmatch(r"sp\d+", variant):
        raise ValueError(f"--variant {variant!r} has to be one of spN, byte260, gpt2")
    return DataSet(folder, f"tokenizers/fineweb_{variant[2:]}_bpe.model", int(variant[2:]), {})


def read_manifest(path: Path, title: str, variant: str) -> DataSet:
    """What the repository's manifest says of a variant. ValueError if it lacks the variant or a key,
    has a path that leads elsewhere, or is no JSON."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        sets = {entry["name"]: entry for entry in manifest["datasets"]}
        if PREFIX + variant not in sets:
            raise ValueError(f"--variant {variant!r} is not in {title}; it has "
                             f"{', '.join(sorted(name.removeprefix(PREFIX) for name in sets))}")
        entry = sets[PREFIX + variant]
        tokenizer = {item["name"]: item for item in manifest["tokenizers"]}[entry["tokenizer_name"]]
        model = variant if variant in BUILT_IN else tokenizer.get("model_path") or tokenizer["path"]
        for name in (entry["path"], model):
            if not re.fullmatch(r"(?!.*\.\.)[\w.-]+(/[\w.-]+)*", name):
                raise ValueError(f"manifest.json of {title} has {name!r}, which is no path within its folder")
        given, stats = entry.get("stats", {}), {}
        for key, split in itertools.product(("files", "tokens"), ("val", "train")):
            stats[f"{key}_{split}"] = given.get(f"{key}_{split}", given.get(key, {}).get(split))
        vocab_size = entry.get("vocab_size", tokenizer.get("vocab_size"))
        if not isinstance(vocab_size, int) or not all(isinstance(number, int | None) for number in stats.values()):
            raise TypeError(f"vocab_size {vocab_size!r}, stats {stats}")
        return DataSet(entry["path"], model, vocab_size, stats)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"manifest.json of {title} is no JSON: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"manifest.json of {title} lacks a key or has a wrong value: {error!r}") from None


def find_shards(repository: Repository, dataset: DataSet, split: str, wanted: int | None) -> list[Remote]:
    """The first `wanted` shards of a split; None: all. ValueError if there are fewer, or their tokens
    are not as many as the manifest says."""
    shards, published = [], dataset.stats.get(f"files_{split}")
    first = int(split == "train" and dataset.tokenizer == "gpt2")  # where the numbers begin
    for number in itertools.count(first):
        path = posixpath.join(dataset.folder, f"fineweb_{split}_{number:06d}.bin")
        if len(shards) == wanted or (shard := repository.find(path)) is None:
            break
        shards.append(shard)
    wanted = max(published or 1, len(shards)) if wanted is None else wanted
    if len(shards) < wanted:
        raise ValueError(f"{repository.title} has {len(shards)} {split} shards, not {wanted}: it lacks "
                         f"{posixpath.join(repository.folder, path)}")
    tokens = dataset.stats.get(f"tokens_{split}")
    if tokens is not None and len(shards) == published and count_tokens(shards) != tokens:
        raise ValueError(f"the {split} shards of {repository.title} have {count_tokens(shards)} tokens, but its "
                         f"manifest.json says {tokens}")
    return shards


def put(source: Path, target: Path) -> None:
    """Gives a file of the cache its name in OUT, by a hard link or else by a copy. The name appears
    when the file is whole, also where two processes do this at once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent) as folder:
        whole = Path(folder, target.name)
        try:
            os.link(source, whole)
        except OSError:  # another disk, or one without links
            shutil.copyfile(source, whole)
        os.replace(whole, target)


def download(options) -> str:
    """Everything; returns what is to be said about it. ValueError or OSError says what went wrong."""
    data = REPOSITORY / "data"
    out = Path(options.out) if options.out else data / "datasets" / (PREFIX + options.variant)
    manifest = out / "manifest.json"
    made_by = manifest.read_text(encoding="utf-8", errors="replace") if manifest.is_file() else ""
    if any(maker in made_by for maker in MAKERS):
        raise ValueError(f"{out} holds a data set of prepare.py or convert.py, with which others must not mix: "
                         f"name another --out")
    if options.train_shards < 0:
        raise ValueError(f"--train-shards {options.train_shards} has to be 0 (only validation) or more")
    repo, folder = GPT2_SOURCE if options.variant == "gpt2" else SOURCE
    repository = Repository(options.repo or repo, options.revision,
                            folder if options.folder is None else options.folder.strip("/"))
    dataset = find_dataset(repository, options.variant)
    shards = {"val": find_shards(repository, dataset, "val", None),
              "train": find_shards(repository, dataset, "train", options.train_shards)}
    files = {out / posixpath.basename(shard.path): shard for split in shards.values() for shard in split}
    tokenizer = dataset.tokenizer
    if tokenizer not in BUILT_IN:
        tokenizer = (out if options.out else data / "tokenizers") / posixpath.basename(tokenizer)
        files[tokenizer] = repository.need(dataset.tokenizer)
    if options.documents:
        files |= {data / "documents" / name: repository.need(name) for name in DOCUMENTS}
    for other in {*out.glob("*.bin")} - files.keys():  # more shards of the same set are welcome
        published = repository.find(posixpath.join(dataset.folder, other.name))
        if published is None or find_problem(other, published):
            raise ValueError(f"{other} is no shard of --variant {options.variant}: name another --out, or move it away")
    size, kept = sum(file.size for file in files.values()), 0
    with Progress("fetching", size) as progress:
        for target, file in files.items():
            if target.is_file() and not find_problem(target, file):
                kept += 1
                progress(file.size)
            else:
                put(repository.fetch(file, progress), target)
    lines = [f"{len(files)} files of {size:,} bytes in all, of which {kept} were there already; "
             f"{count_tokens(shards['val']):,} val and {count_tokens(shards['train']):,} train tokens"]
    if others := {*out.glob("*.bin")} - files.keys():
        lines.append(f"{len(others)} more .bin files lie in {out}; train_gpt.py reads them too if they are shards")
    lines.append("next: " + shlex.join(["python", "train_gpt.py", f"DATA_PATH={out}", f"TOKENIZER_PATH={tokenizer}",
                                        f"VOCAB_SIZE={dataset.vocab_size}"]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", required=True, help="sp1024, sp4096, sp8192, byte260 or gpt2")
    parser.add_argument("--train-shards", type=int, default=10, metavar="N",
                        help="the first N; 0: only validation (default %(default)s)")
    parser.add_argument("--out", help="folder for shards and tokenizer (default data/datasets/NAME, data/tokenizers)")
    parser.add_argument("--documents", action="store_true", help="also the text, into data/documents; it is large")
    parser.add_argument("--repo", help="dataset repository (default: where the variant is published)")
    parser.add_argument("--revision", default="main", help="branch, tag or commit (default %(default)s)")
    parser.add_argument("--folder", help="the repository's folder of manifest.json (default datasets; for gpt2 none)")
    try:
        print(download(parser.parse_args()))
    except KeyboardInterrupt:
        sys.exit("\ndownload.py: stopped; the same command continues")
    except (ValueError, OSError) as error:
        sys.exit(f"download.py: {error}")


if __name__ == "__main__":
    main()
