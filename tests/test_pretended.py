"""The whole program on GPUs that are not there (pretended.py): what CUDA, MPS and NCCL refuse fails on a machine without them."""

import json

import pytest
import torch.utils.backend_registration
from conftest import REPOSITORY, events, run_trainer, tiny_arguments

pytestmark = pytest.mark.skipif(not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
                                reason=f"PyTorch {torch.__version__} has no devices made in Python; 2.10 has")
SETTINGS = {  # all techniques; small matrices are rounded, too; the clock does not count
    "RUN_ID": "run", "OUT_DIR": "out", "COMPILE": "auto", "DTYPE": "auto", "INT8_KEEP_FLOAT_MAX_NUMEL": 256, "EXPORT_BITS": 6,
    "EXPORT_CLIP": 8, "GRAD_CLIP_NORM": 1, "LANES": 1,
    "SMEAR": 1, "SHIFT_KEYS": 1, "EXCLUSIVE_ATTN": 1, "MUON_ROW_NORM": 1, "EVAL_STRIDE": 8, "CHECKPOINT_EVERY": 2,
    "MLP_SLOPE": 0.5, "WEIGHT_DECAY": 0.1, "DROPOUT": 0.1}
H100, T4, RTX_5090, MAC = "cuda 9.0 80", "cuda 7.5 15", "cuda 12.0 32", "mps 0.0 0"
CARDS = {  # device, type, attention kernel; graphs
    H100: ("cuda", "bfloat16", "cudnn", 1), T4: ("cuda", "float16", "efficient", 1),
    RTX_5090: ("cuda", "bfloat16", "flash", 1), MAC: ("mps", "float32", "math", 0)}
ACCEPTED = ("plain = validate; validate = lambda its, *args: (its.model.rotary[torch.tensor([0])], "  # an index on the CPU
            "its.ranks.world_size > 1 and dist.barrier(), plain(its, *args))")
SMALLER = "DATA_PATH TOKENIZER_PATH VOCAB_SIZE TRAIN_SEQ_LEN TRAIN_BATCH_TOKENS VAL_BATCH_SIZE ITERATIONS RUN_ID".split()


def run(folder, card, *arguments, ranks=1, plant="", script=REPOSITORY / "tests" / "pretended.py"):
    environment = {"PRETEND": card, "PLANT": plant, "OMP_NUM_THREADS": "1"}
    return run_trainer(folder, *arguments, ranks=ranks if ranks > 1 else 0, environment=environment, script=script)


def values(folder, event, name):
    return [line[name] for line in events(folder, "run") if line["event"] == event]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory, data):
    """The losses and gradient norms of the same run on the CPU in float32."""
    folder = tmp_path_factory.mktemp("cpu")
    arguments = tiny_arguments(data, **{**SETTINGS, "DTYPE": "float32", "COMPILE": 0})
    done = run(folder, "", *arguments, script=REPOSITORY / "train_gpt.py")
    assert done.returncode == 0, done.stderr
    return [values(folder, "train", name) for name in ("train_loss", "grad_norm")]


def complaints(folder, card, on_cpu, done):
    """What stopped a run or, by its log and by what the card saw, should have; "" for a good one."""
    if done.returncode:
        return done.stderr
    device, dtype, kernel, graphs = CARDS[card]
    config, report = values(folder, "config", "config")[0], json.loads((folder / "pretended.json").read_text())
    losses, norms = (values(folder, "train", name) for name in ("train_loss", "grad_norm"))
    waits, peaks, products = report["waits"], report["peaks"], report["products"]
    is_right = {
        "memory is not logged": "\npeak memory allocated: 700 MiB reserved: 900 MiB\n" in done.stdout or device == "mps",
        f"the settings are {config}": (config["DEVICE"], config["DTYPE"], config["ATTN"]) == (device, dtype, kernel),
        f"the losses are {losses}, not {on_cpu[0]}": losses == pytest.approx(on_cpu[0], abs=0.01) and losses[-1] < losses[0] - 1,
        f"the norms of the gradients are {norms}, not {on_cpu[1]}": norms == pytest.approx(on_cpu[1], rel=0.05),
        f"the graphs are {report['graphs']}, not {graphs}": report["graphs"] == graphs,
        f"steps wait: {waits}": waits["train_step"][-1] == (dtype == "float16"),  # GradScaler asks for Muon's gradients
        f"batches wait: {waits}": not any(waits["batches"]) or device == "mps",  # from pinned memory
        f"Muon's products are in {products}": ("torch.bfloat16" in products) == (dtype == "bfloat16"),  # where there are units
        f"steps keep tensors: {peaks}": peaks["train_step"][-1] <= peaks["train_step"][-2],
        f"validation keeps tensors: {peaks}": max(peaks["log_final_scores"]) <= 1.2 * max(peaks["train_step"])}
    return "".join(text for text, holds in is_right.items() if not holds)


