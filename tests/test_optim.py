"""Optimizers, schedules and the clock against independent references."""

import itertools
import math
import os
import shutil
import signal
import sys
import types

import pytest
import torch
import train_gpt
from conftest import events, make_shards, one_process, run_here, run_trainer, tiny_arguments, tiny_config


def make_trainer(**changes):
    return train_gpt.Trainer(tiny_config(**changes), one_process())


def micro_batches(config, tokens):
    """Inputs and targets of rows of tokens (B, T + 1), as a loader splits them."""
    rows = config.micro_batch_tokens // config.train_seq_len
    return list(zip(tokens[:, :-1].split(rows), tokens[:, 1:].split(rows)))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("switch", [f.name for f in train_gpt.fields(train_gpt.Config)
                                    if f.type is bool and f.name.upper() not in train_gpt.OF_MODEL + train_gpt.OF_RUN])
def test_ranks_update_what_one_rank_does(monkeypatch, ranks, switch):
    """Bit for bit, in two steps, also with switches that are new. Of two or three matrices of a shape, some ranks have none."""
    shapes = [(16, 48)] * 3 + [(48, 16)] * 2 + [(16, 16)] * 3
    parts = {}  # of each gather, by rank
    config = tiny_config(**{switch: True})

    def updated(rank, world_size):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        node = types.SimpleNamespace(rank=lambda: rank, size=lambda: world_size) if world_size > 1 else None
        made = train_gpt.Ranks(rank, world_size, torch.device("cpu"), node)
        muon = train_gpt.Muon([{"params": params, "lr": 0.02, "weight_decay": 0.1}], config, made)
        muon.param_groups[0]["momentum"] = 0.85
        muon.compute = torch.float32  # in bfloat16, products of one matrix and of several may differ in the last bit
        gathers = itertools.count()

        def gather(out, part, group, async_op):
            assert group is node
            its = parts.setdefault(next(gathers), {})
            its[rank] = part
            if len(its) == world_size:
                out.copy_(torch.cat([its[i] for i in range(world_size)]))
            return types.SimpleNamespace(wait=lambda: None)

        monkeypatch.setattr(train_gpt.dist, "all_gather_single", gather)
        for _ in range(2):
            for p in params:
                p.grad = torch.randn(p.shape)
            muon.step()
        return params

    for rank in range(ranks):
        updated(rank, ranks)  # leaves its parts
    wanted = updated(0, 1)
    for rank in range(ranks):
        assert all(map(torch.equal, updated(rank, ranks), wanted))


COSINE = dict(iterations=110, lr_schedule="cosine", lr_warmup_steps=10, min_lr=0.1)


@pytest.mark.parametrize("changes, wanted", [  # factors by step and ms
    (dict(iterations=100, warmdown_iters=20), {(0, 0): 1, (80, 1e9): 1, (90, 1e9): 0.5, (100, 0): 0}),
    (dict(iterations=100, warmdown_iters=0), {(99, 0): 1}), (dict(iterations=100, warmdown_iters=-1), {(99, 0): 1}),
    (dict(iterations=100, warmdown_iters=20, min_lr=0.2), {(80, 0): 1, (90, 0): 0.6, (100, 0): 0.2}),
    (dict(iterations=1000, warmdown_iters=3000, lr_warmup_steps=100),  # without a jump
     {(0, 0): 0.01, (20, 0): 0.21, (32, 0): 968 / 3000, (50, 0): 950 / 3000}),
    (COSINE, {(0, 0): 0.1, (4, 0): 0.5, (9, 0): 1, (10, 0): 1, (35, 0): 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2,
              (60, 1e9): 0.55, (110, 0): 0.1}),
    (dict(max_wallclock_seconds=100.0, **COSINE), {(20, 50e3): 0.55, (60, 20e3): 0.55, (20, 200e3): 0.1}),
    (dict(iterations=100, warmdown_fraction=0.4, warmdown_iters=0, min_lr=0.1),
     {(0, 1e6): 1, (60, 1e6): 1, (80, 1e6): 0.55, (100, 1e6): 0.1}),
    (dict(iterations=10_000, warmdown_fraction=0.4, max_wallclock_seconds=10.0),
     {(10, 0): 1, (10, 6000): 1, (10, 8000): 0.5, (10, 10_500): 0}),
])
def test_learning_rates(changes, wanted):
    config = tiny_config(**changes)
    assert {place: train_gpt.schedule(config, *place)[0] for place in wanted} == pytest.approx(wanted)


