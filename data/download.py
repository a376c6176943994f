"""Download published token shards and their tokenizer from the Hugging Face hub.

    python data/download.py --variant sp1024 --train-shards 10
    python data/download.py --variant gpt2 --train-shards 1 --out data/datasets/small_gpt2

Shards go to data/datasets/fineweb10B_VARIANT and the tokenizer to data/tokenizers, or both to --out. The validation
split is always complete. Run the same command again to resume. data/README.md says more.
"""

import argparse
import filecmp
import os
import shlex
import shutil
import sys
from pathlib import Path

from shards import REPOSITORY, at_least, escape_what_cannot_be_printed, given_path

DATA = REPOSITORY / "data"
VARIANTS = {"sp1024": (1024, "willdepueoai/parameter-golf"),  # size of the vocabulary, repository
            "sp4096": (4096, "kevclark/parameter-golf"), "sp8192": (8192, "kevclark/parameter-golf"),
            "gpt2": (50257, "kjj0/fineweb10B-gpt2")}


def place(file: Path, target: Path) -> None:
    """Link or copy a file of the cache to `target`. Raises ValueError if another file is there, since train_gpt.py would
    mix the shards of two data sets."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        if not target.samefile(file) and not filecmp.cmp(target, file, shallow=False):
            raise ValueError(f"{target} is not the published file: delete it, or choose another --out")
        return
    try:
        os.link(file.resolve(), target)
    except OSError:  # another file system, or one without links
        partial = target.with_name(f".{target.name}.tmp")
        shutil.copyfile(file, partial)
        partial.replace(target)


def download(options) -> str:
    """Download what is missing; return the training command. Raises ValueError, and what huggingface_hub raises."""
    import huggingface_hub
    variant = options.variant
    vocab_size, repository = VARIANTS[variant]
    folder = "" if variant == "gpt2" else f"datasets/datasets/fineweb10B_{variant}/"
    print(f"from {repository} on the Hugging Face hub", flush=True)
    published = sorted(huggingface_hub.list_repo_files(repository, repo_type="dataset"))
    val = [path for path in published if path.startswith(f"{folder}fineweb_val_")]
    train = [path for path in published if path.startswith(f"{folder}fineweb_train_")]
    if not val or options.train_shards > len(train):
        raise ValueError(f"--train-shards {options.train_shards}: {repository} has {len(train)} training and {len(val)} "
                         f"validation shards of {variant}; 0 is for validation only")
    out = Path(options.out) if options.out else DATA / "datasets" / f"fineweb10B_{variant}"
    targets, tokenizer = {path: out / Path(path).name for path in val}, variant
    if variant.startswith("sp"):  # before the training shards: run.sh counts those
        name = f"fineweb_{vocab_size}_bpe.model"
        model = (out if options.out else DATA / "tokenizers") / name
        targets[f"datasets/tokenizers/{name}"] = model
        tokenizer = os.path.relpath(model)  # artifacts keep relative paths
    targets |= {path: out / Path(path).name for path in train[:options.train_shards]}
    snapshot = Path(huggingface_hub.snapshot_download(repository, repo_type="dataset", allow_patterns=list(targets)))
    for path, target in targets.items():
        place(snapshot / path, target)
    script, data = (os.path.relpath(path) for path in (REPOSITORY / "train_gpt.py", out))
    return "next: " + shlex.join(["python", script, f"DATA_PATH={data}", f"TOKENIZER_PATH={tokenizer}",
                                  f"VOCAB_SIZE={vocab_size}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", required=True, choices=VARIANTS)
    parser.add_argument("--train-shards", type=at_least(0, "shards, such as 10, or 0 for validation only"), default=10, metavar="N",
                        help="the first N training shards; 0: validation only (default %(default)s)")
    parser.add_argument("--out", type=given_path,
                        help="folder for all (default data/datasets/fineweb10B_VARIANT and data/tokenizers)")
    escape_what_cannot_be_printed()
    try:
        print(download(parser.parse_args()))
    except KeyboardInterrupt:
        print("\ndownload.py: stopped; run the same command again to resume", file=sys.stderr)
        sys.exit(130)  # as a shell has it
    except ImportError as error:
        sys.exit(f"download.py: huggingface_hub is missing: pip install huggingface_hub ({error})")
    except Exception as error:  # the client raises many types, whose messages say what to do
        sys.exit(f"download.py: {type(error).__name__}: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
