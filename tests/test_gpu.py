"""Test what only a GPU can show. `./run.sh test -m gpu` takes a few minutes on one H100, longer with several.

The tests make their data. At the end, they print a table of what they measured, to be sent to the authors. All helpers
take a device, so that they can be tried on a CPU.
"""

import gc
import json
import signal
from pathlib import Path

import conftest  # first: it makes the scripts importable
import numpy as np
import probe
import pytest
import torch
import train_gpt
from conftest import events, run_here, run_trainer, write_shard
from prepare import learn_vocabulary
from test_faults import at_calls

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(
    not torch.cuda.is_available(), reason=f"PyTorch {torch.__version__} sees no CUDA device")]

# On a CPU, bfloat16 differs from float32 by 0.003 in the loss with this rate of the table, by 0.05 with the default.
SMALL = {"NUM_LAYERS": 4, "MODEL_DIM": 256, "NUM_HEADS": 4, "NUM_KV_HEADS": 2, "TRAIN_SEQ_LEN": 512,
         "TRAIN_BATCH_TOKENS": 4096, "VAL_BATCH_SIZE": 65536, "ITERATIONS": 20, "WARMUP_STEPS": 1, "WARMDOWN_ITERS": 5,
         "TIED_EMBED_LR": 0.01, "MAX_WALLCLOCK_SECONDS": 0, "VAL_LOSS_EVERY": 0, "TRAIN_LOG_EVERY": 1, "COMPILE": 0,
         "DTYPE": "float32", "MATMUL_PRECISION": "highest"}
RECIPE = {"SHIFT_KEYS": 1, "SMEAR": 1, "EXCLUSIVE_ATTN": 1, "MLP_SLOPE": 0.5,
          "LANES": 1, "MUON_ROW_NORM": 1, "EXPORT_BITS": 5}  # as in the presets
COMPILED = {**RECIPE, "COMPILE": 1, "VAL_BATCH_SIZE": 8192}  # Validation, in smaller batches, has a graph of its own.
# Losses of about 4 nats over 20 steps. In float32, another order of summation changes them by 1e-4 on a CPU.
FLOAT32_LIMIT = 2e-3
HALF_LIMIT = 0.03
SHARD_TOKENS = 1 << 20
found: dict[str, str] = {}  # rows of the table


def arguments_of(data: Path, device: str, **settings) -> list[str]:
    settings = {"DATA_PATH": data, "TOKENIZER_PATH": data / "vocabulary.model", "DEVICE": device, "RUN_ID": "run", **settings}
    return [f"{name}={value}" for name, value in settings.items()]


def small_run(folder: Path, data: Path, device: str, **changes) -> Path:
    """Train the small model in this process; return the folder, which then has the logs and the model."""
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_here(monkeypatch, folder, *arguments_of(data, device, **{**SMALL, **changes}))
    return folder


def losses_of(folder: Path) -> dict[int, float]:
    return {event["step"]: event["train_loss"] for event in events(folder, "run") if event["event"] == "train"}


def compare_losses(title: str, losses: dict[int, float], wanted: dict[int, float], limit: float) -> None:
    """Note the largest difference in the table; fail if it is above the limit, or if a loss is not finite."""
    assert losses.keys() == wanted.keys() and losses
    difference = max(abs(losses[step] - wanted[step]) for step in losses)
    found[f"{title}: largest difference of the loss"] = f"{difference:.1e} (limit {limit:g})"
    assert all(np.isfinite([*losses.values()])) and difference <= limit, (title, losses, wanted)


@pytest.fixture(scope="module", autouse=True)
def table():
    """Hands the table to conftest.py when the last test is done, also after failures. The trainer's variables are taken
    out of the environment, so that the defaults are the defaults."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in train_gpt.FIELDS:
            monkeypatch.delenv(name, raising=False)
        yield
    device = torch.cuda.get_device_properties(0)
    rows = {"GPUs": f"{torch.cuda.device_count()}x {device.name}, {device.total_memory / 2**30:.0f} GiB, compute capability "
                    f"{device.major}.{device.minor}",
            "versions": f"{conftest.versions()}, cuDNN {torch.backends.cudnn.version()}", **found}
    conftest.GPU_TABLE[:] = ["| GPU test of train_gpt.py | |", "|---|---|",
                             *(f"| {name} | {value} |" for name, value in rows.items())]


@pytest.fixture(autouse=True)
def switches():
    """Restores what a run sets for its process, and frees the card's memory for the subprocesses."""
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Eight shards, one validation shard and a vocabulary of 1,024. The text repeats 512 phrases of 16 tokens, so that the loss
    falls quickly."""
    folder, generator = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    phrases = np.minimum(generator.zipf(1.3, (512, 16)), 1024) - 1
    for name in [*(f"train_{number:06d}" for number in range(8)), "val_000000"]:
        tokens = phrases[generator.integers(0, 512, SHARD_TOKENS // 16)].ravel()
        write_shard(folder / f"made_{name}.bin", tokens if "train" in name else tokens[:(1 << 14) + 1])
    text = [path.read_text(encoding="utf-8") for path in conftest.REPOSITORY.glob("tests/*.py")]
    learn_vocabulary("sp1024", text, folder / "vocabulary.model")
    return folder


@pytest.fixture(scope="module")
def run_once(tmp_path_factory, data):
    """small_run in a new folder; a run that was done before is not repeated."""
    done = {}

    def run(device: str, **changes) -> Path:
        key = json.dumps([device, changes], sort_keys=True)
        if key not in done:
            done[key] = small_run(tmp_path_factory.mktemp("small"), data, device, **changes)
        return done[key]
    return run


def native_type() -> str:
    """The 16-bit type that the card computes in hardware, by its generation."""
    return "bfloat16" if torch.cuda.get_device_capability() >= (8, 0) else "float16"


@pytest.mark.parametrize("dtype, limit", [("float32", FLOAT32_LIMIT), ("bfloat16", HALF_LIMIT)])
def test_losses_are_those_of_the_cpu_in_float32(run_once, dtype, limit):
    if dtype == "bfloat16" and native_type() != dtype:
        pytest.skip("this card has no bfloat16 in hardware")
    wanted = losses_of(run_once("cpu"))
    assert wanted[20] < wanted[1] - 2
    compare_losses(f"{dtype} on the GPU, float32 on the CPU", losses_of(run_once("cuda", DTYPE=dtype)), wanted, limit)


def test_the_presets_switches_compute_what_they_do_on_the_cpu(run_once):
    """Muon's updates are in bfloat16, so the limit is the one for 16 bits."""
    losses, wanted = losses_of(run_once("cuda", **COMPILED)), losses_of(run_once("cpu", **RECIPE))
    compare_losses("the presets' switches, compiled, and the CPU", losses, wanted, HALF_LIMIT)