@pytest.mark.parametrize("steps, wanted", [(0, [0.9, 0.9, 0.9]), (1, [0.5, 0.9, 0.9]), (2, [0.5, 0.7, 0.9])])
def test_the_momentum_grows_over_its_warm_up(steps, wanted):
    """Without one it is full from step 0 on, as published."""
    config = tiny_config(muon_momentum_warmup_start=0.5, muon_momentum=0.9, muon_momentum_warmup_steps=steps)
    assert [train_gpt.schedule(config, step, 0.0)[1] for step in range(3)] == pytest.approx(wanted)


def step_of(trainer):
    """The loss, the norm and the gradients with which the optimizers step, from weights of which none is zero: the
    projections' zeros would hide all gradients behind them."""
    random, grads = torch.Generator().manual_seed(3), {}
    for p in trainer.model.parameters():
        torch.nn.init.normal_(p, std=0.1, generator=random)
    for optimizer in trainer.optimizers.values():
        optimizer.register_step_pre_hook(lambda optimizer, *_: grads.update(
            {p: p.grad.clone() for group in optimizer.param_groups for p in group["params"]}))
    tokens = torch.randint(0, 260, (32, 33), generator=torch.Generator().manual_seed(0))
    loss, norm = trainer.train_step(micro_batches(trainer.config, tokens))
    assert all(grads[p].abs().max() > 1e-6 for p in trainer.model.parameters())
    return [loss, norm, *(grads[p] for p in trainer.model.parameters())]


