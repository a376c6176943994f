"""Find out whether a model may be scored, and score its artifact. Other tools run this file with a
script, "plan" or "score", and settings: what they would train, or an artifact on tokens.npy.

Text and bytes are read, and losses computed, by code of this file. For each position of a row, or
some of a long one, the tokens after it are replaced: no earlier logit may change. These must be
equal: a row alone and in its batch; training and evaluation mode; with gradients, without, and in
inference mode; loss and cross entropy; the score by the script's validation and by its logits.

Not found: training on the validation text, several updates in a step, times that are false in all
of a log, a leak after a rare token, a script that recognises this file or changes PyTorch, and
scores that are false by less than 0.001 bits per byte.
"""

import copy
import json
import math
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy, pad

ROOT = Path(__file__).resolve().parent.parent
APART = 1e-4  # of logits and nats in float32; shapes and kernels moved logits by 1.4e-5
SCORED_AGAIN = 1e-3  # bits per byte; compiled bfloat16 and eager float32 differed by 3.5e-4
CUT_TOKENS = {"cpu": 2**18, "cuda": 2**22}  # for the search of leaks; at least 512 positions of 512
FLOAT32_ATTN = "efficient"  # of a GPU's kernels that need little memory, one takes float32
SHORT = 512  # tokens of a row of which all positions can be tried
MODES = {"with gradients": torch.enable_grad, "without gradients": torch.no_grad, "in inference mode": torch.inference_mode}
# Folders of which libraries may read files while a model runs.
LIBRARIES = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/", sys.prefix, sys.base_prefix,
             *(path for path in sys.path if path.endswith("-packages")))


# ---- For other programs ------------------------------------------------------------------------


def read_text(config: dict, folder: Path = ROOT, most_rows=10**9) -> tuple[np.ndarray, int]:
    """Return the validation tokens of a log's "config", uint16 (N + 1,), and the bytes of the last
    N, by none of the trainer's code. Paths are relative to `folder`. Raises ValueError, OSError."""
    sys.path.append(str(ROOT / "data"))
    from tokenization import SPACE, load_tokenizer
    paths = sorted((folder / config["DATA_PATH"]).glob("*_val_[0-9]*.bin"))
    if not paths:
        raise ValueError(f"there is no DATA_PATH={config['DATA_PATH']} with *_val_*.bin")
    tokens = np.concatenate([np.fromfile(path, "<u2", offset=1024) for path in paths])
    length = config["TRAIN_SEQ_LEN"]
    rows = min(most_rows, (len(tokens) - 1) // length)
    tokens = tokens[:rows * length + 1]
    path = folder / config["TOKENIZER_PATH"]
    tokenizer = load_tokenizer(str(path) if path.is_file() else config["TOKENIZER_PATH"])
    size = int(tokenizer.sizes[tokens[1:]].sum())
    model = getattr(tokenizer, "model", None)
    if model and model.encode("a", out_type=str)[0].startswith(SPACE):
        # SentencePiece put a space before each document, which is not in the text.
        begins = np.array([model.is_control(i) for i in range(tokenizer.vocab_size)])
        has_space = np.array([text.startswith(b" ") for text in tokenizer.token_bytes])
        size -= int((begins[tokens[:-1]] & has_space[tokens[1:]]).sum())
    return tokens, size


def score_artifact(script: Path, artifact: Path, config: dict, tokens: np.ndarray,
                   threads: int = 0, stride: int = 0) -> tuple[np.ndarray, str]:
    """Score an artifact by its script's logits, in a new process and an empty folder.

    `config` is a log's "config", with all settings as they were used, `tokens` are read_text's.
    Returns the nats of each row, or of each window that moves by `stride` (N,), and why the
    artifact must not be scored, or "". Raises ValueError if the model gives no logits."""
    own = {"INIT_FROM": "artifact.ptz", "COMPILE": 0, "EVAL_STRIDE": stride, "DATA_PATH": "."}
    if config["DEVICE"] != "cpu":
        own |= {"DEVICE": "auto", "ATTN": FLOAT32_ATTN}
    words = [f"{name}={value}" for name, value in {**config, **own}.items() if value != ""]
    answer_to = secrets.token_hex()  # A script that prints an answer of its own does not know it.
    environment = {**os.environ, "PROBE": answer_to}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryDirectory() as place:
        shutil.copy(script, Path(place, "train_gpt.py"))
        shutil.copy(artifact, Path(place, "artifact.ptz"))
        np.save(Path(place, "tokens.npy"), tokens)
        command = [sys.executable, __file__, "train_gpt.py", "score", *words]
        result = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True,
                                errors="replace", check=False, stdin=subprocess.DEVNULL)
    if result.returncode:
        raise ValueError(f"it gives no logits: status {result.returncode}, {result.stderr[-300:]}")
    found = json.loads((result.stdout.splitlines() or ["{}"])[-1])
    if found.get("to") != answer_to:
        return np.zeros(0), "the script answers instead of probe.py"
    return np.array(found["nats"]), found["reason"]


