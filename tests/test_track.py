"""logs/track.py: every event of a run reaches the tracker once, those before it was resumed included."""

import json
import sys
import types

import pytest
import track

CONFIG = {"event": "config", "config": {"NUM_LAYERS": 2}, "elapsed_s": 1.0}


def train(step):
    return {"event": "train", "step": step, "train_loss": 5.0 - step, "mfu": None}


def append(path, *events):
    with path.open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Follows logs/run.jsonl in this process with a stand-in for the client; returns the rows of its page."""
    def call(tracker, *options):
        rows = []

        def init(project, name, config):
            assert (project, name, config) == ("train_gpt", "run", {"NUM_LAYERS": 2})
            return types.SimpleNamespace(log=lambda numbers, step: rows.append(numbers), finish=lambda: rows.append("finished"))

        monkeypatch.delenv("WANDB_PROJECT", raising=False)
        monkeypatch.setitem(sys.modules, tracker, types.SimpleNamespace(init=init))
        monkeypatch.setattr(sys, "argv", ["track.py", tracker, "run", *options])
        track.main()
        assert rows.pop() == "finished"
        return rows

    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    return call


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_the_numbers_of_a_log_are_sent(run, tmp_path, tracker):
    path = tmp_path / "logs" / "run.jsonl"
    append(path, CONFIG, {"event": "val", "step": 0, "val_bpb": 4.0}, train(1))
    with path.open("a") as file:
        file.write('{"event": "tra')  # the trainer is writing
    assert run(tracker, "--once") == [{"val/step": 0, "val/val_bpb": 4.0, "step": 0},
                                      {"train/step": 1, "train/train_loss": 4.0, "step": 1}]


def test_a_growing_log_is_followed_through_a_resume_to_its_final_score(run, tmp_path, monkeypatch):
    path = tmp_path / "logs" / "run.jsonl"

    def resumed():
        path.rename(path.with_name(f"run.{10 ** 18}.jsonl"))  # as the trainer does
        append(path, CONFIG, {"event": "resume", "step": 2}, train(3))

    parts = iter([lambda: append(path, CONFIG, train(1)), lambda: append(path, train(2), train(3)), resumed,
                  lambda: append(path, {"event": "final", "step": 3, "val_loss": 3.0})])
    monkeypatch.setattr(track.time, "sleep", lambda seconds: next(parts)())
    assert [row["step"] for row in run("wandb")] == [1, 2, 3, 3] and next(parts, None) is None


def test_tensorboard(tmp_path, monkeypatch):
    written = []
    writer = types.SimpleNamespace(add_scalar=lambda *row: written.append(row), close=lambda: written.append("closed"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=lambda folder: writer))
    append(tmp_path / "run.jsonl", CONFIG, train(1))
    monkeypatch.setattr(sys, "argv", ["track.py", "tensorboard", str(tmp_path / "run.jsonl"), "--once"])
    track.main()
    assert written == [("train/step", 1, 1), ("train/train_loss", 4.0, 1), "closed"]


@pytest.mark.parametrize("tracker", ["wandb", "tensorboard"])
def test_a_missing_library_is_named_with_its_install_command(tmp_path, monkeypatch, tracker):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if tracker == "tensorboard" else tracker, None)
    append(tmp_path / "run.jsonl", CONFIG)
    monkeypatch.setattr(sys, "argv", ["track.py", tracker, str(tmp_path / "run.jsonl"), "--once"])
    with pytest.raises(SystemExit, match=f"{tracker} cannot be imported .*; install it with: pip install {tracker}"):
        track.main()


def test_a_run_that_does_not_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["track.py", "wandb", "none", "--once"])
    with pytest.raises(SystemExit, match="logs/none.jsonl does not exist"):
        track.main()
