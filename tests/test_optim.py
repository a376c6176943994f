"""Optimizers and schedules against independent references."""

import copy
import math
import os
import platform
import shutil
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import train_gpt
from conftest import micro_batches, one_process, tiny_config
from tiny import make_run


SILENT = types.SimpleNamespace(batches=lambda step: [], pieces=1, stride=1, tokens=1)  # no steps


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_in_the_right_group_and_only_there(tied):
    run = make_run(tie_embeddings=tied, num_layers=4)
    names = {p: name for name, p in run.model.named_parameters()}
    seen = [p for o in run.optimizers for group in o.param_groups for p in group["params"]]
    assert len(seen) == len(set(seen)) == len(names)
    config = run.config
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            for name in (names[p] for p in group["params"]):
                if isinstance(optimizer, train_gpt.Muon):
                    assert name.startswith("blocks.") and name.endswith("weight") and group["lr"] == config.matrix_lr
                elif name == "tok_emb.weight":
                    assert group["lr"] == (config.tied_embed_lr if tied else config.embed_lr)
                else:
                    assert group["lr"] == (config.head_lr if name == "lm_head.weight" else config.scalar_lr)
    matrices = {names[p] for p in run.optimizers[1].param_groups[0]["params"]}
    assert len(matrices) == 24 and not any("resid_mix" in name for name in matrices)


@pytest.mark.parametrize("place, shape", [("blocks.0.attn", (2, 4, 4)), ("", (4, 4)), ("", (2, 4, 4))])
def test_a_parameter_of_no_kind_is_an_error(place, shape):
    """It would be trained by Adam as if it were a vector, without a word."""
    run = make_run()
    run.model.get_submodule(place).register_parameter("mixer", torch.nn.Parameter(torch.zeros(shape)))
    with pytest.raises(ValueError, match="mixer has no kind in build_optimizers; .*CONTROL_TENSOR_NAME_PATTERNS"):
        train_gpt.build_optimizers(run.model, run.config, run.ranks)
    config = train_gpt.replace(run.config, control_tensor_name_patterns="mixer," + train_gpt.CONTROL)
    adam, _ = train_gpt.build_optimizers(run.model, config, run.ranks)
    assert any(p is run.model.get_submodule(place).mixer for group in adam.param_groups if group["kind"] == "scalar"
               for p in group["params"])


@pytest.mark.parametrize("shape", [(3, 16, 48), (2, 48, 16), (1, 32, 32)])
def test_orthogonalisation_moves_singular_values_to_one(shape):
    torch.manual_seed(0)
    result = train_gpt.orthogonalize(torch.randn(shape), 5)
    values = torch.linalg.svdvals(result.float())
    assert result.dtype == torch.bfloat16 and result.shape == shape
    assert 0.6 < values.min() and values.max() < 1.3


def test_products_by_way_of_float32_round_like_bfloat16():
    """On CPUs without bfloat16 units; the sums of the two are ordered differently, so nearly equal."""
    torch.manual_seed(0)
    matrices = torch.randn(2, 32, 64)
    fast = train_gpt.orthogonalize(matrices, 5, torch.float32)
    torch.testing.assert_close(fast, train_gpt.orthogonalize(matrices, 5), rtol=0.05, atol=0.01)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon to compare with")
@pytest.mark.parametrize("shape", [(16, 48), (48, 16)])
def test_muon_steps_like_pytorchs(shape):
    """PyTorch averages the momentum, ours adds it up; orthogonalisation takes no notice of scale."""
    torch.manual_seed(0)
    start, grads = torch.randn(shape), [torch.randn(shape) for _ in range(4)]
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    muon = train_gpt.Muon([{"params": [ours], "lr": 0.02, "weight_decay": 0.0}], tiny_config(), one_process())
    muon.param_groups[0]["momentum"] = 0.9
    reference = torch.optim.Muon([theirs], lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.0,
                                 adjust_lr_fn="original")
    for grad in grads:
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        muon.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3)
    assert (ours - start).abs().max() > 0.02