@pytest.mark.parametrize("card, ranks", [(H100, 2), (T4, 1), (MAC, 1), *(
    pytest.param(card, ranks, marks=pytest.mark.slow) for card, ranks in ((H100, 1), (H100, 4), (RTX_5090, 1)))])
def test_a_run_its_resumption_and_scoring_its_model(tmp_path, data, on_cpu, card, ranks):
    arguments = tiny_arguments(data, DEVICE=CARDS[card][0], **SETTINGS)
    assert not complaints(tmp_path, card, on_cpu, run(tmp_path, card, *arguments, ranks=ranks, plant=ACCEPTED))

    scored = values(tmp_path, "final", "val_bpb")
    done = run(tmp_path, card, *arguments, "ITERATIONS=0", "INIT_FROM=out/final_model.int8.ptz", "OUT_DIR=score")
    assert done.returncode == 0, done.stderr
    assert values(tmp_path, "final", "val_bpb") == pytest.approx(scored, abs=1e-5)

    done = run(tmp_path, card, *arguments, "RESUME=auto", "ITERATIONS=6", ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert values(tmp_path, "train", "step") == [5, 6]


def test_a_model_is_tried_on_a_card(tmp_path, data):
    """As ablate.py does: also in float32, which the kernels that are chosen for 16 bits do not take. (Pretended tensors cannot be
    inference tensors.)"""
    path = str(REPOSITORY / "tools")
    plant = f"torch.inference_mode = torch.no_grad; sys.path.append({path!r}); import probe; plan = probe.plan"
    plant += "; run = lambda *_: print(plan(sys.modules['train_gpt'], sys.argv[1:])) or 0"
    done = run(tmp_path, H100, *tiny_arguments(data, DEVICE="cuda", **SETTINGS), plant=plant)
    assert "'reason': ''}" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("presets", ["h100_8gpu_16mb", "h100_1gpu_16mb", "h100_8gpu_16mb rehearsal"])
def test_presets_run(tmp_path, data, presets):
    sizes = dict(MODEL_DIM=64, NUM_HEADS=2, NUM_KV_HEADS=1, WARMUP_STEPS=1, DEVICE="cuda")
    words = tiny_arguments(data, **sizes, RUN_ID="run")
    kept = [word for word in words if word.split("=")[0] in (*SMALLER, *sizes)]  # the rest is as in the preset
    files = [f"@{REPOSITORY}/records/presets/{preset}.env" for preset in presets.split()]
    done = run(tmp_path, H100, *files, *kept)
    assert done.returncode == 0, done.stderr
    assert len(values(tmp_path, "windows", "val_bpb")) == len(values(tmp_path, "final", "val_bpb")) == 1


DEVICE, HOST, RANKS, NCCL = "Expected all tensors to be on the same device", "No backend type", "the ranks differ", (H100, 2)
GATHER = "dist.all_gather_single" if hasattr(torch.distributed, "all_gather_single") else "dist.all_gather_into_tensor"
FAULTS = {  # what becomes which lambda, where `plain` is what it was; what refuses or betrays it; card and ranks where they matter
    "an array of NumPy is pinned": ("Ranks.to_device", "_, array: torch.tensor(array, pin_memory=True)", "Can't pin tensor"),
    "a CPU's generator": ("dropout", "x, _: x * torch.rand(1, device=x.device, generator=torch.Generator())", "type for generator"),
    "a number of the CPU in a stack": ("Ranks.sum", "_, x: torch.stack([torch.zeros(()), x]).sum()", DEVICE),
    "loaded to the old GPU": ("torch.load", "file, map_location, **options: plain(file, **options)", "without map_location"),
    "autocast without a type": ("GPT.forward", "*args: torch.autocast('cuda')(plain)(*args)", "autocast without a type"),
    "exponentials in 16 bits": ("GPT.logits", "model, x: linear(rms_norm(x), model.tok_emb)", "use float32", T4),
    "read before it has arrived": ("Tensor.cpu", "x: x.to('cpu', non_blocking=True)", "before it has arrived"),
    "one pinned buffer": ("Tensor.pin_memory", "x, held={}: held.setdefault(x.shape, plain(x)).copy_(x)", "pinned memory was"),
    "the model moves too late": ("build_optimizers", "model, *args: (plain(model.cpu(), *args), model.to('cuda'))[0]", "grad"),
    "NumPy from the device": ("Ranks.sum", "_, x: torch.from_numpy(x.numpy())", "numpy"),
    "a batch is not moved": ("Ranks.to_device", "_, array: torch.from_numpy(array)", DEVICE),
    "dropout's draws on the CPU": ("dropout", "x, _: x * torch.rand(len(x), 1, x.size(2))", DEVICE),
    "a sum on the CPU": ("Ranks.sum", "_, x: torch.zeros(()).add_(x)", DEVICE),
    "float64 on a Mac": ("Ranks.sum", "ranks, x: x.to(ranks.device, torch.float64)", "float64", MAC),
    "Adam's step": ("torch.zeros", "*x, dtype=None, device=None: plain(*x, dtype=dtype, device=None if dtype else device)", DEVICE),
    "attention without a trial": ("choose_attention", "*args: plain(*args) and 'flash'", "No available kernel", T4),
    "momentum on the CPU": (
        "Muon.step", "its: [s.update(momentum_buffer=s['momentum_buffer'].cpu()) for s in its.state.values()] and None or plain(its)",
        DEVICE),
    "another machine's GPU": ("start_ranks", "config: replace(plain(config), device=torch.device('cuda', 8))", "invalid device"),
    "the loss is read": ("GPT.forward", "*args: (loss := plain(*args), loss.item())[0]", "steps wait"),
    "a mask chooses": ("cross_entropy", "x, ids, _: F.cross_entropy(x[ids >= 0], ids[ids >= 0])", "steps wait"),
    "a new number each step": ("Trainer.train_step", "its, x: setattr(its.model, 'n', its.clock.step) or plain(its, x)", "graphs"),
    "a history on the GPU": ("Trainer.train_step", "*args, held=[]: held.append(plain(*args)) or held[-1]", "steps keep tensors"),
    "Ranks.max on the CPU": ("Ranks.max", "_, *values: dist.all_reduce(torch.tensor(values))", HOST, *NCCL),
    "a gather of gaps": (GATHER, "out, x, *rest, **named: plain(out, x.mT.contiguous().mT, *rest, **named)", "contiguous", *NCCL),
    "a sum of gaps": ("dist.all_reduce", "x, *args: plain(torch.stack((x, x), -1)[..., 0], *args)", "contiguous", *NCCL),
    "no device_id": ("dist.init_process_group", "*args, device_id, **options: plain(*args, **options)", "nccl for None", *NCCL),
    "only rank 0 logs": ("log_step", "its, *args: its.ranks.rank or plain(its, *args)", RANKS, *NCCL),
    "a share is not padded": ("F.pad", "x, sizes: x if sizes[4:5] == (0,) else plain(x, sizes)", RANKS, H100, 4),
    "nobody waits": (GATHER, "*args, **options: plain(*args, **options) and type('', (), {'wait': int})()", "wait for it", *NCCL),
    "the artifact stays on rank 0": ("dist.broadcast", "x, rank: None", RANKS, *NCCL),
    "gradients are summed": ("DDP.forward", "*args: 2 * (loss := plain(*args)) - loss.detach()", "norms of the", *NCCL),
    "DDP is passed by": ("DDP", "model, **options: model", RANKS, *NCCL),
    "clocks of their own": ("Clock.synchronize", "clock, bad=0: vars(clock).update(time_ms=clock.ranks.now_ms())", RANKS, *NCCL)}


@pytest.mark.parametrize("fault", [pytest.param(fault, marks=[pytest.mark.slow] * (i > 1)) for i, fault in enumerate(FAULTS)])
def test_a_planted_fault_is_refused(tmp_path, data, on_cpu, fault):
    name, wrong, refusal, *where = FAULTS[fault]
    card, ranks = [*where, 1][:2] if where else (H100, 1)
    arguments = tiny_arguments(data, DEVICE=CARDS[card][0], **SETTINGS)
    done = run(tmp_path, card, *arguments, ranks=ranks, plant=f"plain = {name}; {name} = lambda {wrong}")
    assert refusal in complaints(tmp_path, card, on_cpu, done)
