"""logs/track.py: every event reaches the tracker once, however often the program is stopped."""

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


class Wandb(types.ModuleType):
    """Like the client: init with a known id and resume="allow" continues that run."""

    def __init__(self):
        super().__init__("wandb")
        self.runs = {}

    def init(self, project, name, id, resume, config):
        assert resume == "allow" and id
        rows = self.runs.setdefault(id, [])
        return types.SimpleNamespace(log=rows.append, finish=lambda: rows.append("finished"),
                                     define_metric=lambda name, step_metric: None)


@pytest.fixture
def wandb(monkeypatch):
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def steps(rows):
    return [row["step"] for row in rows if row != "finished"]


def test_a_log_is_sent_once_and_continued_where_it_stopped(tmp_path, wandb):
    path = tmp_path / "run.jsonl"
    append(path, CONFIG, {"event": "val", "step": 0, "val_bpb": 4.0}, train(1))
    assert track.track("wandb", path, once=True) == 2 and track.track("wandb", path, once=True) == 0
    with path.open("a") as file:
        file.write('{"event": "tra')  # the trainer is writing
    assert track.track("wandb", path, once=True) == 0
    with path.open("a") as file:
        file.write('in", "step": 2, "train_loss": 3.0}\n')
    assert track.track("wandb", path, once=True) == 1
    (rows,) = wandb.runs.values()
    assert rows[0] == {"val/val_bpb": 4.0, "step": 0} and rows[1] == {"train/train_loss": 4.0, "step": 1}
    assert steps(rows) == [0, 1, 2]


def test_a_resumed_run_continues_its_page_and_a_new_one_of_the_same_name_has_its_own(tmp_path, wandb):
    path = tmp_path / "run.jsonl"
    append(path, CONFIG, train(1), train(2))
    track.track("wandb", path, once=True)
    path.unlink()
    append(path, {**CONFIG, "elapsed_s": 2.0})
    track.track("wandb", path, once=True)  # stopped between the first two events
    append(path, {"event": "resume", "step": 1}, train(2), train(3))
    track.track("wandb", path, once=True)
    path.unlink()
    append(path, {**CONFIG, "elapsed_s": 3.0}, train(1))
    track.track("wandb", path, once=True)
    assert [steps(rows) for rows in wandb.runs.values()] == [[1, 2, 2, 3], [1]]


def test_logs_that_a_resumed_run_left_behind_are_sent_too(tmp_path, wandb):
    def resume(step):  # as the trainer does
        path.rename(path.with_name(f"run.{10 ** 18 + step}.jsonl"))
        append(path, CONFIG, {"event": "resume", "step": step})  # the same first line, to the millisecond

    path = tmp_path / "run.jsonl"
    append(path, CONFIG, train(1))
    path.rename(tmp_path / f"run.{10 ** 18}.jsonl")  # another run of this name, which nobody tracked
    append(path, CONFIG, train(1), train(2))
    resume(2)
    append(path, train(3), train(4))
    assert track.track("wandb", path, once=True) == 4  # begun after the run was stopped once
    append(path, train(5))
    resume(5)  # between two looks
    append(path, train(6))
    resume(6)
    append(path, train(7))
    assert track.track("wandb", path, once=True) == 3 and track.track("wandb", path, once=True) == 0
    assert [steps(rows) for rows in wandb.runs.values()] == [[1, 2, 3, 4, 5, 6, 7]]


def test_a_growing_log_is_followed_to_its_final_score(tmp_path, wandb, monkeypatch):
    path = tmp_path / "run.jsonl"
    waits = iter([[], [CONFIG, train(1)], [train(2)], [{"event": "final", "step": 2, "val_loss": 3.0}]])
    monkeypatch.setattr(track.time, "sleep", lambda seconds: append(path, *next(waits)))
    assert track.track("wandb", path, once=False) == 3
    (rows,) = wandb.runs.values()
    assert steps(rows) == [1, 2, 2] and rows[-1] == "finished" and next(waits, None) is None
    assert track.track("wandb", path, once=False) == 0  # a finished log is not waited for


def test_tensorboard(tmp_path, monkeypatch):
    written = []

    class SummaryWriter:
        def __init__(self, folder):
            assert folder.startswith(str(tmp_path / "run.tensorboard"))

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def flush(self):
            written.append("flush")

        def close(self):
            written.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=SummaryWriter))
    append(tmp_path / "run.jsonl", CONFIG, train(1))
    assert track.track("tensorboard", tmp_path / "run.jsonl", once=True) == 1
    assert written == [("train/train_loss", 4.0, 1), "flush", "closed"]


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
