"""The whole program on GPUs that are not there (pretended.py): what CUDA, MPS and NCCL refuse fails on a machine without them."""

import json
import os
import subprocess
import sys

import pytest
import torch.utils.backend_registration
from conftest import REPOSITORY, events, make_shards, tiny_arguments

pytestmark = pytest.mark.skipif(not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
                                reason=f"PyTorch {torch.__version__} has no devices made in Python; 2.10 has")
SETTINGS = {  # all techniques; small matrices are rounded, too; the clock does not count
    "RUN_ID": "run", "OUT_DIR": "out", "COMPILE": "auto", "DTYPE": "auto", "INT8_KEEP_FLOAT_MAX_NUMEL": 256, "EXPORT_BITS": 6,
    "GPTQ_BATCHES": 1, "EXPORT_CLIP": 8, "GRAD_CLIP_NORM": 1, "LANES": 1,
    "SMEAR": 1, "SHIFT_KEYS": 1, "EXCLUSIVE_ATTN": 1, "MUON_ROW_NORM": 1, "EVAL_STRIDE": 8, "CHECKPOINT_EVERY": 2,
    "VAL_TOKENS": 512, "MLP_SLOPE": 0.5, "ROPE_DIMS": 8, "WEIGHT_DECAY": 0.1, "DROPOUT": 0.1}
H100, T4, RTX_5090, MAC = "cuda 9.0 80", "cuda 7.5 15", "cuda 12.0 32", "mps 0.0 0"
CARDS = {  # device, type, attention kernel; graphs: training, scoring
    H100: ("cuda", "bfloat16", "cudnn", 2), T4: ("cuda", "float16", "efficient", 2),
    RTX_5090: ("cuda", "bfloat16", "flash", 2), MAC: ("mps", "float32", "math", 0)}
SMALLER = "DATA_PATH TOKENIZER_PATH VOCAB_SIZE TRAIN_SEQ_LEN TRAIN_BATCH_TOKENS VAL_BATCH_SIZE ITERATIONS RUN_ID".split()


def run(folder, card, *arguments, ranks=1, script=REPOSITORY / "tests" / "pretended.py"):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    environment = {**os.environ, "PRETEND": card, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *launcher, str(script), *arguments], cwd=folder, env=environment, capture_output=True,
                          text=True, timeout=300, check=False)


def values(folder, event, name):
    return [line[name] for line in events(folder, "run") if line["event"] == event]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory, data):
    """The losses of the same run on the CPU in float32."""
    folder = tmp_path_factory.mktemp("cpu")
    arguments = tiny_arguments(data, **{**SETTINGS, "DTYPE": "float32", "COMPILE": 0})
    done = run(folder, "", *arguments, script=REPOSITORY / "train_gpt.py")
    assert done.returncode == 0, done.stderr
    return values(folder, "train", "train_loss")


@pytest.mark.parametrize("card, ranks", [(H100, 2), (T4, 1), (MAC, 1), *(
    pytest.param(card, ranks, marks=pytest.mark.slow) for card, ranks in ((H100, 1), (H100, 4), (RTX_5090, 1)))])
