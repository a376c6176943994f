"""The numbers that a run computes, bit for bit: a rewrite of the trainer must not change them.

    python tests/test_digests.py [TRAINER]       print the digests of a train_gpt.py as JSON

Each case trains eight steps of a tiny model in float32, on one rank and one thread, without torch.compile. Kernels are held to
instructions that every x86-64 machine has, so that the digests do not depend on the machine; they hold for one release of
PyTorch. tests/digests.json has those of train_gpt.py. If a change of the numbers is intended, write the file again. FUSED=0 is no
case: its square roots differ between an AMD and an Intel machine.
"""

import hashlib
import importlib.util
import io
import json
import os
import platform
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, make_shards, run_trainer, tiny_arguments

COMMITTED = Path(__file__).with_name("digests.json")
PORTABLE = {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41",
            "PYTHONHASHSEED": "0"}
BASE = {"ITERATIONS": "8", "WARMDOWN_ITERS": "3", "MUON_MOMENTUM_WARMUP_STEPS": "5", "TRAIN_BATCH_TOKENS": "256",
        "MICRO_BATCH_TOKENS": "256", "VAL_LOSS_EVERY": "0", "TRAIN_LOG_EVERY": "10", "WARMUP_STEPS": "0",
        "NUM_LAYERS": "3", "INT8_KEEP_FLOAT_MAX_NUMEL": "100", "CHECKPOINT_EVERY": "8", "RUN_ID": "run", "ATTN": "math"}
SWITCHES = [
    "VOCAB_PAD=64", "TIE_EMBEDDINGS=0", "INIT=gpt2", "MLP_SLOPE=0.3", "SHIFT_KEYS=1", "EXCLUSIVE_ATTN=1",
    "SMEAR=1", "OPTIMIZER=adamw", "MUON_ROW_NORM=1", "WEIGHT_DECAY=0.1",
    "LR_SCHEDULE=cosine", "LR_WARMUP_STEPS=5", "WARMDOWN_FRACTION=0.6", "MIN_LR=0.1", "GRAD_CLIP_NORM=0.5",
    "LOADER=shuffled", "OVERFIT=1", "EXPORT_BITS=5", "EMBED_BITS=6", "EXPORT_CLIP=3", "DROPOUT=0.2",
]
CASES = [
    "", *SWITCHES, "NUM_LAYERS=1", "NUM_LAYERS=4 NUM_KV_HEADS=2", "MLP_MULT=3 ROPE_BASE=1000", "ATTN=tiled", "ATTN=flash",
    "LOGIT_SOFTCAP=15 QK_GAIN_INIT=3 TIED_EMBED_INIT_STD=0.02", "MICRO_BATCH_TOKENS=64 GRAD_ACCUM_STEPS=4",
    "OPTIMIZER=adamw WEIGHT_DECAY=0.1 TIE_EMBEDDINGS=0 GRAD_CLIP_NORM=1 INIT=gpt2 BETA2=0.98",
    "TIE_EMBEDDINGS=0 EXPORT_BITS=4", "CONTROL_TENSOR_NAME_PATTERNS=q_gain,mlp_scale",
    "LANES=2", "LANES=1",
    " ".join(switch for switch in SWITCHES if switch not in ("OPTIMIZER=adamw", "OVERFIT=1", "LR_SCHEDULE=cosine", "DROPOUT=0.2")),
]


# What the quick suite has time for: the last one has most switches, and these have the others.
QUICK = ["", "ATTN=tiled", "LANES=1", "LR_SCHEDULE=cosine", "DROPOUT=0.2", *(case for case in CASES if " " in case)]


def tensors_of(value) -> list[torch.Tensor]:
    """All tensors in nested containers. Momentum that is kept as one tensor for several matrices is taken apart."""
    if isinstance(value, torch.Tensor):
        return list(value) if value.ndim == 3 else [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    return [tensor for part in values for tensor in tensors_of(part)]


def digests_of(trainer, case: str, data: Path, folder: Path) -> str:
    """The SHA-256 of the artifact without its settings, which a new switch adds to, and of the tensors in the last checkpoint,
    sorted."""
    folder.mkdir()
    os.chdir(folder)
    sys.argv[1:] = [*tiny_arguments(data, **BASE), *case.split()]
    trainer.main()
    artifact = trainer.read_saved("final_model.int8.ptz")
    del artifact["about"]
    state = torch.load(io.BytesIO(Path("checkpoints", "run_00000008.pt").read_bytes()), weights_only=True)
    tensors = tensors_of([state["model"], state.get("optimizers", state.get("moments"))])
    parts = sorted(hashlib.sha256(repr((t.dtype, t.shape)).encode() + t.numpy().tobytes()).hexdigest() for t in tensors)
    return f"{hashlib.sha256(trainer.saved(artifact)).hexdigest()} {hashlib.sha256(''.join(parts).encode()).hexdigest()}"


def all_digests(path: Path, cases: list[str]) -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("digested_trainer", path)
    trainer = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = trainer  # dataclasses look their module up
    spec.loader.exec_module(trainer)
    trainer.bfloat16_is_native = lambda device: False  # Muon's products follow it
    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        data = make_shards(Path(temporary))
        for number, case in enumerate(cases):
            found[case] = digests_of(trainer, case, data, Path(temporary, str(number)))
        os.chdir("/")
    return found


def compute(trainer: Path, cases: list[str]) -> dict[str, str]:
    """The digests of a trainer, from a process with portable kernels."""
    done = run_trainer(REPOSITORY, "--here", trainer, *cases, script=__file__, environment=PORTABLE)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("cases", [QUICK, pytest.param(CASES, marks=pytest.mark.slow)], ids=["quick", "all"])
def test_every_switch_computes_what_it_did(cases):
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))
    if platform.machine() != "x86_64" or torch.__version__.split("+")[0] != committed["torch"]:
        pytest.skip(f"the digests are those of x86-64 and PyTorch {committed['torch']}")
    found = compute(REPOSITORY / "train_gpt.py", cases)
    assert not [case for case in cases if found[case] != committed["digests"].get(case)]
    assert len(set(found.values())) == len(cases) and committed["digests"].keys() == set(CASES)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        print(json.dumps(all_digests(Path(sys.argv[2]), sys.argv[3:])))
    else:
        target = Path(sys.argv[1] if len(sys.argv) > 1 else REPOSITORY / "train_gpt.py").resolve()
        print(json.dumps({"torch": torch.__version__.split("+")[0], "digests": compute(target, CASES)}, indent=1))
