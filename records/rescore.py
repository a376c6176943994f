"""Score the artifacts of a record again: as its script does, and by the logits of its model, whose loss is computed here.

Both run in a new folder with the script, logits_server.py, one artifact, the validation shards, their manifest and the
tokenizer. check_data hashes the shards and the tokenizer that track.json pins.
"""

import math
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import numpy as np
from common import ROOT  # first: it finds the reader of logs

from events import read_events
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


def copy_inputs(folder: Path, seed: dict, artifact: Path, place: Path) -> dict[str, str]:
    """Copy what scoring needs into the folder `place`; return the settings, of which none names another folder."""
    shutil.copy(folder / "train_gpt.py", place)
    shutil.copy(Path(__file__).with_name("logits_server.py"), place)
    shutil.copy(artifact, place / "artifact.ptz")
    (place / "data").mkdir()
    data = ROOT / seed["settings"]["DATA_PATH"]
    for path in (*data.glob("*_val_[0-9]*.bin"), *data.glob("manifest.json")):
        shutil.copy(path, place / "data")
    settings = {key: str(value) for key, value in seed["overrides"].items()
                if key not in ("EVAL_STRIDE", "EVAL_SEQ_LEN", "ATTN")}  # no second score; the kernels of this machine
    name = secrets.token_hex(8)  # unknown to the script, so that it cannot behave differently here
    settings |= {"ITERATIONS": "0", "INIT_FROM": "artifact.ptz", "RUN_ID": name, "OUT_DIR": name, "DATA_PATH": "data",
                 "SEED": str(seed["seed"]), "DTYPE": seed["settings"]["DTYPE"], "COMPILE": "0",
                 "DEVICE": "cpu" if seed["settings"]["DEVICE"] == "cpu" else "auto"}
    tokenizer = ROOT / seed["settings"]["TOKENIZER_PATH"]
    if tokenizer.is_file():
        shutil.copy(tokenizer, place / f"tokenizer{tokenizer.suffix}")
        settings["TOKENIZER_PATH"] = f"tokenizer{tokenizer.suffix}"
    return settings


def scored_data(start: dict) -> tuple:
    """Return a "config" event's or a seed's validation tokens and bytes, and the digests of the shards."""
    digests = {file: digest for file, digest in (start.get("data_sha256") or {}).items() if "_val_" in file}
    return start["val_tokens"], start["val_bytes"], digests


def score_of_script(command: list[str], name: str, options: dict, seed: dict) -> float:
    """Return the bits per byte that the script itself finds. It is stopped then, since older scripts score twice.
    Raises ValueError."""
    log = Path(options["cwd"], "logs", f"{name}.jsonl")
    with tempfile.TemporaryFile() as errors, subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=errors, **options) as script:
        scored, is_running = None, True
        while scored is None and is_running:
            time.sleep(0.1)
            is_running = script.poll() is None
            events = read_events(log) if log.is_file() else []
            scored = next((event for event in events if event["event"] in ("val", "final")), None)
        script.kill()
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    if scored is None:
        raise ValueError(f"scoring failed: {text[-300:] or 'its log has no score'}")
    if scored_data(events[0]) != scored_data(seed):
        raise ValueError("DATA_PATH or TOKENIZER_PATH on this disk are not those of the log")
    return scored["val_bpb"]


