"""Tiny shards, settings and runs, and where the reference run's data are. Shared by the tests."""

import json
import os
import sys
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

import train_gpt  # noqa: E402

GOLDEN = Path(os.environ.get("GOLDEN_PATH", REPOSITORY.parent / "shared" / "golden")).resolve()
MODEL = GOLDEN.parent / "tokenizers" / "fineweb_1024_bpe.model"
TINY = {
    "DEVICE": "cpu", "DTYPE": "float32", "TOKENIZER_PATH": "byte260", "VOCAB_SIZE": "260",
    "NUM_LAYERS": "2", "MODEL_DIM": "32", "NUM_HEADS": "2", "NUM_KV_HEADS": "1", "TRAIN_SEQ_LEN": "32",
    "TRAIN_BATCH_TOKENS": "1024", "VAL_BATCH_SIZE": "4096", "ITERATIONS": "4", "WARMUP_STEPS": "1",
    "WARMDOWN_ITERS": "2", "VAL_LOSS_EVERY": "2", "TRAIN_LOG_EVERY": "1", "MAX_WALLCLOCK_SECONDS": "0",
    "MUON_MOMENTUM_WARMUP_STEPS": "2", "COMPILE": "0",
    "MICRO_BATCH_TOKENS": "512", "OUT_DIR": ".",
}


def write_shard(path: Path, tokens, magic=20240520, version=1, count=None) -> Path:
    """A shard, written independently of data/prepare.py; header fields may be wrong on purpose."""
    tokens = np.asarray(tokens, dtype="<u2")
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.unlink(missing_ok=True)  # where an older file is mapped, it stays as it was
    path.write_bytes(header.tobytes() + tokens.tobytes())
    return path


def make_shards(folder: Path) -> Path:
    """A new folder `tiny` with two training shards and one validation shard of byte260 tokens."""
    data = folder / "tiny"
    data.mkdir()
    text = [4 + byte for byte in b"the quick brown fox jumps over the lazy dog. "] * 400
    for name, size in (("train_000000", 9000), ("train_000001", 5000), ("val_000000", 3000)):
        write_shard(data / f"tiny_{name}.bin", [1, *text[:size - 1]])
    return data


def tiny_config(**changes) -> train_gpt.Config:
    """The tiny configuration with lower-case changes, resolved as on one CPU."""
    values = {name.lower(): train_gpt.parse_value(name, text) for name, text in TINY.items()}
    values.update(grad_accum_steps=8, attn="math")
    return train_gpt.Config(**{**values, **changes})


def one_process() -> train_gpt.Ranks:
    return train_gpt.Ranks(0, 1, train_gpt.torch.device("cpu"))


def make_trainer(ranks: train_gpt.Ranks | None = None, **changes) -> train_gpt.Trainer:
    """A trainer of the tiny configuration with lower-case changes."""
    return train_gpt.Trainer(tiny_config(**changes), ranks or one_process())


def silent_log() -> train_gpt.RunLog:
    """The log of a rank that is not the main one."""
    return train_gpt.RunLog("", "", is_main=False)


def read_checkpoint(path: Path) -> dict:
    return train_gpt.find_checkpoint(tiny_config(resume=str(path)))


def tiny_arguments(data: Path, **changes) -> list[str]:
    """The tiny configuration as arguments of the script."""
    return [f"{name}={value}" for name, value in {**TINY, "DATA_PATH": str(data), **changes}.items()]


def events(folder: Path, run_id: str) -> list[dict]:
    lines = (folder / "logs" / f"{run_id}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
