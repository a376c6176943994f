"""Optimizers and schedules against independent references."""

import copy
import math
import os
import platform
import shutil
import signal
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import train_gpt
from conftest import events, make_shards, make_trainer, micro_batches, one_process, silent_log, tiny_config, write_shard


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_in_the_right_group_and_only_there(tied):
    trainer = make_trainer(tie_embeddings=tied, num_layers=4)
    names = {p: name for name, p in trainer.model.named_parameters()}
    seen = [p for o in trainer.optimizers for group in o.param_groups for p in group["params"]]
    assert len(seen) == len(set(seen)) == len(names)
    config = trainer.config
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            for name in (names[p] for p in group["params"]):
                if isinstance(optimizer, train_gpt.Muon):
                    assert name.startswith("blocks.") and name.endswith("weight") and group["lr"] == config.matrix_lr
                elif name == "tok_emb.weight":
                    assert group["lr"] == (config.tied_embed_lr if tied else config.embed_lr)
                else:
                    assert group["lr"] == (config.head_lr if name == "lm_head.weight" else config.scalar_lr)
    matrices = {names[p] for p in trainer.optimizers[1].param_groups[0]["params"]}
    assert len(matrices) == 24 and not any("resid_mix" in name for name in matrices)


@pytest.mark.parametrize("place, shape", [("blocks.0.attn", (2, 4, 4)), ("", (4, 4)), ("", (2, 4, 4))])
def test_a_parameter_of_no_kind_is_an_error(place, shape):
    """It would be trained by Adam as if it were a vector, without a word."""
    trainer = make_trainer()
    trainer.model.get_submodule(place).register_parameter("mixer", torch.nn.Parameter(torch.zeros(shape)))
    with pytest.raises(ValueError, match="mixer has no kind in build_optimizers; .*CONTROL_TENSOR_NAME_PATTERNS"):
        train_gpt.build_optimizers(trainer.model, trainer.config, trainer.ranks)
    config = train_gpt.replace(trainer.config, control_tensor_name_patterns="mixer," + train_gpt.CONTROL)
    adam, _ = train_gpt.build_optimizers(trainer.model, config, trainer.ranks)
    assert any(p is trainer.model.get_submodule(place).mixer for group in adam.param_groups if group["kind"] == "scalar"
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
    trainer = make_trainer()
    twin = train_gpt.GPT(trainer.config)
    twin.load_state_dict(trainer.model.state_dict())
    vectors = [p for n, p in twin.named_parameters() if p.ndim == 1 or "resid_mix" in n or n == "skip_weights"]
    reference = torch.optim.Adam([{"params": [twin.tok_emb.weight], "lr": 0.03}, {"params": vectors, "lr": 0.02}],
                                 betas=(0.9, 0.95), eps=1e-8)
    for step in range(3):
        tokens = torch.randint(0, 260, (2, 33), generator=torch.Generator().manual_seed(step))
        for model in (trainer.model, twin):
            model.zero_grad()
            model(tokens[:, :-1], tokens[:, 1:]).backward()
        trainer.optimizers[0].step()
        reference.step()
    for name in ("tok_emb.weight", "skip_weights", "blocks.0.resid_mix", "blocks.1.attn.q_gain"):
        torch.testing.assert_close(trainer.model.get_parameter(name), twin.get_parameter(name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_adamw_trains_everything_and_decays_matrices_and_embeddings_alone(fused):
    trainer = make_trainer(optimizer="adamw", adam_lr=3e-3, weight_decay=0.1, fused=fused, tie_embeddings=False, warmdown_iters=0)
    twin = train_gpt.GPT(trainer.config)
    twin.load_state_dict(trainer.model.state_dict())
    vectors = [p for n, p in twin.named_parameters() if p.ndim == 1 or "resid_mix" in n or n == "skip_weights"]
    matrices = [p for n, p in twin.named_parameters() if n.endswith(".weight")]
    reference = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
                                  lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    tokens = torch.randint(0, 260, (2, 33), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        trainer.train_step(micro_batches(trainer.config, tokens[:, :-1], tokens[:, 1:]))
        twin.zero_grad()
        twin(tokens[:, :-1], tokens[:, 1:]).backward()
        for group in reference.param_groups:
            group["lr"] = 3e-3
        reference.step()
    for name, p in trainer.model.named_parameters():
        torch.testing.assert_close(p, twin.get_parameter(name), rtol=1e-4, atol=1e-6, msg=name)
    head = train_gpt.GPT(trainer.config).lm_head.weight
    assert len(trainer.optimizers) == 1 and not torch.equal(trainer.model.lm_head.weight, head)


def test_the_table_is_bfloat16_in_the_baseline_alone():
    """Small updates and weight decay would round to nothing in it."""
    for changes, dtype in (({}, torch.bfloat16), ({"optimizer": "adamw"}, torch.float32),
                           ({"weight_decay": 0.1}, torch.float32)):
        trainer = make_trainer(dtype="bfloat16", **changes)
        assert trainer.model.tok_emb.weight.dtype == dtype
        tokens = torch.randint(0, 260, (2, 33))
        assert trainer.model(tokens[:, :-1], tokens[:, 1:]).isfinite()


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
    factors = [train_gpt.rate_factor(config, step, 1e9) for step in range(111)]
    assert factors[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert [factors[i] for i in (10, 60, 110)] == pytest.approx([1.0, 0.55, 0.1])
    assert factors[35] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    capped = train_gpt.replace(config, max_wallclock_seconds=100.0)  # what ends the run first ends the cosine
    assert train_gpt.rate_factor(capped, 20, 50e3) == pytest.approx(0.55)
    assert train_gpt.rate_factor(capped, 60, 20e3) == pytest.approx(0.55)
    assert train_gpt.rate_factor(capped, 20, 200e3) == pytest.approx(0.1)


def test_warming_up_ends_without_a_jump():
    config = tiny_config(iterations=1000, warmdown_iters=3000, lr_warmup_steps=100, max_wallclock_seconds=0.0)
    factors = [train_gpt.rate_factor(config, step, 0) for step in range(300)]
    assert factors[0] == 0.01 and factors[50] < factors[20] * 3 and max(factors) < 1 / 3
    assert max(abs(a - b) for a, b in zip(factors, factors[1:])) < 0.011


def test_the_warmdown_has_a_floor_too():
    config = tiny_config(iterations=100, warmdown_iters=20, max_wallclock_seconds=0.0, min_lr=0.2)
    assert [train_gpt.rate_factor(config, step, 0) for step in (80, 90, 100)] == pytest.approx([1.0, 0.6, 0.2])


def test_schedule_without_a_cap():
    config = tiny_config(iterations=100, warmdown_iters=20, max_wallclock_seconds=0.0)
    factors = [train_gpt.rate_factor(config, step, 1e9) for step in range(101)]
    assert factors[:81] == [1.0] * 81 and factors[90] == 0.5 and factors[100] == 0.0
    assert train_gpt.rate_factor(train_gpt.replace(config, warmdown_iters=0), 99, 0) == 1.0
    assert train_gpt.rate_factor(train_gpt.replace(config, warmdown_iters=-1), 99, 0) == 1.0


def test_momentum_warm_up():
    for steps, wanted in ((100, [0.92, 0.955, 0.99, 0.99]), (0, [0.99] * 4)):
        config = tiny_config(muon_momentum=0.99, muon_momentum_warmup_start=0.92, muon_momentum_warmup_steps=steps)
        assert [train_gpt.muon_momentum(config, step) for step in (0, 50, 100, 1000)] == pytest.approx(wanted)


class FakeRanks:
    """A rank as a thread. What it does adds to `ms`, its time, which begins anywhere; where ranks meet, they wait for the
    latest. A Trainer sees one alone, since DDP would need processes."""
    world_size = 1

    def __init__(self, rank=0, count=1, device="cpu"):
        self.rank, self.device, self.origin = rank, torch.device(device), 5e6 - 8e6 * rank
        self.ms, self.met, self.team = 0.0, [], [self]
        self.wait = threading.Barrier(count, self.let_time_pass, timeout=60).wait

    def let_time_pass(self):
        latest = max(ranks.ms for ranks in self.team)
        for ranks in self.team:
            ranks.ms = latest

    def now_ms(self):
        return self.origin + self.ms

    def max(self, *values):
        self.posted = values
        self.wait()
        self.met.append(self.ms)
        largest = [max(column) for column in zip(*(ranks.posted for ranks in self.team))]
        self.wait()  # until all have read it
        return largest

    def sum(self, tensor):
        return tensor


class TimedTrainer(train_gpt.Trainer):
    """Steps and checkpoints only take time. Keeps the time and its clock's when each step began."""
    def __init__(self, ranks, step_ms, **changes):
        super().__init__(tiny_config(**changes), ranks)
        self.step_ms, self.begun = step_ms, []

    def train_step(self, batches):
        self.ranks.wait()
        self.begun.append((self.ranks.ms, self.clock.time_ms))
        self.ranks.ms += self.step_ms(self.clock.step)
        return torch.tensor(1.0), torch.tensor(1.0)

    def state_dict(self):
        self.ranks.ms += 900.0
        return super().state_dict()


def timed_validation(ranks):
    def score(model):
        ranks.wait()
        ranks.ms += 100.0
        return {"val_loss": 1.0, "val_bpb": 1.0, "eval_time_ms": 100.0}
    return types.SimpleNamespace(score=score, label="")


def on_ranks(count, function):
    """The results of a function of each of several ranks, called at the same time."""
    team = [FakeRanks(rank, count) for rank in range(count)]
    for ranks in team:
        ranks.team, ranks.wait = team, team[0].wait
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(function, team))


def test_wall_clock_schedule_against_the_formula_with_a_fake_clock(tmp_path, monkeypatch, capsys):
    """Steps of changing length, validations that must not count, and the stop at the cap."""
    monkeypatch.chdir(tmp_path)
    durations = [500.0 + 300.0 * (i % 5) for i in range(200)]
    trainer = TimedTrainer(FakeRanks(), durations.__getitem__, data_path=str(make_shards(tmp_path)), val_loss_every=10,
                           max_wallclock_seconds=60.0, warmdown_iters=30, iterations=200)
    validation, log = timed_validation(trainer.ranks), train_gpt.RunLog("timed", "", is_main=True)
    loader = train_gpt.TokenLoader(trainer.config, trainer.ranks)
    train_gpt.train(trainer, loader, validation, log)
    train_gpt.export(trainer, loader, validation, log)
    for step, (_, elapsed_ms) in enumerate(trainer.begun):
        assert elapsed_ms == pytest.approx(sum(durations[:step]))
        warmdown_ms, left_ms = 30 * (elapsed_ms / max(step, 1)), 60_000 - elapsed_ms
        wanted = left_ms / warmdown_ms if left_ms <= warmdown_ms else 1.0
        assert train_gpt.rate_factor(trainer.config, step, elapsed_ms) == pytest.approx(wanted, abs=1e-9)
    steps, total = step + 1, sum(durations[:step + 1])
    assert 0 < wanted < 0.1 and total >= 60_000 > total - durations[step] and trainer.clock.step == steps
    assert f"stopping_early: wallclock_cap train_time:{total:.0f}ms step:{steps}/200" in capsys.readouterr().out
    final = [event for event in events(tmp_path, "timed") if event["event"] == "val"][-1]
    assert final["step"] == steps and final["train_time_ms"] == pytest.approx(total)


def step_of(trainer, tokens):
    """The loss, the norm and the gradients of one step on tokens (rows, T + 1), from weights of which none is zero: the
    projections' zeros would hide all gradients behind them."""
    random, grads = torch.Generator().manual_seed(3), {}
    for p in trainer.model.parameters():
        torch.nn.init.normal_(p, std=0.1, generator=random)
        p.register_post_accumulate_grad_hook(lambda p: grads.update({p: p.grad}))
    loss, norm = trainer.train_step(micro_batches(trainer.config, tokens[:, :-1], tokens[:, 1:]))
    assert all(grads[p].abs().max() > 1e-6 for p in trainer.model.parameters())
    return [loss, norm, *(grads[p] for p in trainer.model.parameters())]


def test_micro_batches_compute_what_one_batch_does():
    tokens = torch.randint(0, 260, (32, 33), generator=torch.Generator().manual_seed(0))
    whole = step_of(make_trainer(micro_batch_tokens=1024), tokens)
    for size in (32, 128, 512):
        torch.testing.assert_close(step_of(make_trainer(micro_batch_tokens=size), tokens), whole, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or not shutil.which(os.environ.get("CXX", "g++")),
                    reason="there is no C++ compiler")
@pytest.mark.parametrize("kernel", ["math", "tiled"])
def test_a_compiled_model_computes_the_same(tmp_path, monkeypatch, kernel):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    tokens = torch.randint(0, 260, (32, 33), generator=torch.Generator().manual_seed(0))
    eager, trainer = make_trainer(), make_trainer(attn=kernel, data_path=str(make_shards(tmp_path)))
    trainer.model.compile(dynamic=False, fullgraph=True)
    assert trainer.model.state_dict().keys() == eager.model.state_dict().keys()
    torch.testing.assert_close(step_of(trainer, tokens), step_of(eager, tokens), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("micro", [32, 160, 4096])
def test_validation_in_forwards_of_one_shape_is_the_mean_over_all_tokens(tmp_path, world_size, micro):
    config = tiny_config(grad_accum_steps=1, micro_batch_tokens=micro, val_batch_size=8192, data_path=str(tmp_path))
    model, shapes, totals = train_gpt.GPT(config), set(), []
    for p in model.parameters():  # as drawn, all tokens are as likely
        torch.nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(1))
    tokens = torch.randint(0, 260, (47 * 32 + 1,), generator=torch.Generator().manual_seed(2))
    write_shard(tmp_path / "tiny_val_000000.bin", tokens)
    with torch.no_grad():
        wanted = model(tokens[:-1].view(-1, 32), tokens[1:].view(-1, 32)).item()
    for rank in range(world_size):
        ranks = types.SimpleNamespace(rank=rank, world_size=world_size, device=torch.device("cpu"), now_ms=lambda: 0.0,
                                      sum=lambda tensor: totals.append(tensor.clone()) or tensor)
        train_gpt.Validation(config, ranks).score(lambda x, y: (shapes.add(x.shape), model(x, y))[1])
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


def test_a_clock_takes_the_latest_time_and_any_signal_or_fault_of_the_ranks():
    def agreements(ranks):
        clock, found = train_gpt.Clock(tiny_config(), ranks), []
        clock.set(10, 4000.0)
        assert (clock.step, clock.time_ms, clock.stop_signal) == (10, 4000.0, 0)
        for steps, ms in ((5, (600.0, 900.0)), (0, (0.0, 50.0)), (1, (70.0, 0.0))):
            clock.step += steps
            ranks.ms += ms[ranks.rank]
            if steps == 1 and ranks.rank == 0:
                clock.on_signal(signal.SIGTERM, None)
            is_bad = clock.agree(steps == 1 and ranks.rank == 1)
            found.append((clock.time_ms, clock.stop_signal, is_bad))
        return found

    wanted = [(4900.0, 0, False), (4950.0, 0, False), (5020.0, signal.SIGTERM, True)]
    assert on_ranks(2, agreements) == [wanted] * 2


def test_a_paused_clock_stands_still_on_all_ranks():
    """What a rank still does when another is there already is training."""
    def pauses(ranks):
        clock, times = train_gpt.Clock(tiny_config(), ranks), []
        for work, rest in (((50.0, 80.0), (700.0, 100.0)), ((10.0, 0.0), (0.0, 5.0))):
            ranks.ms += work[ranks.rank]
            with clock.paused():
                times.append(clock.time_ms)
                ranks.ms += rest[ranks.rank]
            times.append(clock.time_ms)
        clock.agree()
        return [*times, clock.time_ms], ranks.met

    wanted = [80.0, 80.0, 90.0, 90.0, 90.0], [80.0, 780.0, 790.0, 795.0, 795.0]  # they agree before and after
    assert on_ranks(2, pauses) == [wanted] * 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_checkpoints_are_on_the_training_clock_of_all_ranks_but_validations_are_not(tmp_path, world_size):
    """A step takes 50 ms, a checkpoint of rank 0 900, a validation 100; steps, validations and collectives wait for all."""
    data = make_shards(tmp_path)

    def train(ranks):
        trainer = TimedTrainer(ranks, lambda step: 50.0, iterations=3, val_loss_every=1, checkpoint_every=1,
                               data_path=str(data), out_dir=str(tmp_path))
        loader, validation = train_gpt.TokenLoader(trainer.config, ranks), timed_validation(ranks)
        train_gpt.train(trainer, loader, validation, silent_log())
        if world_size == 1:
            train_gpt.export(trainer, loader, validation, silent_log())
        return trainer.clock.step, trainer.clock.time_ms  # the checkpoint of the last step comes after its end

    assert on_ranks(world_size, train) == [(3, 3 * 50.0 + 2 * 900.0)] * world_size


def test_ranks_agree_on_the_clock_now_and_then_and_often_near_the_cap(tmp_path):
    """As on a GPU, where agreeing waits for the device: 100 ms a step, then 130 from step 300 on."""
    ranks = FakeRanks(device="meta")  # any that is no CPU
    trainer = TimedTrainer(ranks, lambda step: 100.0 if step < 300 else 130.0, data_path=str(make_shards(tmp_path)),
                           max_wallclock_seconds=60.0, warmdown_iters=100, iterations=2000, train_log_every=0, val_loss_every=0)
    train_gpt.train(trainer, train_gpt.TokenLoader(trainer.config, one_process()), None, silent_log())
    last = trainer.clock.step
    true = [100.0 * min(i, 300) + 130.0 * max(0, i - 300) for i in range(last + 1)]
    assert 60_000 <= ranks.ms == true[-1] < 60_130 and last == 300 + math.ceil(30_000 / 130)
    agreed = [true.index(ms) for ms in ranks.met]
    assert agreed[:11] == [*range(1, 11), 20] and agreed[-16:] == list(range(last - 15, last + 1)) and len(agreed) < 90
    assert all(abs(known - ms) <= 10 * 30 for ms, known in trainer.begun)
    factors = [train_gpt.rate_factor(trainer.config, last - 1, ms) for ms in trainer.begun[-1]]
    assert factors[1] == pytest.approx(factors[0])


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


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_an_overflow_of_one_optimizer_does_not_reach_the_other(tmp_path, clip):
    """float16: the table's gradient overflows; the matrices stay finite, and the run goes on."""
    trainer = make_trainer(dtype="float16", grad_accum_steps=1, grad_clip_norm=clip, iterations=1, val_loss_every=0,
                           data_path=str(make_shards(tmp_path)))
    loader, table = train_gpt.TokenLoader(trainer.config, trainer.ranks), trainer.model.tok_emb.weight
    before = table.detach().clone()
    table.register_hook(lambda grad: torch.full_like(grad, float("inf")))
    train_gpt.train(trainer, loader, None, silent_log())
    _, norm = trainer.train_step(loader.batches(1))
    assert norm.isinf() and trainer.clock.step == 1 and torch.equal(table, before)
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_a_step_sets_learning_rates_and_momentum():
    trainer = make_trainer(grad_accum_steps=1, muon_momentum_warmup_steps=10, iterations=10, warmdown_iters=20, weight_decay=0.1)
    tokens = torch.randint(0, 260, (2, 33))
    trainer.clock.set(5, 0.0)
    loss, norm = trainer.train_step(micro_batches(trainer.config, tokens[:, :-1], tokens[:, 1:]))
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    assert [group["lr"] for group in groups] == [group["base_lr"] * 0.25 for group in groups]
    assert {group["kind"]: group["weight_decay"] for group in groups} == {"embed": 0.1, "scalar": 0.0, "matrix": 0.1}
    assert groups[-1]["momentum"] == pytest.approx(0.955)
    assert norm > 0 and abs(loss.item() - 5.56) < 0.1