def check_artifact(script: Path, artifact: Path, config: dict, text: tuple[np.ndarray, int],
                   bpb: float, threads: int = 0, stride: int = 0) -> tuple[float, str]:
    """Return the bits per byte of an artifact on a `text`, as read_text returns it, and why the
    score in its log, `bpb`, must not count, or "". Raises ValueError as score_artifact does."""
    nats, reason = score_artifact(script, artifact, config, text[0], threads, stride)
    scored = float(nats.sum()) / math.log(2) / text[1]
    if not reason and not abs(scored - bpb) <= SCORED_AGAIN:
        reason = f"its log says {bpb:.8f}, but by its logits, the artifact scores {scored:.8f}"
    return scored, reason


def check_clock(events: list[dict]) -> str:
    """Return why the training time in a log's events is wrong, by the time of its lines, or ""."""
    lines = [event for event in events if event["event"] in ("train", "val") and event["step"] > 0]
    scores_s = sum(event["eval_time_ms"] / 1000 for event in lines[1:] if event["event"] == "val")
    passed_s = lines[-1]["elapsed_s"] - lines[0]["elapsed_s"] - scores_s
    counted_s = (lines[-1]["train_time_ms"] - lines[0]["train_time_ms"]) / 1000
    if passed_s > 1.05 * counted_s + 5:
        return f"its clock counts {counted_s:.1f} s of training in {passed_s:.1f} s"
    return ""


# ---- One model ---------------------------------------------------------------------------------


