"""Download published token shards and their tokenizer from the Hugging Face hub.

    python data/download.py --variant sp1024 --train-shards 10
    python data/download.py --variant gpt2 --train-shards 1 --out data/datasets/small_gpt2

spN and byte260 come from the challenge's repository; gpt2 comes from one that has only shards. Shards go to
data/datasets/NAME and the tokenizer to data/tokenizers, or both to --out. The validation split is always
complete. Run the same command again to resume: complete files are checked, but not downloaded again. The
variables of huggingface_hub apply: HF_HOME, HF_ENDPOINT, HF_TOKEN; HF_HUB_OFFLINE=1 uses only its cache.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from shards import REPOSITORY, open_shard, sha256_of

DATA = REPOSITORY / "data"
CHALLENGE = ("willdepueoai/parameter-golf", "datasets")  # repository and the folder of its manifest.json
GPT2 = ("kjj0/fineweb10B-gpt2", "")
BUILT_IN = {"byte260": 260, "gpt2": 50257}  # vocabulary sizes of tokenizers without a file
DOCUMENTS = ("docs_selected.jsonl", "docs_selected.source_manifest.json")
ADVICE = {  # by the class of the client's exception; the first that fits
    "GatedRepoError": "the repository is gated: accept its terms on its page and set HF_TOKEN",
    "RepositoryNotFoundError": "no such repository: check --repo; a private one needs HF_TOKEN",
    "RevisionNotFoundError": "no such revision: check --revision",
    "LocalEntryNotFoundError": "the hub cannot be reached and its cache does not have the file",
    "EntryNotFoundError": "no such file in the repository: check --repo and --folder",
    "HTTPError": "the hub cannot be reached or refuses: check the network, HF_ENDPOINT and HF_TOKEN",
}


class Hub:
    """A dataset repository; with HF_HUB_OFFLINE=1, what the client's cache has of it."""

    def __init__(self, repo: str, revision: str):
        try:
            import huggingface_hub
            from huggingface_hub import constants, errors
        except ImportError as error:
            raise ValueError(f"huggingface_hub is missing: pip install huggingface_hub ({error})") from None
        self.client = huggingface_hub
        self.not_found = errors.EntryNotFoundError
        self.offline = constants.HF_HUB_OFFLINE
        self.where = {"repo_id": repo, "repo_type": "dataset", "revision": revision}

    def look_up(self, path: str) -> tuple[int | None, str | None] | None:
        """Return a file's size and sha256, each None if unknown, or None if there is no such file."""
        if self.offline:
            cached = self.client.try_to_load_from_cache(filename=path, **self.where)
            return (None, None) if isinstance(cached, str) else None
        try:
            published = self.client.get_hf_file_metadata(self.client.hf_hub_url(filename=path, **self.where))
        except self.not_found:
            return None
        is_large = len(published.etag or "") == 64  # then its name on the server is its sha256
        return published.size, published.etag if is_large else None

    def fetch(self, path: str, size: int | None, digest: str | None) -> Path:
        """Return a file's place in the cache. Raises ValueError if it is damaged twice."""
        cached = Path(self.client.hf_hub_download(filename=path, **self.where))
        try:
            check_file(cached, size, digest)
        except ValueError:
            if self.offline:
                raise
            cached = Path(self.client.hf_hub_download(filename=path, force_download=True, **self.where))
            check_file(cached, size, digest)
        return cached.resolve()


def check_file(path: Path, size: int | None, digest: str | None) -> None:
    """Raise ValueError unless a file has the size and sha256, if not None, and as a shard a valid header."""
    found = path.stat().st_size
    if size not in (None, found):
        raise ValueError(f"{path} has {found} bytes, not the published {size}: delete it or choose "
                         f"another --out")
    if digest and sha256_of(path) != digest:
        raise ValueError(f"{path} does not have the published sha256: delete it or choose another --out")
    if path.suffix == ".bin":
        open_shard(path)