def test_adam_is_pytorchs_with_our_settings():
    run = make_run()
    twin = train_gpt.GPT(run.config)
    twin.load_state_dict(run.model.state_dict())
    vectors = [p for n, p in twin.named_parameters() if p.ndim == 1 or "resid_mix" in n or n == "skip_weights"]
    reference = torch.optim.Adam([{"params": [twin.tok_emb.weight], "lr": 0.03}, {"params": vectors, "lr": 0.02}],
                                 betas=(0.9, 0.95), eps=1e-8)
    for step in range(3):
        tokens = torch.randint(0, 260, (2, 33), generator=torch.Generator().manual_seed(step))
        for model in (run.model, twin):
            model.zero_grad()
            model(tokens[:, :-1], tokens[:, 1:]).backward()
        run.optimizers[0].step()
        reference.step()
    for name in ("tok_emb.weight", "skip_weights", "blocks.0.resid_mix", "blocks.1.attn.q_gain"):
        torch.testing.assert_close(run.model.get_parameter(name), twin.get_parameter(name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_adamw_trains_everything_and_decays_matrices_and_embeddings_alone(fused):
    run = make_run(optimizer="adamw", adam_lr=3e-3, weight_decay=0.1, fused=fused, tie_embeddings=False, warmdown_iters=0)
    twin = train_gpt.GPT(run.config)
    twin.load_state_dict(run.model.state_dict())
    vectors = [p for n, p in twin.named_parameters() if p.ndim == 1 or "resid_mix" in n or n == "skip_weights"]
    matrices = [p for n, p in twin.named_parameters() if n.endswith(".weight")]
    reference = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
                                  lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    tokens = torch.randint(0, 260, (2, 33), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        train_gpt.train_step(run, micro_batches(run.config, tokens[:, :-1], tokens[:, 1:]))
        twin.zero_grad()
        twin(tokens[:, :-1], tokens[:, 1:]).backward()
        for group in reference.param_groups:
            group["lr"] = 3e-3
        reference.step()
    for name, p in run.model.named_parameters():
        torch.testing.assert_close(p, twin.get_parameter(name), rtol=1e-4, atol=1e-6, msg=name)
    assert len(run.optimizers) == 1 and not torch.equal(run.model.lm_head.weight, train_gpt.GPT(run.config).lm_head.weight)


def test_the_table_is_bfloat16_in_the_baseline_alone():
    """Small updates and weight decay would round to nothing in it."""
    for changes, dtype in (({}, torch.bfloat16), ({"optimizer": "adamw"}, torch.float32),
                           ({"weight_decay": 0.1}, torch.float32)):
        run = make_run(dtype="bfloat16", **changes)
        assert run.model.tok_emb.weight.dtype == dtype
        tokens = torch.randint(0, 260, (2, 33))
        assert run.model(tokens[:, :-1], tokens[:, 1:]).isfinite()


def test_muon_decays_by_the_rate():
    torch.manual_seed(0)
    start, grad = torch.randn(16, 48), torch.randn(16, 48)
    ends = []
    for decay in (0.0, 0.1):
        p = torch.nn.Parameter(start.clone())
        muon = train_gpt.Muon([{"params": [p], "lr": 0.02, "weight_decay": decay}], tiny_config(), one_process())
        p.grad = grad.clone()
        muon.step()
        ends.append(p.detach())
    torch.testing.assert_close(ends[1], ends[0] - 0.02 * 0.1 * start)


def test_muons_state_can_be_saved_and_loaded():
    """Two steps, then two more; and the same with the optimizer's state moved to another one in between."""
    def matrices():
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in [(8, 24)] * 3 + [(24, 8)] * 2]
        groups = [{"params": params, "lr": 0.02, "weight_decay": 0.0}]
        return params, train_gpt.Muon(groups, tiny_config(), one_process())

    def step(params, muon, number):
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * number + i))
        muon.step()

    params, muon = matrices()
    for number in range(2):
        step(params, muon, number)
    others, other = matrices()
    for p, trained in zip(others, params):
        p.data.copy_(trained.data)
    other.load_state_dict(copy.deepcopy(muon.state_dict()))
    for number in range(2, 4):
        step(params, muon, number)
        step(others, other, number)
    assert all(torch.equal(a, b) for a, b in zip(params, others))


