"""tools/plot.py, events.py and track.py: what they read from logs, how runs are compared, and what a tracker is sent."""

import json
import sys
from unittest.mock import Mock

import plot
import pytest
import track
from conftest import run_script


def write_lines(path, *events, append=False):
    with path.open("a" if append else "w") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def write_log(path, seed=1, lr=0.02, steps=(1, 2, 3, 4), resume=None, final=True, shift=0.0, data="a/set", batch=1000,
              code="a", digest="x"):
    settings = {"SEED": seed, "RUN_ID": path.stem, "MATRIX_LR": lr, "TRAIN_BATCH_TOKENS": batch, "DATA_PATH": data}
    events = [{"event": "config", "data_sha256": digest, "config": settings}]
    if resume is not None:
        events.append({"event": "resume", "step": resume})
    for step in steps:
        events.append({"event": "train", "step": step, "train_loss": 5 - step + shift, "train_time_ms": 1000 * step,
                       "tok_per_sec": 1_000_000 + step})
        if step % 2 == 0:
            events.append({"event": "val", "step": step, "val_loss": 4 - step / 2 + shift, "val_bpb": 2 - step / 4,
                           "train_time_ms": 1000 * step})
    if final:
        events += [{"event": "export", "code_sha256": code, "artifact_bytes": 900, "code_bytes": 100},
                   {"event": "final", "step": steps[-1], "val_loss": 2.01, "val_bpb": 1.01}]
    write_lines(path, *events)
    return path


def read(path, **changes):
    return plot.read_run(str(write_log(path, **changes)))


def test_seeds_are_one_line_in_a_band_and_other_settings_are_not(tmp_path):
    runs = [read(tmp_path / "a.jsonl", seed=1), read(tmp_path / "b.jsonl", seed=2, shift=0.5),
            read(tmp_path / "c.jsonl", seed=3, shift=1, steps=(1, 3)), read(tmp_path / "d.jsonl", lr=0.04),
            read(tmp_path / "e.jsonl", data="x" * 60)]
    groups = plot.groups_of(runs)
    first = "DATA_PATH=a/set MATRIX_LR=0.02, 3 runs"
    assert {label: [run.name for run in members] for label, members in groups.items()} == {
        first: ["a", "b", "c"], "DATA_PATH=a/set MATRIX_LR=0.04": ["d"], "e": ["e"]}
    at, values = plot.band(groups[first], "train", "tokens", "loss")  # up to the last step that all have, interpolated
    assert at.tolist() == pytest.approx([0.001, 0.002, 0.003])
    assert values.tolist() == [[4, 3, 2], [4.5, 3.5, 2.5], [5, 4, 3]]


def test_another_script_another_text_and_an_equal_seed_are_no_seeds_of_one_line(tmp_path):
    changes = {"a": {}, "b": {"seed": 2}, "_c$": {"seed": 2}, "code": {"code": "b"}, "data": {"digest": "y"}}
    runs = [read(tmp_path / f"{name}.jsonl", **change) for name, change in changes.items()]
    groups = plot.groups_of(runs)
    assert [[member.name for member in members] for members in groups.values()] == [["a", "b"], ["_c$"], ["code"], ["data"]]
    assert list(groups) == ["a, 2 runs", r"run _c\$", "code", "data"]


def test_a_resumed_run_begins_with_its_older_log(tmp_path):
    write_log(tmp_path / "run.1767225600000000000.jsonl", steps=(1, 2, 3, 4, 5, 7), final=False, shift=9)
    write_log(tmp_path / "run.05.jsonl", final=False, shift=90)  # of the run "run.05"
    run = read(tmp_path / "run.jsonl", steps=(4, 5, 6), resume=3)
    assert plot.curve(run, "train", "step", "loss").tolist() == [[1, 2, 3, 4, 5, 6], [13, 12, 11, 1, 0, -1]]
    again = {"event": "val", "step": 2, "val_loss": 7, "val_bpb": 7, "train_time_ms": 2000}  # validated again on resuming
    write_lines(write_log(tmp_path / "run.jsonl", steps=(3, 4), resume=2), again, append=True)
    run = plot.read_run(str(tmp_path / "run.jsonl"))
    assert plot.curve(run, "val", "step", "loss").tolist() == [[2, 4], [7, 2]]
    run = read(tmp_path / "run.jsonl", steps=(1, 2))  # without RESUME, the older log is another run's
    assert plot.curve(run, "train", "step", "loss")[0].tolist() == [1, 2]