def test_micro_batches_compute_what_one_batch_does():
    whole = step_of(make_trainer(micro_batch_tokens=1024))
    for size in (32, 128, 512):
        torch.testing.assert_close(step_of(make_trainer(micro_batch_tokens=size)), whole, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("saved", [True, False])
def test_a_loaded_state_leaves_the_kernel_of_adam_to_the_device(saved):
    """A Mac's GPU, which never has FUSED, resumes what its CPU saved, and the reverse. Both go on counting steps."""
    old, new = make_trainer(fused=saved), make_trainer(fused=not saved)
    batch = micro_batches(tiny_config(), torch.zeros(4, 33).long())
    old.train_step(batch)
    new.load_state_dict(old.state_dict())
    assert {group["fused"] for group in new.optimizers["adam"].param_groups} == {None if saved else True}
    new.train_step(batch)
    assert new.optimizers["adam"].state[new.model.skip_weights]["step"] == 2


needs_compiler = pytest.mark.skipif(sys.platform != "linux" or not shutil.which(os.environ.get("CXX", "g++")),
                                    reason="there is no C++ compiler")


@pytest.mark.slow
@needs_compiler
def test_compiled_steps_on_a_cpu_are_equal_bit_for_bit(monkeypatch):
    """Inductor's own sums of the table's gradient are atomic additions of the threads."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    train_gpt.start_ranks(tiny_config())
    grads, batch, trainer = set(), torch.randint(0, 260, (64, 33)), make_trainer(micro_batch_tokens=2048)
    trainer.model.compile(dynamic=False, fullgraph=True)
    for _ in range(4):
        trainer.model.zero_grad()
        trainer.model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()).backward()
        grads.add(trainer.model.tok_emb.weight.grad.numpy().tobytes())
    torch.set_num_threads(threads)
    assert len(grads) == 1


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(("kind", "lanes", "graphs"), [("1", 1, 1), ("blocks", 0, 2), ("blocks", 1, 3)])
def test_a_compiled_run_computes_the_same_and_scores_with_the_graphs_of_training(tmp_path, monkeypatch, kind, lanes, graphs):
    """`blocks`: one graph for all blocks and one for the loss. Tiny validation texts need no graph without gradients."""
    data, logs, made = make_shards(tmp_path), [], []
    step = train_gpt.Trainer.train_step
    monkeypatch.setattr(train_gpt.Trainer, "train_step", lambda *arguments: (
        made.append(torch._dynamo.utils.counters["stats"]["unique_graphs"]), step(*arguments))[1])
    monkeypatch.setattr(train_gpt, "choose_attention", lambda *_: "tiled")  # which turns PyTorch's kernels off
    for compiled in ("0", kind):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        run_here(monkeypatch, tmp_path, *tiny_arguments(
            data, RUN_ID="run", NUM_LAYERS=3, COMPILE=compiled, ITERATIONS=2, LANES=lanes))
        logs.append(events(tmp_path, "run"))
        made.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert made == 4 * [0] + 4 * [graphs]  # all are made before the first of three steps
    if kind == "blocks" and not lanes:  # more than the eight graphs of one function that PyTorch would make
        words = tiny_arguments(data, RUN_ID="run", NUM_LAYERS=9, COMPILE=kind, ITERATIONS=2)
        for ranks in (0, 2):
            result = run_trainer(tmp_path, *words, ranks=ranks)
            assert result.returncode == 0, result.stderr
            logs.append(events(tmp_path, "run"))
    losses = [[event[name] for event in log for name in ("train_loss", "val_loss") if name in event] for log in logs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and len(losses[0]) == 5
    assert len(losses) == 2 or losses[3] == pytest.approx(losses[2], rel=1e-3)


@pytest.mark.parametrize(("kind", "val_batch", "graphs"), [("1", 4096, 1), ("1", 1024, 2), ("blocks", 1024, 6)])
def test_the_export_makes_no_graph_again(tmp_path, monkeypatch, kind, val_batch, graphs):
    """With every switch of the model. Smaller batches of validation need graphs without gradients: twice as many. Dynamo makes
    and guards them as for a GPU; what it cannot trace is an error. No kernels are compiled, which takes long."""
    made, export, compiled = [], train_gpt.export, torch.compile
    monkeypatch.setattr(torch, "compile", lambda part, **options: compiled(part, backend="eager", **options))
    monkeypatch.setattr(train_gpt, "choose_attention", lambda *_: "math")
    monkeypatch.setattr(train_gpt, "export", lambda *arguments: (
        made.append(torch._dynamo.utils.counters["stats"]["unique_graphs"]), export(*arguments)))
    torch._dynamo.utils.counters.clear()
    run_here(monkeypatch, tmp_path, *tiny_arguments(
        make_shards(tmp_path), COMPILE=kind, VAL_BATCH_SIZE=val_batch, ITERATIONS=3, EXPORT_BITS=6, EVAL_STRIDE=32,
        INT8_KEEP_FLOAT_MAX_NUMEL=256, LANES=1, SMEAR=1, SHIFT_KEYS=1, EXCLUSIVE_ATTN=1, MLP_SLOPE=0.5, DROPOUT=0.1))
    made.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert made == [graphs, graphs]


class FakeRanks:
    """One of several ranks. Its time in ms passes only where a test says so. When the ranks agree, the others arrive `late`
    ms after it, and may have a signal or a fault."""
    rank, world_size = 0, 1  # a Trainer sees one alone, since DDP would need processes

    def __init__(self, device="cpu"):
        self.device, self.ms, self.met = torch.device(device), 5e6, []
        self.late, self.signal, self.fault = 0.0, 0, False

    def now_ms(self):
        return self.ms

    def max(self, number, elapsed_ms, is_bad):
        late, self.late = self.late, 0.0
        self.ms += late
        self.met.append(self.ms)
        return [max(number, self.signal), elapsed_ms + late, max(is_bad, self.fault)]

    def sum(self, losses):
        return losses


def test_a_clock_takes_the_latest_time_and_any_signal_or_fault_of_the_ranks_and_can_be_paused():
    ranks = FakeRanks()
    clock = train_gpt.Clock(tiny_config(), ranks)
    clock.set(10, 4000.0)
    assert (clock.step, clock.time_ms, clock.stop_signal) == (10, 4000.0, 0)
    ranks.ms, ranks.late = ranks.ms + 600.0, 300.0
    assert not clock.synchronize() and (clock.time_ms, clock.stop_signal) == (4900.0, 0)
    ranks.ms, ranks.late, ranks.met = ranks.ms + 50.0, 30.0, []
    with clock.paused():  # what another rank still does when this one is there already is training
        assert clock.time_ms == 4980.0
        ranks.ms, ranks.late = ranks.ms + 100.0, 600.0
    assert clock.time_ms == 4980.0 and len(ranks.met) == 2  # they agree before and after
    assert clock.synchronize(is_bad=True) and clock.time_ms == 4980.0
    ranks.fault, ranks.signal = True, signal.SIGTERM
    assert clock.synchronize() and clock.stop_signal == signal.SIGTERM


class TimedTrainer(train_gpt.Trainer):
    """Steps only take time. Keeps the time and its clock's when each step began."""
    def __init__(self, ranks, step_ms, **changes):
        super().__init__(tiny_config(**changes), ranks)
        self.step_ms, self.begun = step_ms, []

    def train_step(self, batches):
        self.begun.append((self.ranks.ms, self.clock.time_ms))
        self.ranks.ms += self.step_ms(self.clock.step)
        return torch.tensor(1.0), torch.tensor(1.0)


def test_wall_clock_schedule_against_the_formula_with_a_fake_clock(tmp_path, monkeypatch, capsys):
    """Steps of changing length, validations of 100 ms that must not count, and the stop at the cap."""
    def score(model):
        trainer.ranks.ms += 100.0
        return {"val_loss": 1.0, "val_bpb": 1.0, "eval_time_ms": 100.0}

    monkeypatch.chdir(tmp_path)
    durations = [500.0 + 300.0 * (i % 5) for i in range(200)]
    trainer = TimedTrainer(FakeRanks(), durations.__getitem__, data_path=str(make_shards(tmp_path)), val_loss_every=10,
                           max_wallclock_seconds=60.0, warmdown_iters=30, iterations=200)
    loader, validation = train_gpt.TokenLoader(trainer.config, one_process()), types.SimpleNamespace(score=score, label="")
    train_gpt.Path("logs").mkdir(exist_ok=True)
    log = train_gpt.RunLog("timed", "", is_main=True)
    train_gpt.train(trainer, loader, validation, log)
    train_gpt.export(trainer, validation, log)
    for step, (_, elapsed_ms) in enumerate(trainer.begun):
        assert elapsed_ms == pytest.approx(sum(durations[:step]))
        warmdown_ms, left_ms = 30 * (elapsed_ms / max(step, 1)), 60_000 - elapsed_ms
        wanted = left_ms / warmdown_ms if left_ms <= warmdown_ms else 1.0
        assert train_gpt.schedule(trainer.config, step, elapsed_ms)[0] == pytest.approx(wanted, abs=1e-9)
    steps, total = step + 1, sum(durations[:step + 1])
    assert 0 < wanted < 0.1 and total >= 60_000 > total - durations[step] and trainer.clock.step == steps
    assert f"stopping_early: wallclock_cap train_time:{total:.0f}ms step:{steps}/200" in capsys.readouterr().out
    final = [event for event in events(tmp_path, "timed") if event["event"] == "val"][-1]
    assert final["step"] == steps and final["train_time_ms"] == pytest.approx(total)


def test_ranks_agree_on_the_clock_now_and_then_and_often_near_the_cap(tmp_path):
    """As on a GPU, where agreeing waits for the device: 100 ms a step, then 130 from step 300 on."""
    ranks = FakeRanks(device="meta")  # any that is no CPU
    trainer = TimedTrainer(ranks, lambda step: 100.0 if step < 300 else 130.0, data_path=str(make_shards(tmp_path)),
                           max_wallclock_seconds=60.0, warmdown_iters=100, iterations=2000, train_log_every=0, val_loss_every=0)
    silent = train_gpt.RunLog("", "", is_main=False)
    train_gpt.train(trainer, train_gpt.TokenLoader(trainer.config, one_process()), None, silent)
    last, start_ms = trainer.clock.step, 5e6
    true = [100.0 * min(i, 300) + 130.0 * max(0, i - 300) for i in range(last + 1)]
    assert 60_000 <= ranks.ms - start_ms == true[-1] < 60_130 and last == 300 + math.ceil(30_000 / 130)
    agreed = [true.index(ms - start_ms) for ms in ranks.met]
    assert agreed[:11] == [*range(1, 11), 20] and agreed[-16:] == list(range(last - 15, last + 1)) and len(agreed) < 90
    assert all(abs(known - (ms - start_ms)) <= 10 * 30 for ms, known in trainer.begun)
    known_ms = trainer.begun[-1][1]
    factors = [train_gpt.schedule(trainer.config, last - 1, ms)[0] for ms in (trainer.begun[-1][0] - start_ms, known_ms)]
    assert factors[1] == pytest.approx(factors[0])
