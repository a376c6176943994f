"""EMA_DECAY and NUM_LOOPS: an average of the weights at the end, and blocks that run again from LOOP_AT on."""

import pytest
import torch
import train_gpt
from conftest import events, make_shards, run_here, tiny_arguments

SETTINGS = dict(OUT_DIR="", ITERATIONS=4, EMA_DECAY=0.2, CHECKPOINT_EVERY=1, KEEP_CHECKPOINTS=9, VAL_LOSS_EVERY=2, WARMUP_STEPS=2,
                NUM_LAYERS=3, LANES=1, NUM_LOOPS=2, LOOP_START=1, LOOP_END=1, LOOP_AT=0.5)


def weights(folder, run_id) -> dict:
    """Return a run's final weights, before rounding."""
    return torch.load(folder / "logs" / run_id / "final_model.pt", weights_only=True)


def test_the_average_covers_all_steps_and_blocks_repeat_from_loop_at_also_after_a_resume(tmp_path, monkeypatch, capsys):
    data, loops = make_shards(tmp_path), []
    step, score = train_gpt.Trainer.train_step, train_gpt.Validation.score
    monkeypatch.setattr(train_gpt.Trainer, "train_step", lambda trainer, *rest: (
        loops.append(trainer.model.loops), step(trainer, *rest))[1])
    monkeypatch.setattr(train_gpt.Validation, "score", lambda validation, model, *rest: (
        loops.append(model.loops), score(validation, model, *rest))[1])

    def run(run_id, **settings):
        loops.clear()
        run_here(monkeypatch, tmp_path, *tiny_arguments(data, **{**SETTINGS, "RUN_ID": run_id, **settings}))

    run("start", ITERATIONS=0)
    run("run")
    assert loops == [2, 2, 0, 0, 0, 2, 2, 2, 2, 2]  # warm-up; score and two steps, twice; scores before and after export
    average = list(weights(tmp_path, "start").values())  # not those of the warm-up
    paths = sorted((tmp_path / "logs" / "run" / "checkpoints").glob("*.pt"))
    for path, decay in zip(paths, (1 / 10, 2 / 11, 0.2, 0.2), strict=True):  # a short run forgets its start
        state = torch.load(path, weights_only=True)
        average = [decay * a + (1 - decay) * p.float() for a, p in zip(average, state["model"].values(), strict=True)]
        torch.testing.assert_close(state["average"], average)
    ended = weights(tmp_path, "run")
    assert all(p.equal(a) for p, a in zip(ended.values(), state["average"], strict=True))
    assert not all(p.equal(ended[name]) for name, p in state["model"].items())
    lines = [line for line in capsys.readouterr().out.splitlines() if " val_loss:" in line and line.startswith("step:")]
    assert [line.endswith(" weights:live") for line in lines[-3:]] == [True, True, False]
    for done, rest in ((1, [0, 2, 2, 2, 2, 2]), (2, 5 * [2]), (3, 3 * [2])):  # on both sides of the switch
        run(f"from{done}", RESUME=tmp_path / "logs" / "run" / "checkpoints" / f"run_{done:08d}.pt")
        assert all(p.equal(ended[name]) for name, p in weights(tmp_path, f"from{done}").items()) and loops[2:] == rest
    run("score", ITERATIONS=0, INIT_FROM="run")
    assert set(loops) == {2} and events(tmp_path, "score")[-1]["val_loss"] == events(tmp_path, "run")[-1]["val_loss"]
    state["average"][0] = torch.zeros(1)
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(SystemExit, match="other.pt does not fit this run"):
        run("wrong", RESUME=tmp_path / "other.pt")