def score_of_logits(command: list[str], options: dict, seed: dict) -> tuple[float, float]:
    """Return the bits per byte of the model's logits in float32, and the largest difference between logits of rows and of
    their beginnings, which a model that sees later tokens would have. Raises ValueError."""
    import torch
    length = seed["settings"]["TRAIN_SEQ_LEN"]
    paths = sorted(Path(options["cwd"], "data").glob("*_val_[0-9]*.bin"))
    tokens = torch.from_numpy(np.concatenate([np.fromfile(path, "<u2", offset=1024) for path in paths]).astype(np.int64))
    count = (len(tokens) - 1) // length * length
    rows = zip(*(part.view(-1, length).split(max(1, BATCH_TOKENS // length)) for part in (tokens[:count], tokens[1:count + 1])))
    with tempfile.TemporaryFile() as errors, subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, **options) as server:
        def ask(x: torch.Tensor) -> torch.Tensor:
            with suppress(BrokenPipeError):  # it has ended, and answers nothing
                server.stdin.write(np.array(x.shape).tobytes() + x.contiguous().numpy().tobytes())
                server.stdin.flush()
            size = x.numel() * vocabulary * 4
            answer = server.stdout.read(size)
            if len(answer) < size:
                server.stdin.raw.close()  # what is still buffered has no reader
                errors.seek(0)
                raise ValueError(f"the model gives no logits: {errors.read().decode(errors='replace')[-300:]}")
            return torch.frombuffer(bytearray(answer), dtype=torch.float32).view(*x.shape, vocabulary)

        pad = seed["settings"].get("VOCAB_PAD", 1)
        vocabulary = math.ceil(seed["settings"]["VOCAB_SIZE"] / pad) * pad
        nats, apart = 0.0, 0.0
        for number, (x, y) in enumerate(rows):
            logits = ask(x)
            nats += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum"))
            if number % 8 == 0:
                cut = 1 + secrets.randbelow(length)
                apart = max(apart, float((ask(x[:1, :cut]) - logits[:1, :cut]).abs().max()))
    return nats / math.log(2) / seed["val_bytes"], apart


def rerun(folder: Path, seed: dict, artifact: Path, findings: Findings) -> str:
    """Score an artifact in both ways in new processes; return a line about it. The largest tensor is kept as
    seed["largest"]."""
    kept = ("PATH", "HOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "TIKTOKEN_CACHE_DIR")
    environment = {key: os.environ[key] for key in kept if key in os.environ}
    environment["OMP_NUM_THREADS"] = str(seed["threads"])
    number = seed["seed"]
    with tempfile.TemporaryDirectory() as place:
        settings = copy_inputs(folder, seed, artifact, Path(place))
        words = [f"{key}={text}" for key, text in settings.items()]
        options = {"cwd": place, "env": environment}
        try:
            theirs = score_of_script([sys.executable, "train_gpt.py", *words], settings["RUN_ID"], options, seed)
            ours, apart = score_of_logits([sys.executable, "logits_server.py", *words], options, seed)
            seed["largest"] = np.load(Path(place, "largest.npy")).ravel()
        except (ValueError, OSError) as error:
            findings.append(f"seed {number}: {error}")
            return f"seed {number}: not scored"
    findings.check(abs(theirs - seed["val_bpb"]) <= RERUN_BPB,
                   f"seed {number}: the artifact scores {theirs:.8f}, not {seed['val_bpb']:.8f}")
    findings.check(abs(ours - seed["val_bpb"]) <= RERUN_BPB,
                   f"seed {number}: the model's logits score {ours:.8f}, not {seed['val_bpb']:.8f}")
    findings.check(apart <= PREFIX_LOGITS, f"seed {number}: logits change by {apart:.2g} with later tokens of the row")
    return (f"seed {number}: scored again {theirs:.8f}, by its logits {ours:.8f}, in the log {seed['val_bpb']:.8f}, "
            f"{theirs - seed['val_bpb']:+.1e}")


def check_weights(seeds: list[dict], findings: Findings) -> None:
    """No two artifacts may decode to nearly the same weights."""
    for i, seed in enumerate(seeds):
        for other in seeds[:i]:
            a, b = (one["largest"].astype(np.float64) for one in (seed, other))
            cosine = float(a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-12)) if a.shape == b.shape else 0.0
            findings.check(abs(cosine) < SAME_WEIGHTS, f"seeds {other['seed']} and {seed['seed']} have nearly the same weights: "
                           f"the cosine of their largest tensors is {cosine:.3f}")
