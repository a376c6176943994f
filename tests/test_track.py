"""logs/track.py: every event of a run reaches the tracker once, those before it was resumed included."""

import json
import sys
import types

import pytest
import track

CONFIG = {"event": "config", "config": {"NUM_LAYERS": 2}, "elapsed_s": 1.0}


def train(step):
    return {"event": "train", "step": step, "train_loss": 5.0 - step, "mfu": None}


def write_lines(path, *events, append=False):
    with path.open("a" if append else "w") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Follows logs/run.jsonl in this process with a stand-in for the client; returns the rows of its page."""
    def call(tracker, *options):
        rows = []

        def init(project, name, config):
            assert (project, name, config) == ("train_gpt", "run", {"NUM_LAYERS": 2})
            return types.SimpleNamespace(log=lambda numbers, step: rows.append(numbers), finish=lambda: rows.append("finished"))

        def writer(folder):
            assert folder == "logs/run.tensorboard"
            return types.SimpleNamespace(add_scalar=lambda *row: rows.append(row), close=lambda: rows.append("finished"))

        monkeypatch.delenv("WANDB_PROJECT", raising=False)
        monkeypatch.setitem(sys.modules, tracker, types.SimpleNamespace(init=init))
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=writer))
        monkeypatch.setattr(sys, "argv", ["track.py", tracker, "run", *options])
        track.main()
        assert rows.pop() == "finished"
        return rows

    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    return call


@pytest.mark.parametrize("tracker", ["wandb", "tensorboard"])
def test_the_numbers_of_a_log_are_sent(run, tmp_path, tracker):
    path = tmp_path / "logs" / "run.jsonl"
    write_lines(path, CONFIG, {"event": "val", "step": 0, "val_bpb": 4.0}, train(1))
    with path.open("a") as file:
        file.write('{"event": "tra')  # the trainer is writing
    pages = [{"val/step": 0, "val/val_bpb": 4.0}, {"train/step": 1, "train/train_loss": 4.0}]
    wanted = [{**page, "step": step} for step, page in enumerate(pages)]
    if tracker == "tensorboard":
        wanted = [(name, value, step) for step, page in enumerate(pages) for name, value in page.items()]
    assert run(tracker, "--once") == wanted


def test_a_growing_log_is_followed_through_a_resume_to_its_final_score(run, tmp_path, monkeypatch):
    path = tmp_path / "logs" / "run.jsonl"
    write_lines(path, CONFIG)

    def resumed():
        path.rename(path.with_name(f"run.{10 ** 18}.jsonl"))  # as the trainer does
        write_lines(path, CONFIG, {"event": "resume", "step": 2}, train(3))

    parts = iter([lambda: write_lines(path, train(1), train(2), train(3), append=True), resumed,
                  lambda: write_lines(path, {"event": "final", "step": 3, "val_loss": 3.0}, append=True)])
    monkeypatch.setattr(track.time, "sleep", lambda seconds: next(parts)())
    assert [row["step"] for row in run("wandb")] == [1, 2, 3, 3] and next(parts, None) is None
    assert [row["step"] for row in run("wandb")] == [1, 2, 3, 3]  # afterwards, with the older log


def test_a_missing_library_or_log_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(sys, "argv", ["track.py", "wandb", str(tmp_path / "run.jsonl"), "--once"])
    with pytest.raises(SystemExit, match="run.jsonl is no log of a run"):
        track.main()
    write_lines(tmp_path / "run.jsonl", CONFIG)
    with pytest.raises(SystemExit, match="wandb.*pip install wandb"):
        track.main()