def load_script(path: str):
    """Return a script as the module train_gpt."""
    spec = spec_from_file_location("train_gpt", path)
    sys.modules["train_gpt"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def note_files() -> list[str]:
    """Return a list, to which files are added that Python opens from now on, except libraries'."""
    names = []

    def note(event: str, arguments: tuple):
        if event == "open" and isinstance(arguments[0], str):
            name = os.path.abspath(arguments[0])
            if os.path.isfile(name) and not name.startswith(LIBRARIES):
                names.append(name)

    sys.addaudithook(note)  # for good: Python cannot remove it
    return names


def logits_of(model, rows: torch.Tensor) -> torch.Tensor:
    """Return the logits (B, T, V), float32, of rows of tokens (B, T), int64."""
    return model.logits(model.hidden(rows)).detach().float()


def is_apart(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether logits differ by more than float32's roundings, or are not finite."""
    return not (one - two).abs().max().item() <= APART


def nats_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of logits (B, T, V) and targets (B, T) by row, float64 (B,)."""
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets).sum(1, dtype=torch.float64)


@torch.inference_mode()
def score_windows(model, tokens: torch.Tensor, config, stride: int) -> torch.Tensor:
    """Return the nats of each window of a row's length, float64 (N,). Windows move by `stride`, for
    rows by their length. Each token after the first is scored once, in its first window."""
    length, batch, last = config.train_seq_len, rows_at_once(config), len(tokens) - 1
    windows, device = 1 + math.ceil((last - length) / stride), tokens.device
    stops = (length + stride * torch.arange(windows, device=device)).clamp(max=last)
    starts = pad(stops[:-1], (1, 0))  # of what a window scores
    nats = []
    for start, stop in zip(starts.split(batch), stops.split(batch)):
        places = stop[:, None] - length + torch.arange(length, device=device)
        targets = tokens[places + 1].where(places >= start[:, None], -100)  # has no cross entropy
        nats.append(nats_of(logits_of(model, tokens[places]), targets))
    return torch.cat(nats)


def rows_at_once(config) -> int:
    """Return the rows of a batch of validation."""
    tokens = config.val_batch_size // max(1, config.grad_accum_steps)
    return max(1, min(tokens, config.micro_batch_tokens or tokens) // config.train_seq_len)


@torch.inference_mode()
def find_leak(model, rows: torch.Tensor, cuts: np.ndarray, random) -> str:
    """Return where logits of rows (B, T) change with the tokens from a cut on, or "". Each cut, of
    1 to T - 1, is tried in one of the rows. Shapes are equal, and masked scores have a weight of
    exactly 0, so without a leak not one bit changes."""
    others = rows.flatten().roll(int(random.integers(1, max(2, rows.numel())))).view_as(rows)
    others = torch.where(others == rows, (others + 1) % int(rows.max() + 1), others)
    places = torch.arange(rows.size(1), device=rows.device)
    first = logits_of(model, rows)
    for begin in range(0, len(cuts), len(rows)):
        part = np.resize(cuts[begin:begin + len(rows)], len(rows))  # The last batch repeats some.
        is_before = places < torch.from_numpy(part).to(rows.device)[:, None]
        changed = logits_of(model, torch.where(is_before, rows, others))
        differs = ((changed != first).any(-1) & is_before).nonzero()
        if len(differs):
            return f"its logits depend on later tokens (position {differs[0, 1].item()} of a row)"
    return ""


def find_fault(model, own, rows: torch.Tensor, targets: torch.Tensor, random) -> str:
    """Return why a model must not be scored, or "", by rows and targets (B, T) of validation.
    `model` computes in float32, `own` is the same in the type of the run."""
    length = rows.size(1)
    most = max(1, CUT_TOKENS[rows.device.type] // length)
    cuts = 1 + random.permutation(length - 1)
    with torch.inference_mode():
        first = logits_of(model, rows)
        if not torch.equal(first, logits_of(model, rows)):
            return "its logits differ from call to call"
        if any(is_apart(first[i], logits_of(model, rows[i:i + 1])[0]) for i in range(len(rows))):
            return "its logits depend on other rows"
        leak = find_leak(own, rows, cuts[:most], random)
        if not leak and len(cuts) > most:
            leak = find_leak(own, rows[:, :SHORT].contiguous(), np.arange(1, SHORT), random)
        if leak:
            return leak
    for kind in ("evaluation", "training"):
        model.train(kind == "training")
        for name, mode in MODES.items():
            # Gradients keep every activation: on a GPU, not all rows would fit into its memory.
            fit = 2 if rows.device.type == "cuda" and mode is torch.enable_grad else None
            for part in (slice(fit), slice(1)):
                with mode():
                    logits = logits_of(model, rows[part])
                    loss = model(rows[part], targets[part]).item()
                if is_apart(logits, first[part]):
                    return f"its logits differ {name}, in {kind} mode"
                entropy = nats_of(logits, targets[part]).sum().item() / targets[part].numel()
                if not abs(loss - entropy) <= APART:
                    return f"its loss, {loss:.4f}, is not the cross entropy of its logits, {entropy:.4f}"
    return ""


def examine(train_gpt, own, config, tokens: np.ndarray, stride: int) -> tuple[torch.Tensor, str]:
    """Return the nats of each window of tokens (N + 1,), and why the model must not be scored, or
    "". In every row, one more cut is tried. After any edit of the script, the draws are others."""
    random = np.random.default_rng([*sha256(Path(train_gpt.__file__).read_bytes()).digest()])
    exact, length, batch = copy.deepcopy(own).float(), config.train_seq_len, rows_at_once(config)
    exact.compute_dtype = torch.float32
    tokens = torch.from_numpy(tokens.astype(np.int64)).to(next(own.parameters()).device)
    inputs, targets = tokens[:-1].view(-1, length), tokens[1:].view(-1, length)
    files = note_files()
    reasons = [find_fault(exact, own, inputs[:batch], targets[:batch], random)]
    nats = score_windows(exact.eval(), tokens, config, stride or length)
    for rows in inputs.split(batch):
        cuts = random.integers(1, max(2, length), len(rows))
        reasons.append(find_leak(own, rows, cuts, random))
    reasons += [f"it reads {file} while it is scored" for file in files]
    return nats, next(filter(None, reasons), "")


def score(train_gpt, settings: list[str]) -> dict:
    """Return "nats", the loss of the artifact INIT_FROM on each row of tokens.npy, and the "reason"
    for which it is invalid, or ""."""
    config, _ = train_gpt.load_config(settings, {})
    own = train_gpt.GPT(config)
    train_gpt.load_weights(own, config.init_from)
    own.to("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")
    nats, reason = examine(train_gpt, own, config, np.load("tokens.npy"), config.eval_stride)
    return {"nats": nats.tolist(), "reason": reason}


# ---- Before training ---------------------------------------------------------------------------


def find_fault_before(train_gpt, validation, ranks, text: tuple[np.ndarray, int]) -> str:
    """Return why the model of a resolved Config, or the script's Validation, must not be used, or
    "". They are tried with random weights on a `text`, as read_text returns it."""
    config = validation.config
    if ranks.device.type == "cuda":  # A run has enabled only its own kernel of attention.
        config = replace(config, attn=FLOAT32_ATTN, compile="0")
        torch.backends.cuda.enable_mem_efficient_sdp(True)
        torch.backends.cuda.enable_math_sdp(True)  # for widths that the other does not take
    torch.manual_seed(0)
    own = train_gpt.GPT(config).to(ranks.device)
    with torch.no_grad():
        for weight in own.parameters():  # matrices of zeros would hide what they multiply
            weight += torch.randn_like(weight) * weight.shape[-1:].numel() ** -0.5
    nats, reason = examine(train_gpt, own, config, text[0], stride=0)
    if reason:
        return reason
    part = copy.copy(validation)
    part.config = replace(config, seed=secrets.randbelow(2**31))
    part.tokens, part.bytes, part.num_targets = *text, len(text[0]) - 1
    own.float().compute_dtype = torch.float32
    found, total = part.score(own), nats.sum().item()
    loss, bpb = total / (len(text[0]) - 1), total / math.log(2) / text[1]
    if not max(abs(found["val_loss"] - loss), abs(found["val_bpb"] - bpb)) <= APART:
        return (f"its validation says {found['val_loss']:.4f} nats, {found['val_bpb']:.4f} bits "
                f"per byte; by its logits, they are {loss:.4f} and {bpb:.4f}")
    return ""


def plan(train_gpt, settings: list[str]) -> dict:
    """Return what the log of a run with these settings would say first, and the "reason" for which
    its scores would be wrong, or ""; or "error", if it would not start."""
    try:
        config, _ = train_gpt.load_config(settings, dict(os.environ))
        ranks = train_gpt.start_ranks(config)
        config = train_gpt.resolve(config, ranks)
        if ranks.device.type == "mps":  # It has no float64.
            ranks = replace(ranks, device=torch.device("cpu"))
        validation = train_gpt.Validation(config, ranks)
        values = {name.upper(): value for name, value in asdict(config).items()}
        _, size = read_text(values, Path())
        text = read_text(values, Path(), int(2.5 * rows_at_once(config)))
    except (ValueError, OSError) as error:
        return {"error": str(error)}
    reason = find_fault_before(train_gpt, validation, ranks, text)
    if validation.bytes != size:
        reason = f"it counts {validation.bytes:,} bytes of validation text, which has {size:,}"
    gpu = torch.cuda.get_device_name() if config.device == "cuda" else ""
    return {"config": values, "data_sha256": validation.data_sha256, "val_bytes": validation.bytes,
            "val_tokens": len(validation.tokens) - 1, "torch": torch.__version__, "world_size": 1,
            "threads": torch.get_num_threads(), "gpu": gpu, "reason": reason}


if __name__ == "__main__":
    if "--help" in sys.argv:
        sys.exit(f"usage: other scripts run this file. {__doc__}")
    _, script, command, *words = sys.argv
    answer_to = os.environ.pop("PROBE", "")
    answer = {"plan": plan, "score": score}[command](load_script(script), words)
    print(json.dumps({**answer, "to": answer_to}))
