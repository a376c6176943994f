"""Score the artifacts of a record again: by the logits of the record's model, whose loss is computed here.

The script runs in a new folder with logits_server.py and one artifact. It sees no shards, and its own evaluation is not run.
check_data hashes the shards and the tokenizer that track.json pins.
"""

import math
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from contextlib import chdir, suppress
from hashlib import sha256
from pathlib import Path

import numpy as np
from common import ROOT
from rules import Findings

RERUN_BPB = 1e-3  # compiled and eager models round differently: 3.5e-4 was measured, and 8e-6 between CPUs
PREFIX_LOGITS = 1e-3  # float32 logits of a row and of its beginning; 1.4e-5 was measured
SAME_WEIGHTS = 0.5  # cosine of two seeds' largest tensors; honest ones have at most 0.043
BATCH_TOKENS = 8192


def check_data(seed: dict, findings: Findings) -> None:
    """The shards and the tokenizer on this disk must be those that the division pins. The digests in a log come
    from manifest.json, which can say anything, so the files themselves are hashed."""
    settings = seed["settings"]
    data_path = ROOT / settings["DATA_PATH"]
    for split in ("train", "val"):
        if pinned := seed["table"].get(f"{split}_shards_sha256"):
            paths = sorted(data_path.glob(f"*_{split}_[0-9]*.bin"))
            found = [sha256(path.read_bytes()).hexdigest() for path in paths]
            findings.check(found == pinned, f"DATA_PATH={settings['DATA_PATH']}: the {split} shards on this "
                           "disk are not the division's")
    tokenizer = ROOT / settings["TOKENIZER_PATH"]
    if pinned := seed["table"].get("tokenizer_sha256"):
        found = sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.is_file() else ""
        findings.check(found == pinned, f"TOKENIZER_PATH={settings['TOKENIZER_PATH']} on this disk is not the "
                       "division's tokenizer")


def read_validation(seed: dict):
    """Return train_gpt.Validation of the text on this disk. Raises ValueError if a seed's log has other tokens or bytes."""
    import train_gpt  # only here: it imports PyTorch
    names = ("DATA_PATH", "TOKENIZER_PATH", "VOCAB_SIZE", "TRAIN_SEQ_LEN")
    config, _ = train_gpt.load_config([f"{name}={seed['settings'][name]}" for name in names], {})
    with chdir(ROOT):
        validation = train_gpt.Validation(config, train_gpt.Ranks(0, 1, train_gpt.torch.device("cpu")))
    if (validation.count, validation.bytes) != (seed["val_tokens"], seed["val_bytes"]):
        raise ValueError("DATA_PATH or TOKENIZER_PATH on this disk are not those of the log")
    return validation


