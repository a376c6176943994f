"""The model: what it must not see, the shapes and values that checkpoints agree on, its arithmetic."""

import math
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
import train_gpt
from conftest import tiny_config

CPU = torch.device("cpu")
REFERENCE = dict(mlp_slope=0.5, shift_keys=True, smear=True, exclusive_attn=True, lanes=2)
# Also those that are new: they are tested for causality, export, resume, compilation and sampling without a line here.
SWITCHES = REFERENCE | {f.name: True for f in train_gpt.fields(train_gpt.Config)
                        if f.type is bool and f.name.upper() in train_gpt.OF_MODEL and not f.default}


@pytest.mark.parametrize("switch", [""] + [name for name, value in SWITCHES.items() if value is True])
def test_logits_do_not_depend_on_where_a_slice_begins(switch):
    """They may be asked for some positions alone, as sample.py does for the last."""
    model = trained_like(tiny_config(**({switch: True} if switch else {})))
    x = model.hidden(torch.randint(0, 260, (2, 7)))
    for part in (slice(6, 7), slice(1, 5)):
        torch.testing.assert_close(model.logits(x[:, part]), model.logits(x)[:, part], rtol=1e-5, atol=1e-5)


def test_dropout_drops_channels_of_whole_rows():
    """All tokens of a row lose the same channels, and the others grow. A rate of 0, as in scoring, changes no bit."""
    x, rate = torch.randn(6, 20, 500), torch.tensor(0.25)
    assert torch.equal(train_gpt.dropout(x, torch.tensor(0.0)), x) and train_gpt.dropout(x, None) is x
    assert train_gpt.dropout(x, torch.tensor(1.0)).eq(0).all()
    factors = train_gpt.dropout(x, rate) / x
    assert torch.equal(factors[:, :1].expand_as(x).round(), factors.round()) and not torch.equal(factors[0], factors[1])
    dropped = factors == 0
    assert torch.allclose(factors[~dropped], torch.tensor(4 / 3)) and 0.2 < dropped.float().mean() < 0.3


@pytest.mark.parametrize("lanes", [0, 1])
def test_dropout_is_for_training_alone_and_follows_from_seed_step_and_rank(lanes):
    def losses(step=3, rank=0, **changes):
        trainer = train_gpt.Trainer(tiny_config(**{"dropout": 0.5, "lanes": lanes, **changes}), train_gpt.Ranks(rank, 1, CPU))
        for p in trainer.model.parameters():
            torch.nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(3))
        before = trainer.model(tokens, tokens).item()
        trainer.clock.step = step
        torch.manual_seed(time.time_ns())  # whatever drew numbers before
        loss = trainer.train_step([(tokens, tokens)])[0].item()
        assert trainer.model.drop_rate == 0
        return before, loss

    tokens = torch.randint(0, 260, (16, 32), generator=torch.Generator().manual_seed(0))
    first = losses()
    assert losses() == first and abs(first[0] - first[1]) > 1e-3
    assert len({first, *(losses(**other) for other in (dict(step=4), dict(rank=1), dict(seed=2)))}) == 4
    assert first[0] == losses(dropout=0.1)[0]


def trained_like(config):
    """A model whose zero-initialised tensors are not zero, so that every path matters."""
    torch.manual_seed(0)
    model = train_gpt.GPT(config)
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p.float()).to(p.dtype)
    return model


@pytest.mark.parametrize("changes", [
    dict(num_layers=1), dict(num_layers=5, tie_embeddings=False), dict(attn="tiled"),
    *({name: value} for name, value in SWITCHES.items()), SWITCHES], ids=lambda changes: "-".join(changes))
def test_no_position_sees_a_later_token(changes):
    model = trained_like(tiny_config(**changes))
    tokens = torch.randint(0, 260, (2, 32))
    other = tokens.clone()
    other[:, 20:] = torch.randint(0, 260, (2, 12))
    a, b = model.logits(model.hidden(tokens)), model.logits(model.hidden(other))
    assert torch.equal(a[:, :20], b[:, :20]) and not torch.equal(a[:, 20:], b[:, 20:])


