"""What runs in the process of a trainer that compare.py starts: its clock, its text, its scores.

A patched trainer imports this file. As a script, it scores the weights that a run has left.
"""

import json
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
MARKS_S = [60, 120, 240, 360, 480]  # of training, when weights are saved; and at the end
RUN = json.loads(os.environ["PEERS_RUN"])  # by compare.py: the tool's settings, seed, folders
FREE_STEPS = RUN["free_steps"]  # first steps, in which a trainer compiles: they are off its clock
DTYPE = getattr(torch, RUN["dtype"])  # of matrix products


class Clock:
    """Seconds of training, without the first FREE_STEPS."""
    def __init__(self):
        self.marks_s = [mark for mark in MARKS_S if mark < RUN["seconds"]] + [math.inf]
        self.elapsed_s = 0.0

    def tick(self, step: int, model) -> tuple[bool, int]:
        """Call before each step. At the marks and the end, save the model, off the clock. Return
        whether this is the end, and the number of steps that the run will have at this speed."""
        now = time.perf_counter()
        if step <= FREE_STEPS:
            self.began = now
        self.elapsed_s = now - self.began
        is_late = self.elapsed_s >= RUN["seconds"]
        is_done = step == RUN["steps"] if RUN["steps"] else is_late
        if is_done or self.elapsed_s >= self.marks_s[0]:
            self.marks_s.pop(0)
            saved = {"step": step, "time_s": self.elapsed_s}
            saved["model"] = getattr(model, "_orig_mod", model)  # not the compiled one
            torch.save(saved, Path(RUN["folder"], f"saved_{step:08}.pt"))
            self.began = time.perf_counter() - self.elapsed_s
        if RUN["steps"]:
            return is_done, RUN["steps"]
        if step <= FREE_STEPS:
            return is_done, 10**6  # Nobody knows yet.
        expected = FREE_STEPS + (step - FREE_STEPS) * RUN["seconds"] / self.elapsed_s
        return is_done, max(step + 1, round(expected))


CLOCK = Clock()


def stream(rows: int, length: int, **unused):
    """Yield inputs and targets (rows, length), int64, of the training text in order, endlessly,
    and the place: as the loader to which nanochat refers those who have few, long documents."""
    tokens, start = np.load(Path(RUN["data"], "train.npy")), 0
    while True:
        places = np.arange(start, start + rows * length + 1) % len(tokens)
        piece = torch.from_numpy(tokens[places].astype(np.int64))
        place = {"epoch": 1 + start // len(tokens), "pq_idx": 0, "rg_idx": 0}
        yield piece[:-1].view(rows, length), piece[1:].view(rows, length), place
        start += rows * length


def bits_per_byte(model, tokens, length: int) -> float:
    """Score all validation tokens (N,) after the first, in rows of `length` that do not overlap
    and a shorter last one: the model's nats, in its own types, / ln 2 / bytes of the text."""
    tokens = torch.from_numpy(tokens.astype(np.int64))
    inputs, targets = tokens[:-1], tokens[1:]
    whole = len(inputs) // length * length
    batches = list(zip(inputs[:whole].view(-1, length).split(8),
                       targets[:whole].view(-1, length).split(8)))
    if whole < len(inputs):
        batches.append((inputs[None, whole:], targets[None, whole:]))
    nats = 0.0
    with torch.inference_mode(), torch.autocast("cpu", DTYPE, enabled=RUN["autocast"]):
        for batch in batches:
            loss = model(*batch)
            loss = loss[1] if isinstance(loss, tuple) else loss  # nanoGPT: logits and loss
            nats += loss.double().item() * batch[1].numel()
    return nats / math.log(2) / RUN["bytes"]


def sizes(model) -> dict:
    """Count a model's parameters and their bytes."""
    return {"parameters": sum(p.numel() for p in model.parameters()),
            "weight_bytes": sum(p.nbytes for p in model.parameters())}


def score_peer() -> list[dict]:
    """Score the models that `Clock` saved; return the events of the log."""
    tokens, events = np.load(Path(RUN["data"], "val.npy")), []
    for path in sorted(Path(RUN["folder"]).glob("saved_*.pt")):
        saved = torch.load(path, weights_only=False)  # We have just written it.
        model = saved.pop("model").eval()
        bpb = bits_per_byte(model, tokens, RUN["row"])
        events.append({"event": "score", **saved, "bpb": bpb})
    return [*events, {**events[-1], "event": "final", **sizes(model)}]


def score_ours() -> list[dict]:
    """Score this repository's two files. The log of its run has the scores on the way there."""
    sys.path[0] = str(ROOT)
    import train_gpt
    lines = (ROOT / "logs" / f"{RUN['id']}.jsonl").read_text("utf-8").splitlines()
    first, *others = [json.loads(line) for line in lines]
    config = train_gpt.Config(**{name.lower(): value for name, value in first["config"].items()})
    shards = train_gpt.open_split(config, "val")
    tokens = np.hstack([train_gpt.read_shard(path, config.vocab_size) for path in shards])
    model, scores = train_gpt.GPT(config), []
    artifact = Path(RUN["folder"], train_gpt.MODEL_FILE)
    for path in (artifact.with_name("final_model.pt"), artifact):
        train_gpt.load_weights(model, path)
        scores.append(bits_per_byte(model, tokens, config.train_seq_len))
    events = [{"event": "score", "step": event["step"], "time_s": event["train_time_ms"] / 1000,
               "bpb": event["val_bpb"]} for event in others if event["event"] == "val"]
    return [*events[1:], {**events[-1], "event": "final", "bpb": scores[0], **sizes(model),
                          "artifact_bytes": artifact.stat().st_size, "artifact_bpb": scores[1]}]


if __name__ == "__main__":
    scored = score_peer() if RUN["repository"] else score_ours()
    Path(RUN["folder"], "scores.json").write_text(json.dumps(scored), "utf-8")