def test_a_run_its_resumption_and_scoring_its_model(tmp_path, data, on_cpu, card, ranks):
    device, dtype, kernel, graphs = CARDS[card]
    arguments = tiny_arguments(data, DEVICE=device, **SETTINGS)
    done = run(tmp_path, card, *arguments, ranks=ranks)
    assert done.returncode == 0, done.stderr
    config, losses = values(tmp_path, "config", "config")[0], values(tmp_path, "train", "train_loss")
    assert ("\npeak memory allocated: 700 MiB reserved: 900 MiB\n" in done.stdout) == (device == "cuda")
    assert (config["DEVICE"], config["DTYPE"], config["ATTN"]) == (device, dtype, kernel)
    assert losses == pytest.approx(on_cpu, abs=0.01) and losses[-1] < losses[0] - 1
    report = json.loads((tmp_path / "pretended.json").read_text())
    assert report["graphs"] == graphs
    assert report["waits"]["train_step"][-1] == (dtype == "float16")  # GradScaler asks for Muon's gradients
    assert not any(report["waits"]["batches"]) or device == "mps"  # from pinned memory
    assert ("torch.bfloat16" in report["products"]) == (dtype == "bfloat16")  # Muon's, where the card has units for them

    scored = values(tmp_path, "final", "val_bpb")
    done = run(tmp_path, card, *arguments, "ITERATIONS=0", "INIT_FROM=out/final_model.int8.ptz", "OUT_DIR=score")
    assert done.returncode == 0, done.stderr
    assert values(tmp_path, "final", "val_bpb") == pytest.approx(scored, abs=1e-5)

    done = run(tmp_path, card, *arguments, "RESUME=auto", "ITERATIONS=6", ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert values(tmp_path, "train", "step") == [5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("presets", ["h100_8gpu_16mb", "h100_1gpu_16mb", "h100_8gpu_16mb rehearsal"])
def test_presets_run(tmp_path, data, presets):
    sizes = dict(MODEL_DIM=64, NUM_HEADS=2, NUM_KV_HEADS=1, EVAL_STRIDE=16, WARMUP_STEPS=1, DEVICE="cuda")
    words = tiny_arguments(data, **sizes, RUN_ID="run")
    kept = [word for word in words if word.split("=")[0] in (*SMALLER, *sizes)]  # the rest is as in the preset
    files = [f"@{REPOSITORY}/records/presets/{preset}.env" for preset in presets.split()]
    done = run(tmp_path, H100, *files, *kept)
    assert done.returncode == 0, done.stderr
    assert len(values(tmp_path, "windows", "val_bpb")) == len(values(tmp_path, "final", "val_bpb")) == 1


SAME_DEVICE = "Expected all tensors to be on the same device"
FAULTS = {  # what was right, what is planted, what refuses it; card and ranks where they matter
    "an array of NumPy is pinned as it is made": (
        "tensor.pin_memory() if", "torch.tensor(array, pin_memory=True) if", "Can't pin tensor constructed from numpy"),
    "ids of the loss on the CPU": ("dtype=torch.int32, device=logits.device", "dtype=torch.int32", SAME_DEVICE),
    "optimizers are built before the model moves": (
        "self.model.to(ranks.device)\n        self.optimizers = build_optimizers(self.model, config, ranks)",
        "self.optimizers = build_optimizers(self.model, config, ranks)\n        self.model.to(ranks.device)", "grad"),
    "NumPy from the device": ("loss.to(device).double()", "torch.from_numpy(loss.numpy()).double()", "numpy"),
    "a validation batch is not moved": ("*ranks.to_device(pair)", "*torch.from_numpy(pair)", SAME_DEVICE),
    "dropout's draws on the CPU": ("x.size(2), device=x.device)", "x.size(2))", SAME_DEVICE),
    "Ranks.max on the CPU": (
        "dtype=torch.float64, device=self.device", "dtype=torch.float64", "No backend type", H100, 2),
    "a gather of a tensor with gaps": ("gather(gathered, updates.contiguous()", "gather(gathered, updates.mT.contiguous().mT", "contiguous", H100, 2),
    "Gram matrices in columns": ("layer.inputs_gram + rows.mT @ rows", "layer.inputs_gram + (rows.mT @ rows).mT", "contiguous", H100, 2),
    "a broadcast of CPU tensors": ("dist.broadcast(p.data, 0)", "dist.broadcast(p.data.cpu(), 0)", "No backend type", H100, 2),
    "float64 on a Mac": ('"cpu" if ranks.device.type == "mps" else ranks.device', "ranks.device", "float64", MAC),
    "Adam's step on the host after a load": (
        "optimizer.load_state_dict(old)", "optimizer.load_state_dict(old)\n            for its in optimizer.state.values():"
        '\n                its |= {"step": torch.zeros(())} if "step" in its else {}', SAME_DEVICE),
    "attention without a trial": ("causal_attention(q, k, k, kernel).sum().backward()", "pass", "No available kernel", T4),
    "a rotary table that is no buffer": ('self.register_buffer("rotary", torch.stack((angles.cos(), angles.sin())), persistent=False)',
                                         "self.rotary = torch.stack((angles.cos(), angles.sin()))", SAME_DEVICE),
    "momentum on the CPU": ('"momentum_buffer"] = params[0].new_zeros(', '"momentum_buffer"] = torch.zeros(', SAME_DEVICE),
    "Adam's moments on the GPU": ("moment.float().cpu().mean(1)", "moment.float().mean(1)", SAME_DEVICE),
    "device_id is forgotten": ("device_id=gpu)", "device_id=None)", "nccl for None", H100, 2),
    "the rank's number over all machines": (
        'local_rank if kind == "cuda" else None', 'rank + 8 if kind == "cuda" else None', "invalid device ordinal"),
    "losses on the CPU": ("torch.zeros((), device=self.ranks.device)", "torch.zeros(())", SAME_DEVICE),
    "Gram matrices stay on the GPU": ("ranks.sum(layer.inputs_gram).cpu()", "ranks.sum(layer.inputs_gram)", SAME_DEVICE)}
QUICK = ["an array of NumPy is pinned as it is made", "ids of the loss on the CPU"]


@pytest.mark.parametrize("fault", [*QUICK, *(pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS if fault not in QUICK)])
def test_a_planted_fault_is_refused(tmp_path, data, fault):
    right, wrong, refusal, *where = FAULTS[fault]
    card, ranks = [*where, 1] if len(where) == 1 else where or (H100, 1)
    source = (REPOSITORY / "train_gpt.py").read_text(encoding="utf-8")
    assert source.count(right) == 1
    (tmp_path / "tests").mkdir()
    (tmp_path / "train_gpt.py").write_text(source.replace(right, wrong), encoding="utf-8")
    script = tmp_path / "tests" / "pretended.py"
    script.write_bytes((REPOSITORY / "tests" / "pretended.py").read_bytes())
    arguments = tiny_arguments(data, DEVICE=CARDS[card][0], **SETTINGS)
    done = run(tmp_path, card, *arguments, ranks=ranks, script=script)
    if done.returncode == 0:  # one comes with a checkpoint
        done = run(tmp_path, card, *arguments, "RESUME=auto", "ITERATIONS=6", ranks=ranks, script=script)
    assert done.returncode and refusal in done.stderr, done.stderr
