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
import shlex
import shutil
import sys
from pathlib import Path

from shards import REPOSITORY, open_shard, sha256_of

DATA = REPOSITORY / "data"
CHALLENGE = "willdepueoai/parameter-golf"
FOLDER = "datasets/"  # of the challenge's repository, with manifest.json
GPT2 = "kjj0/fineweb10B-gpt2"


class Hub:
    """A dataset repository, and the cache of huggingface_hub."""

    def __init__(self, repo: str, revision: str):
        """Raise ValueError if huggingface_hub is not installed."""
        try:
            import huggingface_hub
            from huggingface_hub import constants
        except ImportError as error:
            raise ValueError(f"huggingface_hub is missing: pip install huggingface_hub ({error})") from None
        self.client = huggingface_hub
        self.offline = constants.HF_HUB_OFFLINE
        self.where = {"repo_id": repo, "repo_type": "dataset", "revision": revision}

    def fetch(self, path: str) -> Path:
        """Return a file's place in the cache, after downloading it if necessary."""
        return Path(self.client.hf_hub_download(filename=path, **self.where)).resolve()

    def place(self, path: str, target: Path) -> None:
        """Link or copy a file to `target`, unless it is there.

        Raises ValueError if it is not the published file (offline, only downloads can be compared) or if it
        is a damaged shard."""
        if not target.exists():
            file = self.fetch(path)
            digest = file.name
        else:
            file = target
            url = self.client.hf_hub_url(filename=path, **self.where)
            digest = "" if self.offline else self.client.get_hf_file_metadata(url).etag or ""
        # The hub, and so its cache, names large files by their SHA-256, small ones by a shorter hash.
        if len(digest) == 64 and sha256_of(file) != digest:
            raise ValueError(f"{file} does not have the published sha256: delete it, or choose another --out")
        if target.suffix == ".bin":
            open_shard(file)
        if file != target:
            link(file, target)


def link(file: Path, target: Path) -> None:
    """Link or copy a file to `target`, which appears when it is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file, target)
    except OSError:  # another file system, or one without links
        partial = target.with_name(f".{target.name}.tmp")
        shutil.copyfile(file, partial)
        os.replace(partial, target)


def find_dataset(hub: Hub, variant: str) -> tuple[str, str, int, int]:
    """Return the folder of a variant's shards, its tokenizer (a path in the repository, or byte260), its
    vocabulary size and the number of its validation shards. Raises ValueError if it is not listed."""
    manifest = json.loads(hub.fetch(f"{FOLDER}manifest.json").read_text(encoding="utf-8"))
    entries = {entry["name"].removeprefix("fineweb10B_"): entry for entry in manifest["datasets"]}
    if variant not in entries:
        raise ValueError(f"--variant {variant!r} must be gpt2 or one of {', '.join(entries)}")
    entry = entries[variant]
    models = {item["name"]: item.get("model_path") for item in manifest["tokenizers"]}
    tokenizer = variant if variant == "byte260" else FOLDER + models[entry["tokenizer_name"]]
    return f"{FOLDER}{entry['path']}/", tokenizer, entry["vocab_size"], entry["stats"]["files_val"]


def download(options) -> str:
    """Download what is missing; return the training command."""
    if options.train_shards < 0:
        raise ValueError(f"--train-shards {options.train_shards} must be 0 (validation only) or more")
    out = Path(options.out) if options.out else DATA / "datasets" / f"fineweb10B_{options.variant}"
    if options.variant == "gpt2":
        hub = Hub(options.repo or GPT2, options.revision)
        folder, tokenizer, vocab_size, val_shards = "", "gpt2", 50257, 1
        first = 1
    else:
        hub = Hub(options.repo or CHALLENGE, options.revision)
        folder, tokenizer, vocab_size, val_shards = find_dataset(hub, options.variant)
        first = 0
    if tokenizer.endswith(".model"):
        model = (out if options.out else DATA / "tokenizers") / Path(tokenizer).name
        hub.place(tokenizer, model)
        tokenizer = os.path.relpath(model)  # artifacts keep relative paths
    names = [f"fineweb_val_{number:06d}.bin" for number in range(val_shards)]
    names += [f"fineweb_train_{number:06d}.bin" for number in range(first, first + options.train_shards)]
    for name in names:
        hub.place(folder + name, out / name)
    script, data = (os.path.relpath(path) for path in (REPOSITORY / "train_gpt.py", out))
    return "next: " + shlex.join(["python", script, f"DATA_PATH={data}", f"TOKENIZER_PATH={tokenizer}",
                                  f"VOCAB_SIZE={vocab_size}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", required=True, help="sp1024, sp4096, sp8192, byte260 or gpt2")
    parser.add_argument("--train-shards", type=int, default=10, metavar="N",
                        help="the first N training shards; 0: validation only (default %(default)s)")
    parser.add_argument("--out", help="folder for all (default data/datasets/NAME and data/tokenizers)")
    parser.add_argument("--repo", help="dataset repository (default: where the variant is published)")
    parser.add_argument("--revision", default="main", help="branch, tag or commit (default %(default)s)")
    try:
        print(download(parser.parse_args()))
    except KeyboardInterrupt:
        print("\ndownload.py: stopped; run the same command again to resume", file=sys.stderr)
        sys.exit(130)  # as a shell has it
    except Exception as error:  # the client raises many types, whose messages say what to do
        sys.exit(f"download.py: {type(error).__name__}: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
