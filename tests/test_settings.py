"""Every setting is read: with another value, a run learns, scores, stores or says something else, or refuses it."""

import io
import itertools
import json
import shutil
from contextlib import redirect_stdout
from typing import get_args

import pytest
import torch
import train_gpt
from conftest import TINY, make_shards, tiny_arguments, write_shard

SMALL = dict(
    RUN_ID="run", NUM_LAYERS=2, MODEL_DIM=16, TRAIN_SEQ_LEN=8, TRAIN_BATCH_TOKENS=128, MICRO_BATCH_TOKENS=128,
    VAL_BATCH_SIZE=1024, ITERATIONS=2, VAL_LOSS_EVERY=0, INT8_KEEP_FLOAT_MAX_NUMEL=100, CHECKPOINT_EVERY=2, WARMUP_STEPS=0)
OTHERS = {  # where the rule of `other_value` does not do: a value, and what both runs need for it to matter
    "RUN_ID": "other", "OUT_DIR": "out", "DATA_PATH": "../other", "INIT_FROM": "../start/final_model.pt",
    "RESUME": "../start/checkpoints/run_00000001.pt", "DTYPE": "bfloat16", "COMPILE": "blocks", "MAX_WALLCLOCK_SECONDS": "1e-6",
    "MICRO_BATCH_TOKENS": "64", "VAL_BATCH_SIZE": "512", "EVAL_STRIDE": "4", "TRAIN_LOG_EVERY": "2 ITERATIONS=11",
    "VOCAB_PAD": "64", "ADAM_LR": "0.1 OPTIMIZER=adamw", "EMBED_LR": "0.1 TIE_EMBEDDINGS=0",
    "HEAD_LR": "0.1 TIE_EMBEDDINGS=0", "MUON_MOMENTUM": "0.5", "MUON_MOMENTUM_WARMUP_START": "0.5", "BETA1": "0.5",
    "BETA2": "0.5", "DROPOUT": "0.5", "LR_SCHEDULE": "cosine WARMDOWN_ITERS=1", "LR_WARMUP_STEPS": "2",
    "WARMDOWN_FRACTION": "0.5", "GRAD_CLIP_NORM": "0.01", "CHECKPOINT_EVERY": "1",
    "CONTROL_TENSOR_NAME_PATTERNS": "q_gain"}
REFUSED = {  # a value, and the error
    "TOKENIZER_PATH": ("none.model", "none.model.* cannot be read"),
    "TOKENIZER_SHA256": ("0", "byte260 is missing or wrong; use the one with TOKENIZER_SHA256=0"),
    "VOCAB_SIZE": ("300", "VOCAB_SIZE=300"), "ATTN": ("cudnn", "ATTN=cudnn does not run float32"),
    "DEVICE": ("mps" if torch.cuda.is_available() else "cuda", "is not available here")}
# What depends on the clock or on the lengths of names, and what only repeats a setting.
LEFT_OUT = {"elapsed_s", "train_time_ms", "step_avg_ms", "tok_per_sec", "eval_time_ms", "mem_mib", "file", "bytes", "raw_bytes",
            "artifact_bytes", "total_bytes", "artifact_sha256", "lr", "export_clip", "iterations"}


def other_value(name: str) -> str:
    """On for off, another choice, or twice the number, or 1 for 0."""
    f = train_gpt.FIELDS[name]
    base = {**TINY, **SMALL}.get(name, f.default)
    known = ["1", "0"] if f.type is bool else get_args(f.type)
    if not known:
        return str(2 * type(f.default)(base) or 1)
    own = train_gpt.parse_value(name, str(base))
    return next(str(value) for value in known if train_gpt.parse_value(name, str(value)) != own)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Makes a run with some settings, in a folder of its own and only once; returns what came of it."""
    place, known, compiled, numbers = tmp_path_factory.mktemp("settings"), {}, [], itertools.count()
    shutil.copytree(make_shards(place), place / "other")
    write_shard(place / "other" / "tiny_train_000000.bin", [7, 8, 9] * 500)
    precision = torch.get_float32_matmul_precision()

    def run(*words, name=""):
        if words in known:
            return known[words]
        folder, shown = place / (name or str(next(numbers))), io.StringIO()
        folder.mkdir()
        patch.chdir(folder)
        compiled.clear()
        with redirect_stdout(shown):
            train_gpt.run(*train_gpt.load_config([*tiny_arguments("../tiny", **SMALL), *words], {}), "")
        files = {path.name: path for path in folder.rglob("*") if path.is_file()}
        artifact = train_gpt.read_saved(files["final_model.int8.ptz"])
        del artifact["about"]  # the settings
        checkpoint = train_gpt.read_saved(max(path for path in files.values() if path.parent.name == "checkpoints"))
        log = next(path for path in files.values() if path.suffix == ".jsonl").read_text(encoding="utf-8")
        events = [json.loads(line) for line in log.splitlines() if '"event": "config"' not in line]
        known[words] = [
            files["final_model.pt"].read_bytes(), train_gpt.saved(artifact),
            [{key: event[key] for key in event.keys() - LEFT_OUT} for event in events],
            sorted(path.relative_to(folder) for path in files.values()),
            [line.partition(":")[0] for line in shown.getvalue().splitlines()[1:]],
            [group.get("fused") for state in checkpoint["optimizers"] for group in state["param_groups"]],
            torch.get_float32_matmul_precision(), list(compiled)]
        return known[words]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "compile", lambda module, **_: compiled.append(type(module)))
        patch.setattr(torch, "compile", lambda function, **_: compiled.append("function") or function)
        patch.setattr(train_gpt.subprocess, "getoutput", lambda command, errors: "")  # It would take a third of the time.
        run("CHECKPOINT_EVERY=1", name="start")
        assert run() == run("SEED=1337")  # Runs repeat: what differs below is no noise.
        yield run
    torch.set_float32_matmul_precision(precision)


@pytest.mark.parametrize("name", train_gpt.FIELDS)
def test_another_value_matters(outcome, name):
    if name in REFUSED:
        value, message = REFUSED[name]
        with pytest.raises(ValueError, match=message):
            outcome(f"{name}={value}")
    else:
        value, *needs = (OTHERS.get(name) or other_value(name)).split()
        is_other = outcome(f"{name}={value}", *needs) != outcome(*needs)
        assert is_other, f"{name}={value} changes nothing; in OTHERS, give it another value, or what it needs: \"{value} NAME=value\""
