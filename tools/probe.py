"""Ask a script's model whether it may be scored, and print the answer as JSON. rescore.py and ablate.py run this file.

    python tools/probe.py SCRIPT score VARIABLE=value ...      an artifact and the tokens of tokens.npy, here: "nats", the sum of
                                                               the losses after the first token, and "apart"
    python tools/probe.py SCRIPT plan < lists.json             what lists of settings would train, and why a model is invalid

"apart" is the largest difference between the logits of whole rows of tokens and of their beginnings alone. It is large if a
model sees later tokens or other rows.
"""

import argparse
import json
import math
import os
import sys
import traceback
from importlib.util import module_from_spec, spec_from_file_location

import numpy as np
import torch

BATCH_TOKENS = 8192
APART = 1e-3  # float32 logits of a row and of its beginning; 1.4e-5 was measured


def load_script(path: str):
    """Return a script as the module train_gpt."""
    spec = spec_from_file_location("train_gpt", path)
    sys.modules["train_gpt"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def logits_of(model, rows: np.ndarray) -> torch.Tensor:
    """Return the logits (B, T, V), float32, of rows of tokens (B, T)."""
    device = next(model.parameters()).device
    return model.logits(model.hidden(torch.from_numpy(rows.astype(np.int64)).to(device))).float().cpu()


def apart(model, rows: np.ndarray, logits: torch.Tensor, row: int, cut: int) -> float:
    """Return the largest difference between the logits of rows (B, T) and of the first `cut` tokens of one of them alone."""
    beginning = logits_of(model, rows[row:row + 1, :cut])
    return (beginning - logits[row:row + 1, :cut]).abs().max().item()  # a NaN stays


@torch.inference_mode()
def score(train_gpt, settings: list[str]) -> dict:
    """Return "nats" and "apart" of the artifact INIT_FROM on tokens.npy."""
    config, _ = train_gpt.load_config(settings, {})
    model = train_gpt.GPT(config)
    train_gpt.load_weights(model, config.init_from)
    model.compute_dtype = torch.float32
    uses_gpu = config.device != "cpu" and torch.cuda.is_available()
    model.float().eval().to("cuda" if uses_gpu else "cpu")
    tokens = np.load("tokens.npy")
    length = config.train_seq_len
    inputs, targets = tokens[:-1].reshape(-1, length), tokens[1:].reshape(-1, length)
    batch = math.ceil(BATCH_TOKENS / length)
    random = np.random.default_rng(0)
    nats, differences = 0.0, []
    for number, first in enumerate(range(0, len(inputs), batch)):
        rows = inputs[first:first + batch]
        logits = logits_of(model, rows)
        wanted = torch.from_numpy(targets[first:first + batch].astype(np.int64))
        nats += torch.nn.functional.cross_entropy(logits.mT, wanted, reduction="sum").item()
        for _ in range(4 if number % 8 == 0 else 0):
            row, cut = random.integers(len(rows)), random.integers(1, length + 1)
            differences.append(apart(model, rows, logits, row, cut))
    return {"nats": nats, "apart": float(np.max(differences))}


@torch.inference_mode()
def find_fault(train_gpt, config, source: str) -> str:
    """Return why the model of a resolved Config, for the CPU in float32, must not be scored, or "". It is tried with random
    weights and tokens, in the mode (training or not) in which the script scores it."""
    torch.manual_seed(0)
    model = train_gpt.GPT(config).float()
    model.compute_dtype = torch.float32
    model.loops = getattr(config, "num_loops", 0)  # of the scripts of older records
    model.train(".eval()" not in source)
    for weight in model.parameters():  # matrices that start at zero would hide what they multiply
        weight += torch.randn_like(weight) * weight.shape[-1:].numel() ** -0.5  # a scalar has no width
    length = config.train_seq_len
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=(max(2, 1024 // length), length + 1))
    rows = tokens[:, :-1]
    logits = logits_of(model, rows)
    if not torch.equal(logits, logits_of(model, rows)):
        return "its logits differ from call to call"
    last = len(rows) - 1
    if not max(apart(model, rows, logits, row, length) for row in (0, last)) <= APART:
        return "its logits depend on other rows"
    one = rows[last:]
    if not max(apart(model, one, logits[last:], 0, cut) for cut in {1, length // 3 + 1, max(1, length - 1)}) <= APART:
        return "its logits depend on later tokens"
    targets = torch.from_numpy(tokens[:, 1:])
    loss = model(torch.from_numpy(rows), targets).item()
    entropy = torch.nn.functional.cross_entropy(logits.mT, targets).item()
    if not abs(loss - entropy) <= APART:
        return f"its loss in validation, {loss:.4f}, is not the cross entropy of its logits, {entropy:.4f}"
    return ""


def plan(train_gpt, settings: list[str], source: str) -> dict:
    """Return what the log of a run with these settings would say first, with a verdict, "invalid", "failed" or "", and its
    reason; or "error", if it would not start."""
    try:
        config, _ = train_gpt.load_config(settings, dict(os.environ))
        ranks = train_gpt.start_ranks(config)
        config = train_gpt.resolve(config, ranks)
        validation = train_gpt.Validation(config, ranks)
        gpu = torch.cuda.get_device_name() if config.device == "cuda" else ""
        values = {name: getattr(config, field.name) for name, field in train_gpt.FIELDS.items()}
        try:
            on_cpu, _ = train_gpt.load_config([*settings, "DEVICE=cpu", "DTYPE=float32", "ATTN=auto"], dict(os.environ))
            on_cpu = train_gpt.resolve(on_cpu, train_gpt.Ranks(0, 1, torch.device("cpu")))
            reason = find_fault(train_gpt, on_cpu, source)
            verdict = "invalid" if reason else ""
        except Exception as error:  # a script that is being written fails in many ways
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == train_gpt.__file__]
            where = "".join(f"line {number}: " for number in lines[-2:])
            verdict, reason = "failed", f"its model cannot be run: {where}{error!r}"
    except (ValueError, OSError) as error:
        return {"error": str(error)}
    return {"config": values, "data_sha256": validation.data_sha256, "val_tokens": len(validation.tokens) - 1,
            "val_bytes": validation.bytes, "torch": torch.__version__, "world_size": 1,
            "threads": torch.get_num_threads(), "gpu": gpu, "verdict": verdict, "reason": reason}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("command", choices=("score", "plan"))
    parser.add_argument("settings", nargs="*", metavar="VARIABLE=value")
    options = parser.parse_args()
    train_gpt = load_script(options.script)
    if options.command == "score":
        print(json.dumps(score(train_gpt, options.settings)))
        return
    with open(options.script, encoding="utf-8") as file:
        source = file.read()
    print(json.dumps([plan(train_gpt, words, source) for words in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