def test_a_picture_has_the_name_of_the_first_run_or_the_format_of_its_ending(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    runs = [write_log(tmp_path / f"{number}.jsonl", lr=number) for number in range(3)]
    for name, start, more in (("0.png", b"\x89PNG", []), ("a.pdf", b"%PDF", ["--out", tmp_path / "a.pdf"]),
                              ("a.svg", b"<?xml", ["--out", tmp_path / "a.svg"])):
        run_script(monkeypatch, plot, *runs, *more)
        assert (tmp_path / name).read_bytes().startswith(start) and capsys.readouterr().out == f"{tmp_path / name}\n"


@pytest.mark.parametrize("changes, panels", [
    ([{}], [("step", "loss")]), ([{}, {"seed": 2}], [("step", "loss")]),
    ([{}, {"lr": 1}], [("step", "loss"), ("seconds", "loss"), ("step", "val_bpb"), ("seconds", "val_bpb")]),
    ([{}, {"data": "other"}], [("step", "val_bpb"), ("seconds", "val_bpb")]),
    ([{}, {"data": "other", "batch": 2000}], [("tokens", "val_bpb"), ("seconds", "val_bpb")])])
def test_one_line_has_one_panel_and_losses_of_other_texts_are_not_compared(tmp_path, changes, panels):
    runs = [read(tmp_path / f"{i}.jsonl", **more) for i, more in enumerate(changes)]
    assert plot.panels_of(plot.groups_of(runs)) == panels


@pytest.mark.parametrize("content, wanted", [
    ('{"event": "config", "config": {}}\n', "has no steps yet"), ("step:1/2 train_loss:3\n" * 2, "is not a .jsonl log"),
    ('{"event": "train", "step": 1}\n', "is not a .jsonl log")])
def test_other_files_are_named(tmp_path, monkeypatch, content, wanted):
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(SystemExit, match=f"plot.py: .*x.jsonl.*{wanted}"):
        run_script(monkeypatch, plot, tmp_path / "x.jsonl")


def test_a_growing_log_is_followed_through_a_resume_to_its_final_score(tmp_path, monkeypatch):
    """With a stand-in for the client, which notes what it is sent."""
    start, sent, client = {"event": "config", "config": {"NUM_LAYERS": 2}, "elapsed_s": 1.0}, [], Mock()
    client.init.return_value.log = lambda row, step: sent.append(row)
    client.init.return_value.finish = lambda: sent.append("finished")

    def train(step):
        return {"event": "train", "step": step, "train_loss": 5.0 - step, "grad_norm": None}

    monkeypatch.setitem(sys.modules, "wandb", client)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "logs" / "run.jsonl"
    path.parent.mkdir()
    write_lines(path, start, train(1))

    def resumed():
        path.rename(path.with_name(f"run.{10 ** 18}.jsonl"))  # as the trainer does
        write_lines(path, start, {"event": "resume", "step": 2}, train(3))

    parts = iter([lambda: write_lines(path, train(2), train(3), append=True), resumed,
                  lambda: write_lines(path, {"event": "final", "step": 3, "val_loss": 3.0}, append=True)])
    monkeypatch.setattr(track.time, "sleep", lambda seconds: next(parts)())
    wanted = [{"train/step": step, "train/train_loss": 5.0 - step, "step": step} for step in (1, 2, 3)]
    wanted += [{"final/step": 3, "final/val_loss": 3.0, "step": 3}, "finished"]
    run_script(monkeypatch, track, "wandb", "run", "--once")  # also after a run that was killed
    assert sent.pop() == "finished" and [row["step"] for row in sent] == [1]
    client.init.assert_called_with(project="train_gpt", name="run", config={"NUM_LAYERS": 2})
    for _ in range(2):  # while it trains, and afterwards
        sent.clear()
        run_script(monkeypatch, track, "wandb", "run")
        assert sent == wanted
    assert next(parts, None) is None