def test_cosine_schedule_with_a_warm_up_and_a_floor():
    config = tiny_config(iterations=110, lr_schedule="cosine", lr_warmup_steps=10, min_lr=0.1, max_wallclock_seconds=0.0)
    factors = [train_gpt.schedule(config, step, 1e9)[0] for step in range(111)]
    assert factors[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert [factors[i] for i in (10, 60, 110)] == pytest.approx([1.0, 0.55, 0.1])
    assert factors[35] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    capped = train_gpt.replace(config, max_wallclock_seconds=100.0)  # what ends the run first ends the cosine
    assert train_gpt.schedule(capped, 20, 50e3)[0] == pytest.approx(0.55)
    assert train_gpt.schedule(capped, 60, 20e3)[0] == pytest.approx(0.55)
    assert train_gpt.schedule(capped, 20, 200e3)[0] == pytest.approx(0.1)


def test_warming_up_ends_without_a_jump():
    config = tiny_config(iterations=1000, warmdown_iters=3000, lr_warmup_steps=100, max_wallclock_seconds=0.0)
    factors = [train_gpt.schedule(config, step, 0)[0] for step in range(300)]
    assert factors[0] == 0.01 and factors[50] < factors[20] * 3 and max(factors) < 1 / 3
    assert max(abs(a - b) for a, b in zip(factors, factors[1:])) < 0.011


def test_the_warmdown_has_a_floor_too():
    config = tiny_config(iterations=100, warmdown_iters=20, max_wallclock_seconds=0.0, min_lr=0.2)
    assert [train_gpt.schedule(config, step, 0)[0] for step in (80, 90, 100)] == pytest.approx([1.0, 0.6, 0.2])


def test_schedule_without_a_cap():
    config = tiny_config(iterations=100, warmdown_iters=20, max_wallclock_seconds=0.0)
    factors = [train_gpt.schedule(config, step, 1e9)[0] for step in range(101)]
    assert factors[:81] == [1.0] * 81 and factors[90] == 0.5 and factors[100] == 0.0
    assert train_gpt.schedule(train_gpt.replace(config, warmdown_iters=0), 99, 0)[0] == 1.0
    assert train_gpt.schedule(train_gpt.replace(config, warmdown_iters=-1), 99, 0)[0] == 1.0


def test_momentum_warm_up():
    tokens = torch.randint(0, 260, (2, 33))
    for steps, wanted in ((100, [0.92, 0.955, 0.99, 0.99]), (0, [0.99] * 4)):
        run = make_run(muon_momentum=0.99, muon_momentum_warmup_start=0.92, muon_momentum_warmup_steps=steps)
        values = []
        for run.step in (0, 50, 100, 1000):
            train_gpt.train_step(run, micro_batches(run.config, tokens[:, :-1], tokens[:, 1:]))
            values.append(run.optimizers[1].param_groups[0]["momentum"])
        assert values == pytest.approx(wanted)


def test_wall_clock_schedule_against_the_formula_with_a_fake_clock(monkeypatch):
    """Steps of changing length, validations that must not count, and the stop at the cap."""
    clock, factors, lines = [0.0], [], []
    durations = [0.5 + 0.3 * (i % 5) for i in range(200)]

    def train_step(run, batches):
        factor = train_gpt.schedule(run.config, run.step, run.time_ms)[0]
        factors.append((run.step, 1000 * (clock[0] - off[0]), factor))
        clock[0] += durations[run.step]
        return torch.tensor(1.0), torch.tensor(1.0)

    def evaluate(run):
        clock[0] += 100.0
        off[0] += 100.0
        return {"val_loss": 1.0, "val_bpb": 1.0}

    off = [0.0]
    monkeypatch.setattr(train_gpt, "train_step", train_step)
    monkeypatch.setattr(train_gpt, "evaluate", evaluate)
    for name, stub in (("write_whole", lambda *a: None), ("pack", lambda *a: (b"", {}))):
        monkeypatch.setattr(train_gpt, name, stub)
    monkeypatch.setattr(train_gpt.time, "perf_counter", lambda: clock[0])
    log = types.SimpleNamespace(line=lines.append, event=lambda *a, **k: None)
    run = make_run(max_wallclock_seconds=60.0, warmdown_iters=30, iterations=200, val_loss_every=10, warmup_steps=0)
    run.log = log
    run.loader = SILENT
    train_gpt.train(run)
    total = 0.0
    steps = run.step
    for step, elapsed_ms, factor in factors:
        assert elapsed_ms == pytest.approx(total)
        warmdown_ms, left_ms = 30 * (elapsed_ms / max(step, 1)), 60_000 - elapsed_ms
        wanted = left_ms / warmdown_ms if left_ms <= warmdown_ms else 1.0
        assert factor == pytest.approx(wanted, abs=1e-9)
        total += 1000 * durations[step]
    assert factors[0][2] == 1.0 and 0 < factors[-1][2] < 0.1
    assert total >= 60_000 > total - 1000 * durations[len(factors) - 1] and steps == len(factors)
    assert any(line.startswith(f"stopping_early: wallclock_cap train_time:{total:.0f}ms step:{steps}/200")
               for line in lines)


def step_of(run, tokens):
    """The loss, the norm and the gradients of one step on tokens (rows, T + 1), from weights of which none is zero: the
    projections' zeros would hide all gradients behind them."""
    random, grads = torch.Generator().manual_seed(3), {}
    for p in run.model.parameters():
        torch.nn.init.normal_(p, std=0.1, generator=random)
        p.register_post_accumulate_grad_hook(lambda p: grads.update({p: p.grad}))
    loss, norm = train_gpt.train_step(run, micro_batches(run.config, tokens[:, :-1], tokens[:, 1:]))
    assert all(grads[p].abs().max() > 1e-6 for p in run.model.parameters())
    return [loss, norm, *(grads[p] for p in run.model.parameters())]


def test_micro_batches_compute_what_one_batch_does():
    tokens = torch.randint(0, 260, (32, 33), generator=torch.Generator().manual_seed(0))
    whole = step_of(make_run(micro_batch_tokens=1024), tokens)
    for size in (32, 128, 512):
        torch.testing.assert_close(step_of(make_run(micro_batch_tokens=size), tokens), whole, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or not shutil.which(os.environ.get("CXX", "g++")),
                    reason="there is no C++ compiler")
@pytest.mark.parametrize("kernel", ["math", "tiled"])
def test_a_compiled_model_computes_the_same(monkeypatch, kernel):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    tokens, lines = torch.randint(0, 260, (32, 33), generator=torch.Generator().manual_seed(0)), []
    eager, run = make_run(), make_run(attn=kernel)
    run.log = types.SimpleNamespace(line=lines.append)
    pairs = micro_batches(run.config, tokens[:, :-1], tokens[:, 1:])
    run.loader = types.SimpleNamespace(batches=lambda step: pairs)
    train_gpt.compile_model(run, required=True)
    assert lines == [] and all(p.grad is None for p in run.model.parameters())
    assert run.model._compiled_call_impl
    assert run.model.state_dict().keys() == eager.model.state_dict().keys()
    torch.testing.assert_close(step_of(run, tokens), step_of(eager, tokens), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("micro", [32, 160, 4096])
def test_validation_in_forwards_of_one_shape_is_the_mean_over_all_tokens(monkeypatch, world_size, micro):
    run = make_run(grad_accum_steps=1, micro_batch_tokens=micro, val_batch_size=8192)
    for p in run.model.parameters():  # as drawn, all tokens are as likely
        torch.nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(1))
    tokens = torch.randint(0, 260, (47 * 32 + 1,), generator=torch.Generator().manual_seed(2))
    run.val_tokens, run.val_bytes = tokens.numpy().astype("uint16"), 1000
    with torch.no_grad():
        wanted = run.model(tokens[:-1].view(-1, 32), tokens[1:].view(-1, 32)).item()
    shapes, totals, forward = set(), [], run.model.forward
    monkeypatch.setattr(run.model, "forward", lambda x, y: (shapes.add(x.shape), forward(x, y))[1])
    monkeypatch.setattr(train_gpt.Ranks, "sum", lambda self, tensor: totals.append(tensor.clone()) or tensor)
    for rank in range(world_size):
        run.ranks = train_gpt.Ranks(rank, world_size, torch.device("cpu"))
        train_gpt.evaluate(run)
    assert sum(totals).item() / (47 * 32) == pytest.approx(wanted, rel=1e-5) and len(shapes) == 1


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_freed_memory_is_kept_on_a_cpu():
    resource = pytest.importorskip("resource")
    train_gpt.start_ranks(tiny_config(device="cpu"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(1 << 24)  # 64 MB, 16,384 pages
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 10 * 16_384  # the heap grows a few times, then holds them


@pytest.mark.parametrize("world_size", [1, 2])
def test_checkpoints_are_on_the_training_clock_of_all_ranks_but_validations_and_packing_are_not(monkeypatch, world_size):
    """Two ranks as threads, each with a clock of its own origin. A step takes 50 ms, a checkpoint of rank 0 900, a
    validation 100, and packing the model on rank 0 700; steps, validations and collectives wait for both ranks."""
    walls, offsets, values = [0.0] * world_size, [5e6, -3e6], [[]] * world_size
    barrier = threading.Barrier(world_size, timeout=60)

    def meet(rank, posted=()):
        values[rank] = list(posted)
        barrier.wait()
        latest, largest = max(walls), [max(column) for column in zip(*values)]
        barrier.wait()
        walls[rank] = latest
        return largest

    def spend(run, ms, together=False):
        if together:
            meet(run.ranks.rank)
        walls[run.ranks.rank] += ms

    def train_step(run, batches):
        spend(run, 50.0, together=True)
        return torch.tensor(1.0), torch.tensor(1.0)

    def evaluate(run):
        spend(run, 100.0, together=True)
        return {"val_loss": 1.0, "val_bpb": 1.0}

    def pack(state, config, grams):
        spend(runs[0], 700.0)
        return b"", {}

    stubs = {"train_step": train_step, "evaluate": evaluate, "pack": pack, "save_checkpoint": lambda run: spend(run, 900.0), "write_whole": lambda *a: None}
    for name, value in stubs.items():
        monkeypatch.setattr(train_gpt, name, value)
    runs = []
    for rank in range(world_size):
        run = make_run(iterations=3, val_loss_every=1, checkpoint_every=1, size_cap=1, warmup_steps=0)
        run.loader = SILENT
        run.ranks = types.SimpleNamespace(
            device=torch.device("cpu"), rank=rank, world_size=world_size,
            now_ms=lambda rank=rank: offsets[rank] + walls[rank], max=lambda *posted, rank=rank: meet(rank, posted),
            sum=lambda tensor: tensor)
        runs.append(run)
    with ThreadPoolExecutor(world_size) as pool:
        list(pool.map(train_gpt.train, runs))
    for run in runs:  # the checkpoint of the last step comes after its end
        assert run.step == 3 and run.time_ms == 3 * 50.0 + 2 * 900.0


def test_ranks_agree_on_the_clock_now_and_then_and_often_near_the_cap(monkeypatch):
    """As on a GPU, where agreeing waits for the device: 100 ms a step, then 130 from step 300 on."""
    clock, agreed, factors = [0.0], [], []

    def train_step(run, batches):
        factors.append((run.time_ms, train_gpt.schedule(run.config, run.step, run.time_ms)[0]))
        clock[0] += 100.0 if run.step < 300 else 130.0
        return torch.tensor(1.0), torch.tensor(1.0)

    def agree(*values):
        agreed.append(run.step)
        return list(values)

    for name, value in (("train_step", train_step), ("evaluate", lambda run: {"val_loss": 1.0, "val_bpb": 1.0}),
                        ("pack", lambda *a: (b"", {})), ("write_whole", lambda *a: None)):
        monkeypatch.setattr(train_gpt, name, value)
    run = make_run(max_wallclock_seconds=60.0, warmdown_iters=100, iterations=2000, train_log_every=0, val_loss_every=0,
                   warmup_steps=0)
    run.log = types.SimpleNamespace(line=lambda text: None, event=lambda *a, **k: None)
    run.loader = SILENT
    run.ranks = types.SimpleNamespace(device=types.SimpleNamespace(type="cuda"), rank=0, world_size=1,
                                      now_ms=lambda: clock[0], max=agree, sum=lambda tensor: tensor)
    train_gpt.train(run)
    assert 60_000 <= clock[0] < 60_130 and run.step == 300 + math.ceil(30_000 / 130)
    assert agreed[:11] == [*range(1, 11), 20] and agreed[-21:-2] == list(range(run.step - 18, run.step + 1))
    assert agreed[-2:] == [run.step] * 2  # on the clock before and after the validation
    assert len(agreed) < 90
    true = [100.0 * min(i, 300) + 130.0 * max(0, i - 300) for i in range(run.step)]
    assert all(abs(known - time) <= 10 * 30 for (known, _), time in zip(factors, true))
    assert factors[-1][1] == pytest.approx(train_gpt.schedule(run.config, run.step - 1, true[-1])[0])


def test_batched_muon_is_muon_matrix_by_matrix(monkeypatch):
    """One rank, and each of three ranks, whose shares of five matrices are 2, 2 and 1."""
    def step(ranks):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in [(8, 24)] * 5 + [(24, 8)] * 2]
        for p in params:
            p.grad = torch.randn_like(p)
        train_gpt.Muon([{"params": params, "lr": 0.02, "weight_decay": 0.0}], tiny_config(), ranks).step()
        return params

    alone = step(one_process())
    torch.manual_seed(0)
    starts = [torch.randn(p.shape) for p in alone]
    for p, start in zip(alone, starts):
        grad = torch.randn_like(start)
        update = train_gpt.orthogonalize((grad + 0.99 * grad)[None], 5)[0]
        scale = max(1, start.size(0) / start.size(1)) ** 0.5
        torch.testing.assert_close(p.data, start - 0.02 * scale * update.float(), rtol=0, atol=5e-4)
    shares = {}
    for collecting in (True, False):
        for rank in range(3):
            calls = []

            def gather(whole, part):
                calls.append(part)
                shares[rank, len(calls)] = part.clone()
                for other, place in enumerate(whole.split(len(part))):
                    place.copy_(part if collecting else shares[other, len(calls)])

            monkeypatch.setattr(train_gpt.dist, "all_gather_single", gather, raising=False)
            params = step(train_gpt.Ranks(rank, 3, torch.device("cpu")))
            assert [len(part) for part in calls] == [2, 1]
            if not collecting:
                assert all(torch.equal(a, b) for a, b in zip(params, alone))


def test_an_overflow_of_one_optimizer_does_not_reach_the_other():
    """float16: the table's gradient overflows; the matrices stay finite, and no fault is seen."""
    run = make_run(dtype="float16", grad_accum_steps=1)
    tokens = torch.randint(0, 260, (2, 33))
    batches = micro_batches(run.config, tokens[:, :-1], tokens[:, 1:])
    before = run.model.tok_emb.weight.detach().clone()
    run.model.tok_emb.weight.register_hook(lambda grad: torch.full_like(grad, float("inf")))
    for clip in (0.0, 1.0):
        run.config = train_gpt.replace(run.config, grad_clip_norm=clip)
        _, norm = train_gpt.train_step(run, batches)
        assert norm.isinf() and run.first_bad == train_gpt.NEVER and torch.equal(run.model.tok_emb.weight, before)
        assert all(p.isfinite().all() for p in run.model.parameters())


def test_a_step_sets_learning_rates_and_momentum():
    run = make_run(grad_accum_steps=1, muon_momentum_warmup_steps=10, iterations=10, warmdown_iters=20, weight_decay=0.1)
    tokens = torch.randint(0, 260, (2, 33))
    run.step = 5
    loss, norm = train_gpt.train_step(run, micro_batches(run.config, tokens[:, :-1], tokens[:, 1:]))
    groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
    assert [group["lr"] for group in groups] == [group["base_lr"] * 0.25 for group in groups]
    assert {group["kind"]: group["weight_decay"] for group in groups} == {"embed": 0.1, "scalar": 0.0, "matrix": 0.1}
    assert groups[-1]["momentum"] == pytest.approx(0.955)
    assert norm > 0 and abs(loss.item() - 5.56) < 0.1