@pytest.mark.parametrize("dtype, limit", [("float32", FLOAT32_LIMIT), ("native", HALF_LIMIT)])
def test_compiled_equals_eager(run_once, dtype, limit):
    """In float32, only the order of summation differs. In 16 bits, compiled kernels also round less often: they keep
    float32 between operations that they fuse."""
    settings = {"DTYPE": native_type() if dtype == "native" else dtype, "NUM_LAYERS": 2}
    eager, compiled = losses_of(run_once("cuda", **settings)), losses_of(run_once("cuda", **settings, COMPILE=1))
    compare_losses(f"compiled and eager in {settings['DTYPE']}", compiled, eager, limit)


@pytest.mark.parametrize("kernel", ["flash", "cudnn", "efficient"])
def test_attention_kernels_compute_what_the_math_kernel_does(kernel):
    """In the card's 16-bit type, at the default heads. 0.02 is four times what bfloat16 differs by on a CPU."""
    config, device = train_gpt.Config(dtype=native_type()), torch.device("cuda", 0)
    title, random = f"attention {kernel}: relative difference from math", torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, heads, 2048, 64, generator=random).to(device, getattr(torch, config.dtype)).requires_grad_()
              for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    results = []
    for name in ("math", kernel):
        try:
            train_gpt.choose_attention(train_gpt.replace(config, attn=name), device)
        except ValueError as error:
            found[title] = f"does not run: {error}".splitlines()[0]
            pytest.skip(found[title])
        y = train_gpt.causal_attention(*inputs, name)
        results.append([y.detach(), *torch.autograd.grad(y, inputs, y.detach())])
    difference = max(float((t - wanted).float().norm() / wanted.float().norm()) for wanted, t in zip(*results))
    found[title] = f"{difference:.4f} (limit 0.02)"
    assert difference < 0.02


def test_a_model_is_tried_on_the_card(data):
    """As ablate.py does before training: also in float32, which the kernels that are chosen for 16 bits do not take."""
    plan = probe.plan(train_gpt, arguments_of(data, "cuda", **{**SMALL, **COMPILED, "DTYPE": native_type()}))
    assert plan.get("reason") == "", plan


@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_compute_what_one_does(run_once, data, tmp_path, ranks):
    """Only the order of summation differs, in float32; Muon's updates are in bfloat16. Compiled, with two graphs."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    result = run_trainer(tmp_path, *arguments_of(data, "cuda", **{**SMALL, **COMPILED}), ranks=ranks)
    assert result.returncode == 0, result.stderr
    assert f"world_size:{ranks} grad_accum_steps:{8 // ranks} " in result.stdout
    compare_losses(f"{ranks} GPUs and 1", losses_of(tmp_path), losses_of(run_once("cuda", **COMPILED)), HALF_LIMIT)


def test_a_run_that_was_stopped_is_resumed(run_once, data, tmp_path):
    """The steps after SIGTERM have the losses of a run that was not stopped: only sums that the GPU adds in any order
    differ, by 1.5e-5 on an H100. A run that forgets Muon's momentum differs by 0.014 within ten steps, on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        at_calls(patch, train_gpt.Trainer, "train_step", {1 + 10}, lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
            small_run(tmp_path, data, "cuda")
    resumed, whole = losses_of(small_run(tmp_path, data, "cuda", RESUME="auto")), losses_of(run_once("cuda"))
    wanted = {step: whole[step] for step in range(11, 21)}
    compare_losses("resumed and not stopped, 10 steps", resumed, wanted, FLOAT32_LIMIT)


def test_the_type_is_chosen_by_the_card_and_float16_trains(run_once, monkeypatch):
    """Cards without bfloat16 in hardware train in float16; on others, this is what they would do without it."""
    ranks = train_gpt.Ranks(0, 1, torch.device("cuda", 0))
    assert train_gpt.resolve(train_gpt.Config(), ranks).dtype == native_type()
    monkeypatch.setattr(train_gpt, "bfloat16_is_native", lambda device: False)
    folder = run_once("cuda", DTYPE="auto")
    assert events(folder, "run")[0]["config"]["DTYPE"] == "float16"
    losses = losses_of(folder)
    assert all(np.isfinite([*losses.values()])) and losses[20] < losses[1] - 1
    found["float16: first and last loss"] = f"{losses[1]:.3f}, {losses[20]:.3f}"
