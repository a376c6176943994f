"""EMA_DECAY: a run that ends with an average of its weights."""

import pytest
import torch
from conftest import make_shards, run_here, run_trainer, tiny_arguments

SETTINGS = dict(OUT_DIR="", ITERATIONS=4, EMA_DECAY=0.75, CHECKPOINT_EVERY=1, KEEP_CHECKPOINTS=9, VAL_LOSS_EVERY=2, WARMUP_STEPS=2)


@pytest.fixture
def data(tmp_path):
    return make_shards(tmp_path)


def weights(folder, run_id) -> dict:
    """What a run ended with, before it was rounded."""
    return torch.load(folder / "logs" / run_id / "final_model.pt", weights_only=True)


def test_the_average_is_of_all_steps_and_goes_on_after_a_stop(tmp_path, monkeypatch, data, capsys):
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, RUN_ID="start", OUT_DIR="", ITERATIONS=0))
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, RUN_ID="run", **SETTINGS))
    average = list(weights(tmp_path, "start").values())  # not those of the warm-up
    for path in sorted((tmp_path / "logs" / "run" / "checkpoints").glob("*.pt")):
        state = torch.load(path, weights_only=True)
        average = [0.75 * a + 0.25 * p.float() for a, p in zip(average, state["model"].values(), strict=True)]
        torch.testing.assert_close(state["average"], average)
    ended = weights(tmp_path, "run")
    assert all(p.equal(a) for p, a in zip(ended.values(), state["average"], strict=True))
    assert not all(p.equal(ended[name]) for name, p in state["model"].items())
    lines = [line for line in capsys.readouterr().out.splitlines() if " val_loss:" in line and line.startswith("step:")]
    assert [line.endswith(" weights:live") for line in lines[-3:]] == [True, True, False]
    second = tmp_path / "logs" / "run" / "checkpoints" / "run_00000002.pt"
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, RUN_ID="again", RESUME=second, **SETTINGS))
    assert all(p.equal(ended[name]) for name, p in weights(tmp_path, "again").items())
    state["average"][0] = torch.zeros(1)
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(SystemExit, match="other.pt does not fit this run"):
        run_here(monkeypatch, tmp_path, *tiny_arguments(data, RUN_ID="wrong", RESUME=tmp_path / "other.pt", **SETTINGS))


def test_two_ranks_average_what_one_does(tmp_path, monkeypatch, data):
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, RUN_ID="one", **SETTINGS))
    result = run_trainer(tmp_path, *tiny_arguments(data, RUN_ID="two", **SETTINGS), ranks=2)
    assert result.returncode == 0, result.stderr
    torch.testing.assert_close(weights(tmp_path, "two"), weights(tmp_path, "one"), rtol=1e-3, atol=1e-4)
