"""The published recipe, worked out again: runs of twelve steps against a few lines of PyTorch and NumPy, with their logs and files.

Each step begins from the trainer's own weights, those in its checkpoints, so that rounding does not add up.
"""

import math
import zlib
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import train_gpt
from conftest import REPOSITORY, events, run_here, tiny_arguments, tiny_config, write_shard
from test_model import reference_logits

BASE = dict(
    iterations=12, warmdown_iters=5, muon_momentum_warmup_start=0.2, muon_momentum=0.9, muon_momentum_warmup_steps=8,
    muon_backend_steps=4, beta1=0.8, beta2=0.7, adam_eps=1e-3, qk_gain_init=2.5, tied_embed_init_std=0.05, tied_embed_lr=0.02,
    matrix_lr=0.03, scalar_lr=0.04, num_layers=3, seed=7, val_loss_every=5, train_log_every=12, checkpoint_every=1,
    int8_keep_float_max_numel=100)
CASES = {
    "published": {}, "bfloat16": dict(dtype="bfloat16"),
    "untied": dict(tie_embeddings=False, embed_lr=0.5, head_lr=0.006, weight_decay=0.3, grad_clip_norm=0.8, lr_warmup_steps=3,
                   min_lr=0.2, muon_row_norm=True),
    "adamw": dict(optimizer="adamw", adam_lr=0.01, beta1=0.95, beta2=0.99, weight_decay=0.3, num_heads=4, num_kv_heads=2,
                  export_bits=6, embed_bits=7, export_clip=3.0)}
# Relative ones of an update, by Adam and by Muon, whose noise is larger where gradients begin at zero.
TOLERANCES = {"bfloat16": (0.1, 0.1), "untied": (1e-4, 0.08)}


@pytest.fixture(scope="module", params=CASES)
def run(request, tmp_path_factory):
    """A finished run: its text, log and files, and the weights after each step, from 0 on."""
    folder, random, changes = tmp_path_factory.mktemp("run"), np.random.default_rng(0), BASE | CASES[request.param]
    texts = []
    for name, size in (("train_000000", 8000), ("train_000001", 5000), ("val_000000", 1000)):
        texts.append(3 + np.minimum(random.zipf(1.3, size), 256))
        texts[-1][::100] = 1  # where a document begins
        write_shard(folder / f"x_{name}.bin", texts[-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "KEPT_CHECKPOINTS", 99)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda: 700 << 20)
        words = tiny_arguments(folder, RUN_ID="run", **{name.upper(): value for name, value in changes.items()})
        run_here(patch, folder, *words)
    config, seen = tiny_config(**changes), events(folder, "run")
    saved = [torch.load(path, weights_only=True)["model"] for path in sorted(folder.glob("checkpoints/*"))]
    return SimpleNamespace(
        config=config, folder=folder, text=np.concatenate(texts[:2]), val=torch.tensor(texts[2]),
        weights=[initial_weights(config), *saved], tolerances=TOLERANCES.get(request.param, (1e-4, 0.03)), events=seen,
        steps={event["step"]: event for event in seen if event["event"] == "train"},
        scores={event["step"]: event for event in seen if event["event"] == "val"},
        shown="\n" + (folder / "logs" / "run.txt").read_text(encoding="utf-8").rpartition("=" * 100)[2])


# ---- The recipe, a second time -----------------------------------------------------------------------------


def rounded(x):
    return x.bfloat16().float()