@pytest.mark.parametrize("tied", [True, False])
def test_a_new_model_guesses_and_a_padded_vocabulary_has_more_rows_and_the_same_tokens(tied):
    for pad, rows in ((1, 260), (26, 260), (64, 320)):
        model = train_gpt.GPT(tiny_config(vocab_pad=pad, tie_embeddings=tied))
        assert len(model.tok_emb.weight) == rows and (tied or len(model.lm_head.weight) == rows)
        tokens = torch.randint(0, 260, (4, 33))
        assert model.logits(model.hidden(tokens[:, 1:])).shape == (4, 32, rows)
        assert model(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(math.log(rows), abs=0.05)


@pytest.mark.parametrize("tied", [True, False])
def test_initial_values_of_gpt2(tied):
    gpt2 = train_gpt.GPT(tiny_config(init="gpt2", num_layers=8, model_dim=64, tie_embeddings=tied))
    for name, p in gpt2.named_parameters():
        if name.endswith(".weight"):
            assert p.std().item() == pytest.approx(0.02 / (4 if ".proj." in name else 1), rel=0.1), name
            assert abs(p.mean().item()) < 0.002, name


def test_weights_drawn_by_name_are_those_of_other_shapes_too():
    """So that pairs of runs with a seed differ by a change, not by its draws. Their sizes are those of the baseline."""
    models = [train_gpt.GPT(tiny_config(mlp_mult=mult, num_layers=mult, init="by_name", seed=mult // 2)) for mult in (2, 3, 4)]
    two, three, four = (dict(model.named_parameters()) for model in models)
    for name, old in train_gpt.GPT(tiny_config(mlp_mult=2, num_layers=2)).named_parameters():
        assert two[name].std().item() == pytest.approx(old.std().item(), rel=0.2, abs=1e-6), name
        if name.endswith(".weight") and ".proj." not in name:
            assert two[name].equal(three[name][:len(old)]) and not two[name].equal(four[name][:len(old)]), name
    assert not two["blocks.0.attn.c_q.weight"].equal(two["blocks.1.attn.c_q.weight"])


def reference_logits(config, state, tokens):
    """The model written out again, with loops over heads and a plain softmax, from its tensors by name."""
    norm = lambda x: x / (x.square().mean(-1, keepdim=True) + 1.19e-7).sqrt()  # noqa: E731
    length, width = tokens.size(1), config.model_dim // config.num_heads
    angle = torch.outer(torch.arange(length), config.rope_base ** (-2 * torch.arange(width // 2) / width))

    def rotate(x):
        a, b = x[..., :width // 2], x[..., width // 2:]
        return torch.cat((a * angle.cos() + b * angle.sin(), b * angle.cos() - a * angle.sin()), -1)

    x0 = norm(F.embedding(tokens, state["tok_emb.weight"]))
    if config.smear:
        x0 = torch.cat((x0[:, :1], x0[:, 1:] + state["smear"] * x0[:, :-1]), 1)
    x, lane, stack = x0, None, []
    half, first_lane = config.num_layers // 2, config.num_layers - config.lanes
    for i in range(config.num_layers):
        w = {name.removeprefix(f"blocks.{i}."): t for name, t in state.items() if name.startswith(f"blocks.{i}.")}
        lane = x if i == first_lane else lane
        if i >= half and stack:
            x = x + state["skip_weights"][i - half] * stack.pop()
        before = x
        x = w["resid_mix"][0] * x + w["resid_mix"][1] * x0
        h, heads = norm(x), []
        for head in range(config.num_heads):
            group = head * config.num_kv_heads // config.num_heads
            part = slice(head * width, (head + 1) * width), slice(group * width, (group + 1) * width)
            q = w["attn.q_gain"][head] * rotate(norm(h @ w["attn.c_q.weight"][part[0]].T))
            k, v = h @ w["attn.c_k.weight"][part[1]].T, h @ w["attn.c_v.weight"][part[1]].T
            if config.shift_keys:
                slow = [d for d in range(width) if 2 * (d % (width // 2)) >= width // 2]
                k[:, 1:, slow], k[:, 0, slow] = k[:, :-1, slow].clone(), 0
            k = rotate(norm(k))
            scores = (q @ k.mT / width**0.5).masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
            y = scores.softmax(-1) @ v
            if config.exclusive_attn:
                y = y - (y * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True) * v
            heads.append(y)
        attended = w["attn_scale"] * (torch.cat(heads, -1) @ w["attn.proj.weight"].T)
        x = x + attended
        hidden = norm(x if lane is None else lane) @ w["mlp.fc.weight"].T
        hidden = torch.where(hidden > 0, hidden, config.mlp_slope * hidden) ** 2
        fed = w["mlp_scale"] * (hidden @ w["mlp.proj.weight"].T)
        x = x + fed
        if lane is not None:
            x, lane = torch.einsum("ij,jbtd->ibtd", w["resid_mix_lanes"][:, 1:], torch.stack((attended, fed))) + torch.stack(
                (w["resid_mix_lanes"][0, 0] * before, w["resid_mix_lanes"][1, 0] * lane))
        if i < half:
            stack.append(x)
    logits = norm(x if lane is None else lane) @ state.get("lm_head.weight", state["tok_emb.weight"]).T
    return config.logit_softcap * torch.tanh(logits / config.logit_softcap)


@pytest.mark.parametrize("changes", [
    dict(num_layers=5), dict(num_layers=4, num_heads=4, num_kv_heads=2, tie_embeddings=False),
    dict(num_layers=1, num_kv_heads=2, mlp_mult=3, rope_base=100.0, logit_softcap=5.0),
    dict(num_layers=3, num_heads=4, num_kv_heads=2, attn="tiled"),
    dict(num_layers=3, num_heads=4, num_kv_heads=2, **REFERENCE), dict(shift_keys=True),
    dict(num_layers=11, lanes=3), dict(num_layers=3, lanes=3)])
def test_logits_equal_an_independent_reference(changes):
    model = trained_like(tiny_config(**changes))
    tokens = torch.randint(0, 260, (2, 32))
    torch.testing.assert_close(model.logits(model.hidden(tokens)), reference_logits(model.config, model.state_dict(), tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("asked, wanted", [("math", "math"), ("flash", "flash"), ("auto", "flash")])
def test_the_kernel_that_is_left_on_is_the_one_that_is_reported(asked, wanted):
    assert train_gpt.choose_attention(tiny_config(attn=asked), CPU) == wanted
    flags = torch.backends.cuda
    on = {"flash": flags.flash_sdp_enabled(), "cudnn": flags.cudnn_sdp_enabled(),
          "efficient": flags.mem_efficient_sdp_enabled(), "math": flags.math_sdp_enabled()}
    assert [name for name, is_on in on.items() if is_on] == [wanted]


@pytest.mark.parametrize("version, wanted", [(91500, "flash"), (91900, "cudnn")])
def test_an_h100_takes_cudnn_unless_it_is_too_old(monkeypatch, version, wanted):
    """Older ones read beyond rows that are no multiple of 128 (pytorch#169849)."""
    randn = torch.randn
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(torch, "randn", lambda *shape, device, **like: randn(*shape, **like))
    monkeypatch.setattr(train_gpt, "causal_attention", lambda q, k, v, _: q + k + v)
    assert train_gpt.choose_attention(tiny_config(attn="auto"), SimpleNamespace(type="cuda")) == wanted


@pytest.mark.parametrize("spoil", [lambda v: v.detach() + 0 * v, lambda v: v + (v - v.detach()).square().sqrt()], ids=["lost", "NaN"])
def test_a_kernel_with_other_gradients_is_not_taken(monkeypatch, spoil):
    """Its output is right. Memory that runs out is no reason to take another kernel."""
    plain = train_gpt.causal_attention
    monkeypatch.setattr(train_gpt, "causal_attention", lambda q, k, v, kernel: plain(
        q, k, spoil(v) if kernel == "flash" else v, kernel))
    assert train_gpt.choose_attention(tiny_config(attn="auto"), CPU) == "math"
    with pytest.raises(ValueError, match="ATTN=flash does not run float32 heads of 16, or not as math does; try auto"):
        train_gpt.choose_attention(tiny_config(attn="flash"), CPU)
    monkeypatch.setattr(train_gpt, "causal_attention", Mock(side_effect=torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        train_gpt.choose_attention(tiny_config(attn="auto"), CPU)


def attention_and_gradients(kernel, q, k, v, dy):
    """The output of a kernel for q, k and v, and its gradients with respect to them."""
    train_gpt.choose_attention(tiny_config(attn=kernel), CPU)
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    y = train_gpt.causal_attention(*inputs, kernel)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


@pytest.mark.parametrize("kernel", ["flash", "tiled"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 3, 4, 61, 128, 130])  # four tiles, even, uneven or fewer
def test_kernels_compute_what_the_math_kernel_does(kernel, kv_heads, length):
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, length, 16).bfloat16().float() for heads in (4, kv_heads, kv_heads, 4)]
    wanted = attention_and_gradients("math", *inputs)
    torch.testing.assert_close(attention_and_gradients(kernel, *inputs), wanted, rtol=1e-5, atol=1e-5)
    rounding = 0.001 * inputs[3].norm() if length == 1 else 0.0  # one token's queries and keys have no gradient
    for found, right in zip(attention_and_gradients(kernel, *[t.bfloat16() for t in inputs]), wanted, strict=True):
        assert found.dtype == torch.bfloat16 and (found.float() - right).norm() <= 0.02 * right.norm() + rounding


@pytest.mark.parametrize("changes, wanted", [
    (dict(train_seq_len=128), "tiled"), (dict(train_seq_len=1024), "tiled"), (dict(train_seq_len=2048), "flash"),
    (dict(compile="0"), "flash"), (dict(dtype="float32"), "tiled"), (dict(compile="0", attn="tiled"), "tiled")])
def test_tiled_attention_is_for_compiled_models_with_short_rows(changes, wanted):
    config = tiny_config(**{"attn": "auto", "compile": "1", "dtype": "bfloat16", "micro_batch_tokens": 0, **changes})
    assert train_gpt.choose_attention(config, CPU) == wanted


@pytest.mark.parametrize("cap", [10, 64, 65, 1000])  # up to 64, the loss adds exponentials as they are
@pytest.mark.parametrize("uncounted", [0, 1, 63])  # of 64 targets
def test_the_loss_is_pytorchs_cross_entropy(cap, uncounted):
    """Also for logits as large as the cap."""
    model = trained_like(tiny_config(vocab_pad=64, logit_softcap=cap))
    torch.nn.init.normal_(model.tok_emb.weight, std=cap, generator=torch.Generator().manual_seed(0))
    tokens, targets = torch.randint(0, 260, (2, 2, 32), generator=torch.Generator().manual_seed(2))
    targets.view(-1)[torch.randperm(64)[:uncounted]] = -1
    logits = model.logits(model.hidden(tokens))
    assert logits.max() > 0.99 * cap
    wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    loss = model(tokens, targets)
    assert loss.shape == () and loss.dtype == torch.float32
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
    if cap < 1000:  # gradients of so large logits have fewer digits
        for found, right in zip(*(torch.autograd.grad(value, list(model.parameters())) for value in (loss, wanted))):
            torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)


def test_types_of_a_bfloat16_run():
    """The published table is bfloat16, all else float32 with values that bfloat16 can hold; so are the rotary frequencies."""
    model = train_gpt.GPT(tiny_config(dtype="bfloat16"))
    for name, p in model.named_parameters():
        assert p.dtype == (torch.bfloat16 if name == "tok_emb.weight" else torch.float32)
        assert torch.equal(p.float(), p.bfloat16().float()), name
    assert model.logits(model.hidden(torch.zeros(1, 4, dtype=torch.long))).dtype == torch.float32
    for changes in (dict(optimizer="adamw"), dict(weight_decay=0.1)):
        model = train_gpt.GPT(tiny_config(dtype="bfloat16", **changes))
        assert model.tok_emb.weight.dtype == torch.float32  # small updates and decay would vanish in bfloat16
    found, exact = (m.rotary[:, 1, 0] for m in (model, train_gpt.GPT(tiny_config())))  # cos, sin at position 1
    assert found.dtype == torch.float32 and not torch.allclose(found, exact, rtol=0, atol=1e-5)
    rounded = torch.atan2(exact[1], exact[0]).bfloat16().float()
    torch.testing.assert_close(found, torch.stack((rounded.cos(), rounded.sin())), rtol=0, atol=1e-6)