def start_server(folder: Path, seed: dict, artifact: Path, place: Path, errors) -> subprocess.Popen:
    """Start logits_server.py in the new folder `place`, with the record's script and the artifact."""
    for path in (folder / "train_gpt.py", Path(__file__).with_name("logits_server.py")):
        shutil.copy(path, place)
    shutil.copy(artifact, place / "artifact.ptz")
    settings = {key: value for key, value in seed["overrides"].items() if key != "ATTN"}  # the kernels of this machine
    settings |= {"INIT_FROM": "artifact.ptz", "DTYPE": seed["settings"]["DTYPE"], "COMPILE": "0",
                 "DEVICE": "cpu" if seed["settings"]["DEVICE"] == "cpu" else "auto"}
    kept = ("PATH", "HOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
    environment = {key: os.environ[key] for key in kept if key in os.environ}
    environment["OMP_NUM_THREADS"] = str(seed["threads"])
    command = [sys.executable, "logits_server.py", *(f"{key}={value}" for key, value in settings.items())]
    return subprocess.Popen(command, cwd=place, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)


def ask(server: subprocess.Popen, x: np.ndarray, vocabulary: int) -> np.ndarray:
    """Return the logits, (rows, length, vocabulary), of rows of tokens. Raises ValueError if the server has ended."""
    with suppress(BrokenPipeError):  # it has ended, and answers nothing
        server.stdin.write(np.array(x.shape).tobytes() + x.tobytes())
        server.stdin.flush()
    answer = server.stdout.read(4 * x.size * vocabulary)
    if len(answer) < 4 * x.size * vocabulary:
        server.stdin.raw.close()  # what is still buffered has no reader
        raise ValueError("the model gives no logits")
    return np.frombuffer(answer, np.float32).reshape(*x.shape, vocabulary)


def score_logits(server: subprocess.Popen, tokens: np.ndarray, settings: dict) -> tuple[float, float]:
    """Return the loss of the server's logits in nats, summed over the tokens after the first, and the largest difference
    between logits of rows and of their beginnings alone, which a model that sees later tokens or other rows would have. Raises
    ValueError."""
    from torch import from_numpy, nn
    length, pad = settings["TRAIN_SEQ_LEN"], settings.get("VOCAB_PAD", 1)
    vocabulary = math.ceil(settings["VOCAB_SIZE"] / pad) * pad
    inputs, targets = (part.astype(np.int64).reshape(-1, length) for part in (tokens[:-1], tokens[1:]))
    rows = max(1, BATCH_TOKENS // length)
    nats, apart, batches = 0.0, 0.0, math.ceil(len(inputs) / rows)
    watched = secrets.randbelow(min(8, batches))
    for number, at in enumerate(range(0, len(inputs), rows)):
        logits = ask(server, inputs[at:at + rows], vocabulary)
        flat = from_numpy(logits.reshape(-1, vocabulary).copy())
        nats += float(nn.functional.cross_entropy(flat, from_numpy(targets[at:at + rows].ravel()), reduction="sum"))
        some_rows = {secrets.randbelow(len(logits)) for _ in range(4)} if number % 8 == watched else set()
        for row in some_rows:  # alone, and without its end
            cut = 1 + secrets.randbelow(max(1, length - 1))
            beginning = ask(server, inputs[at + row:at + row + 1, :cut].copy(), vocabulary)
            apart = np.maximum(apart, np.abs(beginning - logits[row:row + 1, :cut]).max())  # a NaN stays
    return nats, apart


def rerun(folder: Path, seed: dict, artifact: Path, findings: Findings) -> str:
    """Score an artifact in a new process; return a line about it. The largest tensor is kept as seed["largest"]."""
    number = seed["seed"]
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryFile() as errors:
        try:
            validation = read_validation(seed)
            with start_server(folder, seed, artifact, Path(place), errors) as server:
                nats, apart = score_logits(server, validation.tokens, seed["settings"])
            seed["largest"] = np.load(Path(place, "largest.npy")).ravel()
        except (ValueError, OSError) as error:
            errors.seek(0)
            findings.append(f"seed {number}: {error}: {errors.read().decode(errors='replace')[-300:]}".rstrip(": "))
            return f"seed {number}: not scored"
    bpb = nats / math.log(2) / validation.bytes
    findings.check(abs(bpb - seed["val_bpb"]) <= RERUN_BPB,
                   f"seed {number}: the model's logits score {bpb:.8f}, not {seed['val_bpb']:.8f}")
    findings.check(apart <= PREFIX_LOGITS, f"seed {number}: logits change by {apart:.2g} with later tokens or other rows")
    return f"seed {number}: scored again {bpb:.8f}, in the log {seed['val_bpb']:.8f}, {bpb - seed['val_bpb']:+.1e}"


def check_weights(seeds: list[dict], findings: Findings) -> None:
    """No two artifacts may decode to nearly the same weights."""
    for i, seed in enumerate(seeds):
        for other in seeds[:i]:
            a, b = (one["largest"].astype(np.float64) for one in (seed, other))
            cosine = float(a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-12)) if a.shape == b.shape else 0.0
            findings.check(abs(cosine) < SAME_WEIGHTS, f"seeds {other['seed']} and {seed['seed']} have nearly the same weights: "
                           f"the cosine of their largest tensors is {cosine:.3f}")
