"""Score the artifacts of a record again: by the logits of the record's model, whose loss tools/probe.py computes.

The script runs in a new folder with one artifact and the validation tokens; its own evaluation is not used.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import chdir
from difflib import SequenceMatcher
from hashlib import sha256
from pathlib import Path

import numpy as np
from common import ROOT
from events import interpreter
from rules import Findings, check_division, find_table, load_track

RERUN_BPB = 1e-3  # compiled and eager models round differently: 3.5e-4 was measured, and 8e-6 between CPUs


def data_command(track: dict, division: str, tokenizer: str) -> tuple[str, str]:
    """Return the command that gets the data of a division in the vocabulary `tokenizer`, and the settings of that data."""
    of_division = track["divisions"][division]
    values = {"tokenizer": tokenizer, "size": re.sub(r"\D", "", tokenizer), "train_shards": track.get("train_shards")}
    return f"{interpreter()} {of_division['get'].format(**values)}", of_division["set"].format(**values)


def best_tokenizer(of_division: dict, config) -> str:
    """Return the tokenizer of a division that is most like the end of DATA_PATH, or, if none is, one of VOCAB_SIZE."""
    ending = config.data_path.rpartition("_")[2]

    def fit(tokenizer: str) -> tuple[float, bool]:
        likeness = SequenceMatcher(None, ending, tokenizer).ratio()
        return max(likeness, 0.6), tokenizer.endswith(str(config.vocab_size))

    return max(of_division["scored"], key=fit)


def read_data(config, track: dict, division: str, findings: Findings):
    """Return train_gpt.Validation of the data on this disk, whose tokens, bytes, shards and tokenizer must be those of the
    division. A log has only the digests in manifest.json; the files may have changed since, so they are hashed here."""
    import train_gpt  # only here: it imports PyTorch
    of_division = track.get("divisions", {}).get(division)
    with chdir(ROOT):
        if of_division and not any(Path(config.data_path).glob("*_val_*.bin")):
            command, settings = data_command(track, division, best_tokenizer(of_division, config))
            raise ValueError(f"there is no DATA_PATH={config.data_path} with *_val_*.bin. Get the data with\n    {command}\n"
                             f"and set {settings}")
        validation = train_gpt.Validation(config, train_gpt.Ranks(0, 1, train_gpt.torch.device("cpu")))
        tokenizer = Path(config.tokenizer_path)
        digest = sha256(tokenizer.read_bytes() if tokenizer.is_file() else tokenizer.name.encode()).hexdigest()
        shards = sorted(Path(config.data_path).glob("*_[0-9]*.bin"))
        digests = {path.name: sha256(path.read_bytes()).hexdigest() for path in shards}
    if of_division:
        seen = {"settings": {"TRAIN_SEQ_LEN": config.train_seq_len, "TOKENIZER_SHA256": digest}, "data_sha256": digests,
                "val_tokens": validation.num_targets, "val_bytes": validation.bytes}
        seen["table"] = find_table(of_division["scored"], seen)
        reasons = Findings()
        check_division(seen, division, reasons)
        findings += [f"DATA_PATH={config.data_path}: {reason}" for reason in reasons]
    return validation


def score_artifact(folder: Path, seed: dict, tokens: np.ndarray) -> dict:
    """Return what probe.py prints of a seed's artifact in a new process. Raises ValueError with its error."""
    settings = {key: value for key, value in seed["overrides"].items() if key != "ATTN"}  # the kernels of this machine
    settings |= {"INIT_FROM": "artifact.ptz", "DTYPE": seed["settings"]["DTYPE"], "COMPILE": "0",
                 "DEVICE": "cpu" if seed["settings"]["DEVICE"] == "cpu" else "auto"}
    with tempfile.TemporaryDirectory() as place:
        shutil.copy(folder / "train_gpt.py", place)
        shutil.copy(Path(__file__).resolve().parents[1] / "tools" / "probe.py", place)
        shutil.copy(folder / f"artifact_seed{seed['seed']}.int8.ptz", Path(place, "artifact.ptz"))
        np.save(Path(place, "tokens.npy"), tokens)
        words = [f"{key}={value}" for key, value in settings.items()]
        command = [sys.executable, "probe.py", "train_gpt.py", "score", *words]
        environment = {"OMP_NUM_THREADS": str(seed["threads"]), **os.environ}
        result = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, errors="replace",
                                check=False)
    if result.returncode:
        raise ValueError(f"the model gives no logits: {result.stderr[-300:]}")
    return json.loads(result.stdout.splitlines()[-1])  # the script may have printed, too


def rescore(folder: Path, division: str, seeds: list[dict], findings: Findings) -> list[str]:
    """Score the artifacts of these seeds again; return a line about each."""
    import train_gpt
    from probe import APART
    settings, lines = seeds[0]["settings"], []
    names = ("DATA_PATH", "TOKENIZER_PATH", "VOCAB_SIZE", "TRAIN_SEQ_LEN")
    config, _ = train_gpt.load_config([f"{name}={settings[name]}" for name in names], {})
    validation = read_data(config, load_track(folder), division, findings)
    counts = validation.num_targets, validation.bytes
    if not findings.check(counts == (seeds[0]["val_tokens"], seeds[0]["val_bytes"]),
                          f"DATA_PATH={config.data_path} has {counts} tokens and bytes to score, not those of the logs"):
        return []
    for seed in seeds:
        number = seed["seed"]
        try:
            found = score_artifact(folder, seed, validation.tokens)
        except ValueError as error:
            findings.append(f"seed {number}: {error}")
            continue
        bpb = found["nats"] / math.log(2) / validation.bytes
        findings.check(abs(bpb - seed["val_bpb"]) <= RERUN_BPB,
                       f"seed {number}: the model's logits score {bpb:.8f}, not {seed['val_bpb']:.8f}")
        findings.check(found["apart"] <= APART,
                       f"seed {number}: logits change by {found['apart']:.2g} with later tokens or other rows")
        lines.append(f"seed {number}: scored again {bpb:.8f}, in the log {seed['val_bpb']:.8f}, {bpb - seed['val_bpb']:+.1e}")
    return lines
