"""NUM_LOOPS: blocks that run again from LOOP_AT on; LANES with them."""

import pytest
import torch
import train_gpt
from conftest import events, make_shards, run_here, run_trainer, tiny_arguments

SETTINGS = dict(OUT_DIR="", NUM_LAYERS=3, NUM_LOOPS=2, LOOP_START=1, LOOP_END=1, LOOP_AT=0.5, LANES=1, ITERATIONS=4,
                CHECKPOINT_EVERY=1, KEEP_CHECKPOINTS=9, ATTN="math")


@pytest.fixture
def data(tmp_path):
    return make_shards(tmp_path)


@pytest.fixture
def passes(monkeypatch):
    """The numbers of extra passes, one for each forward pass of a model."""
    seen, hidden = [], train_gpt.GPT.hidden

    def watched(model, tokens):
        seen.append(model.loops)
        return hidden(model, tokens)

    monkeypatch.setattr(train_gpt.GPT, "hidden", watched)
    return seen


def train(monkeypatch, folder, data, **settings):
    """Train; return the events of the log and the last weights before they were rounded."""
    words = tiny_arguments(data, **{**SETTINGS, **settings})
    run_here(monkeypatch, folder, *words)
    run_id = settings["RUN_ID"]
    return events(folder, run_id), torch.load(folder / "logs" / run_id / "final_model.pt", weights_only=True)


def losses_of(log) -> list[float]:
    return [event[name] for event in log for name in ("train_loss", "val_loss") if name in event]


def test_blocks_run_again_from_a_part_of_the_training_on_and_also_after_a_stop(tmp_path, monkeypatch, data, passes):
    settings = dict(VAL_LOSS_EVERY=0, WARMUP_STEPS=0, TRAIN_BATCH_TOKENS=32, MICRO_BATCH_TOKENS=32)
    _, ended = train(monkeypatch, tmp_path, data, RUN_ID="run", **settings)
    assert passes[:4] == [0, 0, 2, 2] and set(passes[4:]) == {2}  # a forward pass a step, then scores
    for step, rest in ((1, [0, 2, 2]), (3, [2]), (4, [])):  # on both sides of the switch, and an export alone
        passes.clear()
        path = tmp_path / "logs" / "run" / "checkpoints" / f"run_{step:08d}.pt"
        _, again = train(monkeypatch, tmp_path, data, RUN_ID=f"from{step}", RESUME=path, **settings)
        assert passes[:len(rest)] == rest and set(passes[len(rest):]) == {2}
        assert all(p.equal(again[name]) for name, p in ended.items())
    passes.clear()
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, RUN_ID="score", NUM_LAYERS=3, ITERATIONS=0, OUT_DIR="s",
                                                     INIT_FROM="run"))
    assert set(passes) == {2}
    assert events(tmp_path, "score")[-1]["val_loss"] == pytest.approx(events(tmp_path, "run")[-1]["val_loss"], rel=1e-6)


def test_the_clock_decides_where_there_is_a_cap(tmp_path, monkeypatch, data, passes):
    """Each step takes a tenth of it."""
    step, ranks = train_gpt.Trainer.train_step, train_gpt.Ranks
    now = [0.0]

    def slow(trainer, batches):
        now[0] += 1000.0
        return step(trainer, batches)

    monkeypatch.setattr(train_gpt.Trainer, "train_step", slow)
    monkeypatch.setattr(ranks, "now_ms", lambda self: now[0])
    train(monkeypatch, tmp_path, data, RUN_ID="run", ITERATIONS=1000, MAX_WALLCLOCK_SECONDS=10, LOOP_AT=0.35, VAL_LOSS_EVERY=0,
          WARMUP_STEPS=0, TRAIN_BATCH_TOKENS=32, MICRO_BATCH_TOKENS=32)
    assert passes[:10] == 4 * [0] + 6 * [2]


def test_two_ranks_loop_together(tmp_path, monkeypatch, data):
    logs = [train(monkeypatch, tmp_path, data, RUN_ID="one")[0]]
    result = run_trainer(tmp_path, *tiny_arguments(data, RUN_ID="two", **SETTINGS), ranks=2)
    assert result.returncode == 0, result.stderr
    logs.append(events(tmp_path, "two"))
    assert losses_of(logs[1]) == pytest.approx(losses_of(logs[0]), rel=2e-4)
    assert losses_of(train(monkeypatch, tmp_path, data, RUN_ID="once", NUM_LOOPS=0)[0])[-1] != pytest.approx(
        losses_of(logs[0])[-1], rel=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["1", "blocks"])
def test_both_graphs_are_compiled_before_the_first_step(tmp_path, monkeypatch, data, kind):
    """And compute what the model does that is not compiled."""
    logs, counts = [], []
    for compiled in ("0", kind):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        step = train_gpt.Trainer.train_step

        def watched(trainer, batches, step=step):
            counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            return step(trainer, batches)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_gpt.Trainer, "train_step", watched)
            logs.append(train(monkeypatch, tmp_path, data, RUN_ID=f"compile{compiled}", COMPILE=compiled)[0])
    compiled = counts[len(counts) // 2:]
    assert len(set(compiled)) == 1 and compiled[0] >= 2  # nothing is compiled after the first step
    assert losses_of(logs[1]) == pytest.approx(losses_of(logs[0]), rel=1e-4)