def place(cached: Path, target: Path) -> None:
    """Link or copy a file of the cache to `target`, which appears when it is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(cached, target)
    except OSError:  # another file system, or one without links
        partial = target.with_name(f".{target.name}.tmp")
        shutil.copyfile(cached, partial)
        os.replace(partial, target)


def find_dataset(hub: Hub, folder: str, variant: str) -> tuple[str, str, int, int]:
    """Return a variant's folder, its tokenizer (a path or a name), its vocabulary size and the number of its
    validation shards, which may be more. Raises ValueError if it is not published."""
    listed = hub.look_up(f"{folder}manifest.json")
    if listed is None:
        if not re.fullmatch(r"sp\d+|byte260|gpt2", variant):
            raise ValueError(f"--variant {variant!r} must be spN, byte260 or gpt2")
        shards = folder if variant == "gpt2" else f"{folder}datasets/fineweb10B_{variant}/"
        if variant in BUILT_IN:
            return shards, variant, BUILT_IN[variant], 1
        number = variant.removeprefix("sp")
        return shards, f"{folder}tokenizers/fineweb_{number}_bpe.model", int(number), 1
    try:
        manifest = json.loads(hub.fetch(f"{folder}manifest.json", *listed).read_text(encoding="utf-8"))
        entries = {entry["name"].removeprefix("fineweb10B_"): entry for entry in manifest["datasets"]}
        if variant not in entries:
            raise ValueError(f"--variant {variant!r} must be one of {', '.join(entries)}")
        entry = entries[variant]
        models = {item["name"]: item.get("model_path") for item in manifest["tokenizers"]}
        tokenizer = variant if variant in BUILT_IN else folder + models[entry["tokenizer_name"]]
        val_shards = int(entry.get("stats", {}).get("files_val", 1))
        return f"{folder}{entry['path']}/", tokenizer, int(entry["vocab_size"]), val_shards
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"the repository's manifest.json cannot be used: {error!r}") from None


def download(options) -> str:
    """Download what is missing; return the training command."""
    out = Path(options.out) if options.out else DATA / "datasets" / f"fineweb10B_{options.variant}"
    if (out / "manifest.json").exists():
        raise ValueError(f"{out} holds a data set of prepare.py or convert.py: choose another --out")
    if options.train_shards < 0:
        raise ValueError(f"--train-shards {options.train_shards} must be 0 (validation only) or more")
    repo, folder = GPT2 if options.variant == "gpt2" else CHALLENGE
    folder = folder if options.folder is None else options.folder.strip("/")
    folder = f"{folder}/" if folder else ""
    hub = Hub(options.repo or repo, options.revision)
    shards, tokenizer, vocab_size, val_shards = find_dataset(hub, folder, options.variant)
    while hub.look_up(f"{shards}fineweb_val_{val_shards:06d}.bin"):
        val_shards += 1
    first = int(options.variant == "gpt2")  # its training shards are numbered from 1
    names = [f"fineweb_val_{number:06d}.bin" for number in range(val_shards)]
    names += [f"fineweb_train_{number:06d}.bin" for number in range(first, first + options.train_shards)]
    files = {out / name: shards + name for name in names}
    if tokenizer not in BUILT_IN:
        model = (out if options.out else DATA / "tokenizers") / Path(tokenizer).name
        files[model] = tokenizer
        tokenizer = model
    if options.documents:
        files |= {DATA / "documents" / name: folder + name for name in DOCUMENTS}
    published = {path: hub.look_up(path) for path in files.values()}
    if missing := [path for path, found in published.items() if found is None]:
        place_name = "the cache (HF_HUB_OFFLINE is set)" if hub.offline else hub.where["repo_id"]
        raise ValueError(f"{place_name} has no {missing[0]}: check --train-shards, --repo and --folder")
    for target, path in files.items():
        if target.exists():
            check_file(target, *published[path])
        else:
            place(hub.fetch(path, *published[path]), target)
    return "next: " + shlex.join(["python", "train_gpt.py", f"DATA_PATH={out}", f"TOKENIZER_PATH={tokenizer}",
                                  f"VOCAB_SIZE={vocab_size}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", required=True, help="sp1024, sp4096, sp8192, byte260 or gpt2")
    parser.add_argument("--train-shards", type=int, default=10, metavar="N",
                        help="the first N training shards; 0: validation only (default %(default)s)")
    parser.add_argument("--out", help="folder for all (default data/datasets/NAME and data/tokenizers)")
    parser.add_argument("--documents", action="store_true", help="also the text, into data/documents")
    parser.add_argument("--repo", help="dataset repository (default: where the variant is published)")
    parser.add_argument("--revision", default="main", help="branch, tag or commit (default %(default)s)")
    parser.add_argument("--folder", help="its folder of manifest.json (default datasets; for gpt2 none)")
    try:
        print(download(parser.parse_args()))
    except KeyboardInterrupt:
        sys.exit("\ndownload.py: stopped; run the same command again to resume")
    except Exception as error:
        names = [base.__name__ for base in type(error).__mro__]
        advice = [text for name, text in ADVICE.items() if name in names]
        if not advice and not isinstance(error, (ValueError, OSError)):
            raise
        sys.exit("download.py: " + ": ".join([*advice[:1], " ".join(str(error).split())]))


if __name__ == "__main__":
    main()
