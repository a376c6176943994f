"""logs/track.py: every event of a run reaches the tracker once, those before it was resumed included."""

import json
import sys
import types

import track

CONFIG = {"event": "config", "config": {"NUM_LAYERS": 2}, "elapsed_s": 1.0}


def train(step):
    return {"event": "train", "step": step, "train_loss": 5.0 - step, "mfu": None}


def write_lines(path, *events, append=False):
    with path.open("a" if append else "w") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def test_a_growing_log_is_followed_through_a_resume_to_its_final_score(tmp_path, monkeypatch):
    """With a stand-in for the client, which notes what it is sent."""
    sent = []

    def init(project, name, config):
        assert (project, name, config) == ("train_gpt", "run", {"NUM_LAYERS": 2})
        return types.SimpleNamespace(log=lambda row, step: sent.append(row), finish=lambda: sent.append("finished"))

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.setattr(sys, "argv", ["track.py", "wandb", "run"])
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "logs" / "run.jsonl"
    path.parent.mkdir()
    write_lines(path, CONFIG, train(1))

    def resumed():
        path.rename(path.with_name(f"run.{10 ** 18}.jsonl"))  # as the trainer does
        write_lines(path, CONFIG, {"event": "resume", "step": 2}, train(3))

    parts = iter([lambda: write_lines(path, train(2), train(3), append=True), resumed,
                  lambda: write_lines(path, {"event": "final", "step": 3, "val_loss": 3.0}, append=True)])
    monkeypatch.setattr(track.time, "sleep", lambda seconds: next(parts)())
    wanted = [{"train/step": step, "train/train_loss": 5.0 - step, "step": step} for step in (1, 2, 3)]
    wanted += [{"final/step": 3, "final/val_loss": 3.0, "step": 3}, "finished"]
    for _ in range(2):  # while it trains, and afterwards
        sent.clear()
        track.main()
        assert sent == wanted
    assert next(parts, None) is None