def initial_weights(config):
    """By name, in the order in which they are drawn."""
    torch.manual_seed(config.seed)
    width, hidden = config.model_dim, config.mlp_mult * config.model_dim
    kv = width // config.num_heads * config.num_kv_heads
    shapes = {"attn.c_q": (width, width), "attn.c_k": (kv, width), "attn.c_v": (kv, width), "attn.proj": (width, width),
              "mlp.fc": (hidden, width), "mlp.proj": (width, hidden)}
    weights = {"tok_emb.weight": torch.randn(config.vocab_size, width)}
    for i in range(config.num_layers):
        for name, shape in shapes.items():
            uniform = torch.empty(shape).uniform_(-1, 1) / shape[1] ** 0.5
            weights[f"blocks.{i}.{name}.weight"] = 0 * uniform if "proj" in name else uniform
        weights[f"blocks.{i}.attn.q_gain"] = torch.full((config.num_heads,), config.qk_gain_init)
        weights[f"blocks.{i}.attn_scale"], weights[f"blocks.{i}.mlp_scale"] = torch.ones(2, width)
        weights[f"blocks.{i}.resid_mix"] = torch.stack((torch.ones(width), torch.zeros(width)))
    weights["skip_weights"] = torch.ones(config.num_layers // 2, width)
    if config.tie_embeddings:
        weights["tok_emb.weight"] = config.tied_embed_init_std * torch.randn(config.vocab_size, width)
    else:
        weights["lm_head.weight"] = torch.zeros(config.vocab_size, width)
    return {name: rounded(w) if config.dtype == "bfloat16" else w for name, w in weights.items()}


def orthogonalized(x, steps):
    """X <- aX + (bA + cA^2)X with A = X X^T, of the wide one of X and X^T, with the digits of bfloat16."""
    is_tall = len(x) > len(x.T)
    x = rounded(x.T if is_tall else x)
    x = rounded(x / rounded(x.norm() + 1e-7))
    for _ in range(steps):
        gram = rounded(x @ x.T)
        x = rounded(3.4445 * x + rounded(-4.7750 * gram + 2.0315 * gram @ gram) @ x)
    return x.T if is_tall else x


def rate_of(config, name):
    """The kind of a tensor, its learning rate before any schedule, and its decay."""
    is_vector = not name.endswith(".weight")
    kind = {"tok_emb.weight": "embed", "lm_head.weight": "head"}.get(name, "scalar" if is_vector else "matrix")
    rate = getattr(config, "tied_embed_lr" if kind == "embed" and config.tie_embeddings else f"{kind}_lr")
    return kind, config.adam_lr if config.optimizer == "adamw" else rate, 0.0 if is_vector else config.weight_decay


def factor_of(config, step):
    falling = min(1.0, (config.iterations - step) / config.warmdown_iters)
    return min((step + 1) / max(1, config.lr_warmup_steps), config.min_lr + (1 - config.min_lr) * falling)


def step_of(config, step, weights, grads, kept):
    """The weights after a step. `kept`: momentum or moments, by name."""
    done, after = min(1.0, step / config.muon_momentum_warmup_steps), {}
    momentum = config.muon_momentum_warmup_start + done * (config.muon_momentum - config.muon_momentum_warmup_start)
    for name, w in weights.items():
        (kind, rate, decay), (first, second), grad = rate_of(config, name), kept.get(name, (0.0, 0.0)), grads[name]
        if kind == "matrix" and config.optimizer == "muon":
            first = momentum * first + grad
            update = grad + momentum * first
            update = F.normalize(update, dim=1) if config.muon_row_norm else update
            update = orthogonalized(update, config.muon_backend_steps) * max(1, len(w) / len(w.T)) ** 0.5
        else:
            first = config.beta1 * first + (1 - config.beta1) * grad
            second = config.beta2 * second + (1 - config.beta2) * grad ** 2
            deviation = (second / (1 - config.beta2 ** (step + 1))) ** 0.5
            update = first / (1 - config.beta1 ** (step + 1)) / (deviation + config.adam_eps)
        kept[name] = first, second
        after[name] = w - rate * factor_of(config, step) * (decay * w + update)
    return after


def loss_of(config, weights, tokens, targets):
    logits = reference_logits(config, weights, tokens.view(-1, config.train_seq_len))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_every_step_is_that_of_the_recipe(run):
    """Loss, norm of the gradients before they are clipped, and updates."""
    config, kept, (exact, of_muon) = run.config, {}, run.tolerances
    for step in range(config.iterations):
        weights = {name: w.float().requires_grad_() for name, w in run.weights[step].items()}
        spans = np.resize(run.text, 20_000)[8 * 129 * step:8 * 129 * (step + 1)].reshape(8, 129)
        loss = loss_of(config, weights, torch.tensor(spans[:, :-1]), torch.tensor(spans[:, 1:]))
        grads = dict(zip(weights, torch.autograd.grad(loss, weights.values())))
        norm = math.sqrt(sum(grad.square().sum().item() for grad in grads.values()))
        if step + 1 in run.steps:
            found = run.steps[step + 1]
            assert (found["train_loss"], found["grad_norm"]) == pytest.approx((loss.item(), norm), rel=exact / 4)
        clip = min(1.0, config.grad_clip_norm / norm) if config.grad_clip_norm else 1.0
        errors, sizes = Counter(), Counter()  # squares, by kind
        with torch.no_grad():
            wanted = step_of(config, step, weights, {name: clip * grad for name, grad in grads.items()}, kept)
        for name, found in run.weights[step + 1].items():
            kind, right = rate_of(config, name)[0], wanted[name].to(found.dtype).float()
            if not grads[name].any():  # as drawn, but for decay
                torch.testing.assert_close(found.float(), right, rtol=0, atol=1e-6)
            errors[kind] += (found.float() - right).square().sum().item()
            sizes[kind] += (right - weights[name]).square().sum().item()
        for kind, size in sizes.items():
            assert math.sqrt(errors[kind] / max(size, 1e-12)) < (of_muon if kind == "matrix" else exact), (step, kind)


def score_of(run, weights):
    """Loss and bits per byte of the validation text's whole rows. Tokens below 4 have no bytes, all others one."""
    count = (len(run.val) - 1) // 32 * 32
    loss = loss_of(run.config, {name: w.float() for name, w in weights.items()}, run.val[:count], run.val[1:count + 1]).item()
    return pytest.approx((loss, loss / math.log(2) * count / int((run.val[1:count + 1] >= 4).sum())), rel=run.tolerances[0] / 10)


# ---- The log and the files ---------------------------------------------------------------------------------


def test_the_log_has_the_numbers_of_the_run(run):
    """Worked out from times and steps of its own lines, and from the files; on the console as in the events."""
    config, before = run.config, (0, 0.0)
    rates = {"head": 0.0} | {kind: rate for kind, rate, _ in (rate_of(config, name) for name in run.weights[0])}
    decayed = [w.numel() for name, w in run.weights[0].items() if rate_of(config, name)[2]]
    assert f"\nmodel_params:{sum(w.numel() for w in run.weights[0].values())}\n" in run.shown
    assert (f"\ntie_embeddings:{config.tie_embeddings} embed_lr:{rates['embed']} head_lr:{rates['head']} "
            f"matrix_lr:{rates['matrix']} scalar_lr:{rates['scalar']}\nweight_decay:{config.weight_decay} "
            f"tensors:{len(decayed)} parameters:{sum(decayed)}\ntrain_batch_tokens:1024 train_seq_len:32 "
            "iterations:12 warmup_steps:1 max_wallclock_seconds:0.000\nseed:7\n") in run.shown
    assert list(run.steps) == [*range(1, 11), 12] and list(run.scores) == [0, 5, 10, 12]
    for step, event in run.steps.items():
        ms = event["train_time_ms"]
        wanted = {"lr": rates["matrix"] * factor_of(config, step - 1), "step_avg_ms": ms / step, "mem_mib": 700, "iterations": 12,
                  "tok_per_sec": 1024 * (step - before[0]) / (ms - before[1]) * 1000, "epoch": 8 * 129 * step / 13_000}
        assert {name: event[name] for name in wanted} == pytest.approx(wanted)
        line = ("\nstep:{step}/12 train_loss:{train_loss:.4f} train_time:{train_time_ms:.0f}ms step_avg:{step_avg_ms:.2f}ms "
                "lr:{lr:.2e} grad_norm:{grad_norm:.3f} tok_per_sec:{tok_per_sec:.0f} epoch:{epoch:.3f}\n")
        assert line.format(**event) in run.shown
        before = step, ms
    for step, event in run.scores.items():
        assert (event["val_loss"], event["val_bpb"]) == score_of(run, run.weights[step])
        assert event["step_avg_ms"] == pytest.approx(event["train_time_ms"] / max(1, step))
        assert ("\nstep:{step}/12 val_loss:{val_loss:.4f} val_bpb:{val_bpb:.4f} train_time:{train_time_ms:.0f}ms "
                "step_avg:{step_avg_ms:.2f}ms\n").format(**event) in run.shown
    assert (run.events[0]["val_tokens"], run.events[0]["val_bytes"]) == (992, 983)


def test_the_artifact_holds_the_weights_and_the_log_their_sizes(run):
    config, data, floats = run.config, run.folder / "final_model.int8.ptz", run.folder / "final_model.pt"
    raw, state = zlib.decompress(data.read_bytes()), torch.load(floats, weights_only=True)
    artifact, read, payload = train_gpt.read_saved(data), {}, 0
    for name, w in state.items():
        assert w.dtype == run.weights[-1][name].dtype and torch.equal(w, run.weights[-1][name])
        found, read[name] = artifact["passthrough"].get(name), w
        payload += w.numel() * 4
        if name.endswith(".weight"):
            rows, levels = w.float().numpy(), 127
            scales = np.maximum(np.quantile(abs(rows), 0.9999984, axis=1, keepdims=True), 1) / levels
            if config.export_clip:
                levels = 2 ** ((config.export_bits if "blocks" in name else config.embed_bits) - 1) - 1
                scales = np.float16(config.export_clip * rows.std(1, ddof=1, keepdims=True) / levels).astype(np.float32)
            read[name] = torch.tensor(np.rint(rows / scales).clip(-levels, levels) * np.float16(scales)).float()
            found = artifact["quantized"][name].float() * artifact["scales"][name][:, None]
            payload += 2 * len(rows) - 3 * rows.size
        torch.testing.assert_close(found, read[name], rtol=1e-6, atol=1e-7)
    sizes = [path.stat().st_size for path in (data, floats, REPOSITORY / "train_gpt.py")]
    ratio = sum(w.nbytes for w in state.values()) / payload
    assert f"""
Serialized model: {sizes[1]} bytes
Code size: {sizes[2]} bytes
Total submission size: {sizes[1] + sizes[2]} bytes
Serialized model int8+zlib: {sizes[0]} bytes (payload:{payload} raw_torch:{len(raw)} payload_ratio:{ratio:.2f}x)
Total submission size int8+zlib: {sizes[0] + sizes[2]} bytes
final_int8_zlib_roundtrip val_loss:""" in run.shown
    export, final = run.events[-2:]
    assert (export["artifact_bytes"], export["total_bytes"], export["payload_ratio"]) == (sizes[0], sizes[0] + sizes[2], ratio)
    assert (final["val_loss"], final["val_bpb"]) == score_of(run, read)


def test_as_published_rows_are_clipped_at_their_percentile_and_have_a_least_scale():
    """Of 31,251 values, the percentile lies 0.95 of the way from the second largest to the largest. Halves go to even ones."""
    limit, rows = 300 + 0.95 * (500 - 300), torch.zeros(4, 31_251)
    rows[0, :3] = torch.tensor([500.0, -300.0, 70.0])
    rows[1, :5] = torch.tensor([1.0, 0.5, 1.5, 2.5, -0.5]) / 127
    rows[2, :6] = torch.tensor([127.0, -127.0, 0.5, 1.5, 2.5, -3.5])
    rows[3, :3] = torch.tensor([3.0, -3.0, 3 * 50.4995 / 127])  # A scale that was rounded to float16 would give 51.
    wanted = [[127, round(-300 / limit * 127), round(70 / limit * 127)], [1, 0, 2, 2, 0], [127, -127, 0, 2, 2, -4], [127, -127, 50]]
    values, scales = train_gpt.quantize_tensor(rows)
    torch.testing.assert_close(scales, (torch.tensor([limit, 1, 127, 3]) / 127).half(), rtol=1e-3, atol=0)
    assert [found[:len(right)].tolist() for found, right in zip(values, wanted)] == wanted
    values, scale = train_gpt.quantize_tensor(rows[0] / 1000)  # A vector has no least scale.
    assert values[:3].tolist() == wanted[0] and scale.item() == pytest.approx(limit / 127_000, rel=1e-3)
