"""tools/plot.py, events.py, track.py and common.py: what they read from logs, how runs are compared, what a tracker is sent."""

import io
import json
import os
import re
import runpy
import shutil
import signal
import sys
import time
import tracemalloc
from hashlib import sha256
from pathlib import Path
from unittest.mock import Mock

import common
import events
import numpy as np
import plot
import pytest
import track
from conftest import REPOSITORY, make_shards, run_here, run_script, run_trainer, tiny_arguments
from settings import pairs_of


def write_lines(path, *events, append=False):
    with path.open("a" if append else "w") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def write_log(path, seed=1, lr=0.02, steps=(1, 2, 3, 4), resume=None, final=True, shift=0.0, data="a/set", batch=1000,
              code="a", digest="x", overrides=(), dtype="float32", scores=None, epoch=1):
    settings = {"SEED": seed, "RUN_ID": path.stem, "MATRIX_LR": lr, "TRAIN_BATCH_TOKENS": batch, "DATA_PATH": data,
                "OUT_DIR": "out", "DTYPE": dtype, "NUM_LAYERS": 1, "MODEL_DIM": 8, "NUM_HEADS": 2, "NUM_KV_HEADS": 1,
                "MLP_MULT": 2, "VOCAB_SIZE": 10, "TRAIN_SEQ_LEN": 16}
    events = [{"event": "config", "data_sha256": digest, "config": settings, "overrides": dict(overrides), "gpu": "NVIDIA L4",
               "world_size": 2}]
    if resume is not None:
        events.append({"event": "resume", "step": resume})
    for step, score in (scores or {}).items():
        events.append({"event": "val", "step": step, "val_loss": score, "val_bpb": score + shift, "train_time_ms": 900 * step})
    for step in steps:
        events.append({"event": "train", "step": step, "train_loss": 5 - step + shift, "train_time_ms": 1000 * step,
                       "epoch": epoch, "tok_per_sec": 1_000_000 + step})
        if step % 2 == 0 and not scores:
            events.append({"event": "val", "step": step, "val_loss": 4 - step / 2 + shift, "val_bpb": 2 - step / 4,
                           "train_time_ms": 1000 * step})
    if final:
        events += [{"event": "export", "code_sha256": code, "artifact_bytes": 900, "code_bytes": 100},
                   {"event": "final", "step": steps[-1], "val_loss": 2.01, "val_bpb": 1.01}]
    write_lines(path, *events)
    return path


def read(path, **changes):
    return plot.read_run(write_log(path, **changes))


def test_runs_are_named_by_what_they_are(tmp_path):
    """Seeds of one script and one text are one group, named by what differs; a single one by its preset and what was given."""
    given = {"MLP_MULT": ["3", "@records/presets/quick.env"], "DATA_PATH": ["a/set", "argument"], "SEED": ["1", "argument"],
             "MATRIX_LR": ["0.02", "environment"], "VOCAB_SIZE": ["9", "manifest"]}
    one = read(tmp_path / "a.jsonl", overrides=given)
    assert list(plot.groups_of([one])) == ["preset quick, set, MATRIX_LR=0.02"]
    runs = [one, read(tmp_path / "b.jsonl", seed=2), read(tmp_path / "c.jsonl", lr=0.04), read(tmp_path / "d.jsonl", data="y$")]
    groups = plot.groups_of(runs)
    assert {label: [Path(run.name).name for run in members] for label, members in groups.items()} == {
        "preset quick, set, MATRIX_LR=0.02, 2 seeds": ["a", "b"], "set, MATRIX_LR=0.04": ["c"], r"y\$, MATRIX_LR=0.02": ["d"]}
    record = tmp_path / "2026-01-31_Two_Lanes"
    record.mkdir()
    seeds = [read(record / f"train_seed{seed}.jsonl", seed=seed, lr=1) for seed in (1, 2, 3)]
    assert list(plot.groups_of([*seeds, one])) == ["Two_Lanes, 3 seeds", "preset quick, MATRIX_LR=0.02"]
    long = [read(tmp_path / f"e{lr}.jsonl", data="x" * 80, lr=lr, overrides={"MATRIX_LR": [lr, "argument"]}, dtype="y" * lr)
            for lr in (180, 181)]
    assert [label[:13] for label in plot.groups_of(long)] == ["MATRIX_LR=180", "MATRIX_LR=181"]
    assert list(plot.groups_of(long[:1])) == ["x" * 80 + ", MATRIX_LR=180"]


def test_another_script_another_text_and_an_equal_seed_are_no_seeds_of_one_group(tmp_path):
    changes = {"a": {}, "b": {"seed": 2}, "c": {"seed": 2}, "code": {"code": "b"}, "data": {"digest": "y"}}
    runs = [read(tmp_path / f"{name}.jsonl", **change) for name, change in changes.items()]
    groups = plot.groups_of(runs)
    assert [[Path(run.name).name for run in members] for members in groups.values()] == [["a", "b"], ["c"], ["code"], ["data"]]
    assert list(groups) == [f"set ({tmp_path}/a), 2 seeds", *(f"set ({tmp_path}/{name})" for name in ("c", "code", "data"))]


def test_nothing_is_drawn_that_was_not_measured(tmp_path):
    """A mean is of steps that all seeds validated and of their ends; no line leads over the first tenth of a run."""
    runs = [read(tmp_path / "a.jsonl", steps=(1, 400), scores={0: 9, 40: 5, 100: 4, 300: 3, 400: 2}),
            read(tmp_path / "b.jsonl", steps=(1, 300), seed=2, scores={0: 9, 100: 3, 200: 2.5, 300: 1})]
    assert plot.mean_curve(runs, "step") == {0: (0, 9), 100: (100, 3.5), 300: (300, 2), 400: (350, 1.5)}
    assert plot.mean_curve(runs, "seconds")[400] == pytest.approx((315, 1.5))
    lines = list(plot.lines_of(runs, "step", "val_bpb"))
    assert [style for style, _ in lines] == [*["validation of one seed", "score of the compressed model"] * 2, "mean of the seeds"]
    early, late = (points for style, points in lines if style == "validation of one seed")
    assert early[0].tolist() == [0, 40, 100, 300, 400]
    assert late[0].tolist()[0] == 0 and np.isnan(late[:, 1]).all() and late[0].tolist()[2:] == [100, 200, 300]
    killed = read(tmp_path / "c.jsonl", seed=3, scores={0: 9, 100: 3}, final=False)
    assert list(plot.mean_curve([*runs, killed], "step")) == [0, 100]


def test_a_resumed_run_begins_with_its_older_log(tmp_path):
    write_log(tmp_path / "run.1767225600000000000.jsonl", steps=(1, 2, 3, 4, 5, 7), final=False, shift=9)
    write_log(tmp_path / "run.20260131093000.jsonl", final=False, shift=90)  # of a run that is named so
    run = read(tmp_path / "run.jsonl", steps=(4, 5, 6), resume=3)
    assert [*plot.curve(run, "step", "train_loss").values()] == [(1, 13), (2, 12), (3, 11), (4, 1), (5, 0), (6, -1)]
    again = {"event": "val", "step": 2, "val_loss": 7, "val_bpb": 7, "train_time_ms": 2000}  # validated again on resuming
    write_lines(write_log(tmp_path / "run.jsonl", steps=(3, 4), resume=2), again, append=True)
    run = plot.read_run(tmp_path / "run.jsonl")
    assert plot.curve(run, "seconds", "val_bpb") == {2: (2, 7), 4: (4, 1)}
    run = read(tmp_path / "run.jsonl", steps=(1, 2))  # without RESUME, the older log is another run's
    assert list(plot.curve(run, "step", "train_loss")) == [1, 2]


def test_a_picture_has_the_name_of_the_run_or_the_format_of_its_ending(tmp_path, monkeypatch, capsys):
    matplotlib = pytest.importorskip("matplotlib")
    runs = [write_log(tmp_path / f"{number}.jsonl", lr=number) for number in range(3)]
    run_script(monkeypatch, plot, runs[0])
    assert capsys.readouterr().out == f"{tmp_path / '0.png'}\n"
    for name, start, more in (("compared.png", b"\x89PNG", []), ("a.pdf", b"%PDF", ["--out", tmp_path / "a.pdf"]),
                              ("a.svg", b"<?xml", ["--out", tmp_path / "a.svg"])):
        run_script(monkeypatch, plot, *runs, *more)
        assert (tmp_path / name).read_bytes().startswith(start) and capsys.readouterr().out == f"{tmp_path / name}\n"
    with matplotlib.rc_context({"text.usetex": True}):  # as a matplotlibrc may say; LaTeX may be missing
        run_script(monkeypatch, plot, *runs, "--out", tmp_path / "plain")
    assert capsys.readouterr().out == f"{tmp_path / 'plain.png'}\n"
    (tmp_path / "submission.json").touch()  # a record's folder has no room for it
    monkeypatch.chdir(tmp_path)
    run_script(monkeypatch, plot, *runs)
    assert capsys.readouterr().out == "logs/compared.png\n" and (tmp_path / "logs" / "compared.png").exists()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=f"run: {events.interpreter()} -m pip install matplotlib"):
        run_script(monkeypatch, plot, *runs)


@pytest.mark.parametrize("changes, rows, columns", [
    ([{"epoch": 9, "scores": {2: 1, 4: 3}}], ["val_bpb", "train_loss"], ["step"]), ([{}, {"seed": 2}], ["val_bpb", "train_loss"], ["step"]),
    ([{}, {"lr": 1}], ["val_bpb", "train_loss"], ["step", "seconds"]), ([{}, {"data": "b"}], ["val_bpb"], ["step", "seconds"]),
    ([{"steps": (1,)}], ["train_loss"], ["step"]), ([{"steps": (), "scores": {0: 2}, "final": False}], ["val_bpb"], ["step"]),
    ([{"lr": number} for number in range(11)], ["val_bpb", "train_loss"], ["step", "seconds"]),
    ([{}, {"data": "b", "batch": 2000}], ["val_bpb"], ["tokens", "seconds"])])
def test_each_mark_has_a_legend_and_losses_of_other_texts_are_not_compared(tmp_path, monkeypatch, changes, rows, columns):
    groups = plot.groups_of([read(tmp_path / f"{i}.jsonl", **more) for i, more in enumerate(changes)])
    assert plot.panels_of(groups) == (rows, columns)
    texts, open_figure = [], pytest.importorskip("matplotlib.figure").Figure

    class Seen(open_figure):
        def legend(self, handles, labels, **more):
            texts.extend(labels)
            return super().legend(handles, labels, **more)

    monkeypatch.setattr("matplotlib.figure.Figure", Seen)
    plot.draw(groups, tmp_path / "x.png")
    marks = {style for members in groups.values() for y in rows for style, points in plot.lines_of(members, columns[0], y)}
    marks |= {"lowest validation"} if changes[0].get("epoch") else set()
    assert marks == set(texts) & set(plot.STYLES)
    assert len(texts) == len(marks) + (len(groups) if len(groups) > 1 else 0)


@pytest.mark.parametrize("steps, scores, titles, training", [
    (range(1, 81), {0: 4.56, 20: 2, 40: 1.5, 80: 1}, ["not shown: 4.56 at the beginning"], ["training loss of single steps", "moving mean of the training loss"]),
    (range(1, 81), {0: 4.56, 1: 4, 20: 2, 40: 1.5, 80: 1}, ["not shown: 4.00 to 4.56 at the beginning"], ["training loss of single steps", "moving mean of the training loss"]),
    ((1, 2, 3), {0: 4.56, 3: 1}, [], ["training loss"])])
def test_a_picture_says_which_dots_it_leaves_out_and_a_short_run_has_no_moving_mean(tmp_path, monkeypatch, steps, scores, titles, training):
    run, seen = read(tmp_path / "a.jsonl", steps=steps, scores=scores), []
    assert [style for style, _ in plot.lines_of([run], "step", "train_loss")] == training
    axes = pytest.importorskip("matplotlib.axes").Axes
    monkeypatch.setattr(axes, "set_title", lambda axes, title, **more: seen.append(title))
    plot.draw(plot.groups_of([run]), tmp_path / "a.png")
    assert seen == titles


def test_a_log_is_found_by_its_run_or_path_and_without_a_name_it_is_the_newest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    with pytest.raises(SystemExit, match="plot.py: there is no run in logs/ yet"):
        run_script(monkeypatch, plot)
    for time_s, name in enumerate(("old", "wd0.05", "new.1767225600000000000", "new")):
        path = write_log(tmp_path / "logs" / f"{name}.jsonl")
        os.utime(path, (time_s, time_s))
    for name in ("", "new", "logs/new.jsonl", "logs/new.txt"):
        assert events.find_log(name) == Path("logs/new.jsonl")
    assert events.find_log("wd0.05").is_file()
    Path("logs", "dead.jsonl").symlink_to("nowhere")
    for name in ("input.txt", "a.jsonl", "b.log"):  # named after a text
        Path(name).touch()
        path = write_log(Path("logs", f"{name}.jsonl"))
        assert events.find_log(name) == events.find_log(str(path)) == path
        path.unlink()
    for script, words in ((plot, []), (events, []), (track, ["wandb"])):
        for name in ("nosuch", "logs/nosuch.txt"):
            message = rf"^{script.__name__}.py: '{name}' is neither a file nor a RUN_ID in logs/; there are: new, wd0.05, old$"
            with pytest.raises(SystemExit, match=message):
                run_script(monkeypatch, script, *words, name)
    run_script(monkeypatch, plot)
    assert (tmp_path / "logs" / "new.png").is_file()


def test_a_summary_names_the_best_validation_and_the_next_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.setattr(events, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    for folder in ("logs", "out"):
        Path(folder).mkdir()
    Path("out", events.MODEL_FILE).touch()

    def summary(**changes):
        return events.summarize(write_log(Path("logs", "a b.jsonl"), **changes))

    plain = summary()
    assert "\nbest" not in plain
    assert "1,000,004 tokens/s, 0.0047 TFLOP/s (0.00317 without attention)\n" in plain  # as test_bench.py counts
    assert "% of the peak of 2x NVIDIA L4\n" in summary(dtype="bfloat16")
    lines = plain.partition("\nnext      ")[2].splitlines()
    assert lines[0] == ".venv/bin/python tools/sample.py 'a b' --interactive"
    assert "python train_gpt.py --help" in lines[2] and len(lines) == 3
    assert ".venv/bin/python data/prepare.py FOLDER" in summary(data="fineweb10B_sp1024")
    assert "\nbest      1.0000 bits per byte, at step 2; the model is that of the last step, 4, with 3.0000\n" in summary(
        scores={0: 9, 2: 1, 4: 3})
    quick = {"data": "x/sotu_sp1024", "overrides": {"MLP_MULT": ["3", "@records/presets/quick.env"]}}
    assert "/run.sh --preset cpu_1mb_avx2 " in summary(**quick) and "--preset cpu_1mb " in summary(**quick, dtype="bfloat16")
    assert "--preset cpu_1mb_avx2 'DATA_PATH=my texts'    # ten minutes" in summary(**{**quick, "data": "my texts"})
    for found, wanted in ((None, ".venv/bin/python -m pip install matplotlib && .venv/bin/python tools/plot.py 'a b' "),
                          (1, "          .venv/bin/python tools/plot.py 'a b' ")):
        monkeypatch.setattr(events, "find_spec", lambda name: found)
        assert wanted in summary()


def test_a_run_is_repeated_or_continued_with_its_files_and_in_its_folder(tmp_path, monkeypatch):
    """run.sh takes one preset of the repository, and works in the repository's folder."""
    monkeypatch.setattr(events, "ROOT", tmp_path)
    preset, more, own, elsewhere = "@records/presets/cpu_1mb.env", "@records/presets/rehearsal.env", "@ideas/quick.env", tmp_path / "exp"
    saved = {"event": "checkpoint", "step": 4, "file": "a_00000004.pt"}
    for folder in (tmp_path, elsewhere):
        for name in ("logs", "out/checkpoints"):
            (folder / name).mkdir(parents=True)
        (folder / "out" / "checkpoints" / saved["file"]).touch()

    def first_command(folder, *files, log=Path("logs", "a.jsonl"), then=()):
        monkeypatch.chdir(folder)
        overrides = dict(zip(("MLP_MULT", "MODEL_DIM"), (["8", file] for file in files)))
        overrides |= {"SEED": ["7", "argument"], "DATA_PATH": ["my texts", "environment"]}
        write_lines(write_log(log, final=False, overrides=overrides), *then, append=True)
        return events.summarize(log).partition("\nnext         ")[2].partition("    #")[0]

    assert first_command(tmp_path, preset) == "./run.sh --preset cpu_1mb 'DATA_PATH=my texts'"
    for files, words in (((), ""), ((own,), f"{own} "), ((more,), f"{more} "), ((preset, more), "MLP_MULT=8 MODEL_DIM=8 ")):
        assert first_command(tmp_path, *files).endswith(f" --nproc_per_node=2 train_gpt.py {words}'DATA_PATH=my texts'")
    resumed = {"event": "resume", "step": 4, "file": "out/checkpoints/a_00000004.pt"}  # and killed before the next checkpoint
    for event in (saved, resumed):
        assert first_command(tmp_path, own, then=[event]) == "./run.sh 'DATA_PATH=my texts' RUN_ID=a RESUME=auto"
    there = f" {tmp_path}/train_gpt.py {preset} 'DATA_PATH=my texts'"
    assert first_command(elsewhere, preset).endswith(there)
    assert first_command(elsewhere, preset, then=[saved]).endswith(f"{there} SEED=7 RUN_ID=a RESUME=auto")
    in_root = first_command(elsewhere, preset, log=tmp_path / "logs" / "a.jsonl")
    assert in_root == f"{tmp_path}/run.sh --preset cpu_1mb 'DATA_PATH=my texts'"
    (tmp_path / "logs" / "a" / "checkpoints").mkdir(parents=True)
    (tmp_path / "logs" / "a" / "checkpoints" / saved["file"]).touch()
    in_root = first_command(tmp_path.parent, preset, log=tmp_path / "logs" / "a.jsonl", then=[saved])
    assert in_root == f"{tmp_path.name}/run.sh 'DATA_PATH=my texts' RUN_ID=a RESUME=auto"


def test_a_run_that_was_stopped_after_its_export_has_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("logs", "out/checkpoints"):
        Path(folder).mkdir(parents=True)
    log, model, checkpoint = Path("logs", "a.jsonl"), Path("out", events.MODEL_FILE), Path("out", "checkpoints", "a_00000004.pt")
    model.write_bytes(b"model")
    export = {"event": "export", "step": 4, "artifact_sha256": sha256(b"model").hexdigest()}
    write_lines(write_log(log, final=False), export, append=True)
    summary = events.summarize(log)
    assert f"checkpoint   there is none, but the model is saved: {model}\n" in summary and "# again" not in summary
    assert f" ITERATIONS=0 INIT_FROM={model}    # score its model\n" in summary and "sample.py a --interactive\n" in summary
    model.write_bytes(b"another run's")
    assert "# again" in events.summarize(log) and "sample.py" not in events.summarize(log)
    checkpoint.touch()
    write_lines(log, {"event": "checkpoint", "step": 4, "file": checkpoint.name}, append=True)
    assert "RESUME=auto    # continue" in events.summarize(log) and f"sample.py {checkpoint} " in events.summarize(log)


START = '{"event": "config", "config": {"SEED": 1, "TRAIN_BATCH_TOKENS": 2}}\n'
@pytest.mark.parametrize("content, wanted", [
    (START, "has no steps yet"), ("step:1/2 train_loss:3\n" * 2, "its line 1 is no event"), ("", "is empty: the run has not begun"),
    ('{"event": "train", "step": 1}\n', 'begins with "train", not with the settings'), (START[:30], "is empty"), (START + "5\n" * 2, "line 2 is no"),
    ('{"event": "config"}\n', 'begins with "config", not with the settings'), (START + '{"event": []}\n' * 2, "its line 2 is no event"),
    (START + '{"event": "train"}\n', "its events lack train.step"), (START.replace("SEED", "SEE"), "its events lack SEED"),
    (START + '{"event": "tra\n{"event": "val"}\n', "its line 2 is no event; delete that line")])
def test_other_files_are_named(tmp_path, monkeypatch, content, wanted):
    """By each script; those that need less of a log than plot.py may take it."""
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(SystemExit, match=f"plot.py: .*x.jsonl.*{wanted}"):
        run_script(monkeypatch, plot, tmp_path / "x.jsonl")
    for script, words in ((events, []), (track, ["wandb"])) if "line" in wanted or "empty" in wanted or "settings" in wanted else ():
        with pytest.raises(SystemExit, match=f"{script.__name__}.py: .*x.jsonl.*{wanted}"):
            run_script(monkeypatch, script, *words, tmp_path / "x.jsonl")


def test_a_long_run_is_read_in_little_memory_and_drawn_in_little_time(tmp_path):
    log = write_log(tmp_path / "a.jsonl", steps=range(20_000), scores={1: 2, 3: 1})
    tracemalloc.start()
    assert "19,999 steps in 3 s" in events.summarize(log) and tracemalloc.get_traced_memory()[1] < 3_000_000
    tracemalloc.stop()
    values, started = np.random.default_rng(0).random(500_000), time.process_time()
    means, ends = plot.smooth(values), (1, 2, 24_999, 25_001, 500_000)
    assert time.process_time() - started < 2  # not the square
    assert means[np.subtract(ends, 1)] == pytest.approx([values[max(0, end - 25_000):end].mean() for end in ends], rel=1e-12)


def test_each_script_has_help_and_any_name_on_any_terminal(monkeypatch, capsys, tmp_path):
    ended = set()  # scripts that end with the reader of their output, which would also end these tests
    monkeypatch.setattr(signal, "signal", lambda number, _: number == signal.SIGPIPE and ended.add(Path(sys.argv[0]).stem))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    for script in sorted(REPOSITORY.glob("tools/*.py")):
        if "\ndef main(" not in script.read_text(encoding="utf-8"):  # Others import it.
            continue
        monkeypatch.setattr(sys, "argv", [script.name, "--help"])
        with pytest.raises(SystemExit, match="^0$"):
            runpy.run_path(str(script), run_name="__main__")
        assert capsys.readouterr().out.startswith(f"usage: {'run.sh' if script.stem == 'start' else script.name}"), script
    assert "events" in ended and not ended & {"ablate", "bench", "ladder", "loop", "start", "track"}  # Others depend on these.
    log = write_log(tmp_path / os.fsdecode(b"caf\xe9.jsonl"), data=os.fsdecode(b"caf\xe9"), final=False)
    result = run_trainer(tmp_path, log, script=events.__file__, environment={"PYTHONIOENCODING": "ascii:strict"})
    assert r"caf\udce9.jsonl: the run has not ended" in result.stdout and result.returncode == 0, result


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


def test_a_tracker_that_fails_or_is_stopped_leaves_no_traceback(tmp_path, monkeypatch):
    client, log = Mock(), write_log(tmp_path / "run.jsonl")
    monkeypatch.setitem(sys.modules, "wandb", client)
    for function, message in ((client.init.return_value.log, "No space left on device"), (client.init, "api_key not configured")):
        function.side_effect = RuntimeError(message)
        with pytest.raises(SystemExit, match=f"^track.py: {message}$"):
            run_script(monkeypatch, track, "wandb", log)
    (tmp_path / "wandb.py").write_text("raise KeyboardInterrupt")  # Ctrl-C while it is loaded
    result = run_trainer(tmp_path, "wandb", log, script=track.__file__, environment={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 1 and result.stderr == "track.py: stopped\n"


def test_runs_that_have_finished_are_told_from_others(tmp_path, monkeypatch):
    make_shards(tmp_path)
    shutil.copy(REPOSITORY / "train_gpt.py", tmp_path)
    arguments = tiny_arguments("tiny", RUN_ID="run", OUT_DIR="logs/run")
    run_here(monkeypatch, tmp_path, *arguments)
    settings = pairs_of(arguments)
    assert common.has_finished(tmp_path, "run", settings, 1)
    assert not common.has_finished(tmp_path, "run", {**settings, "MATRIX_LR": "1"}, 1)
    assert not common.has_finished(tmp_path, "run", settings, 2)
    assert not common.has_finished(tmp_path, "other", settings, 1)
    log = tmp_path / "logs" / "run.jsonl"
    infinite = re.sub('("final".*"val_bpb": )[^,]*', r"\1null", log.read_text())
    for path, other in ((log, log.read_text()[:-30]), (log, ""), (log, infinite), (tmp_path / "train_gpt.py", "another script")):
        text = path.read_text()
        path.write_text(other)
        assert not common.has_finished(tmp_path, "run", settings, 1)
        path.write_text(text)
    more = tiny_arguments("tiny", RUN_ID="more", OUT_DIR="logs/more", INIT_FROM="logs/run/final_model.int8.ptz")
    run_here(monkeypatch, tmp_path, *more)
    assert common.has_finished(tmp_path, "more", pairs_of(more), 1)


def test_a_score_that_is_not_finite_or_above_the_cap_is_said(tmp_path, capsys, monkeypatch):
    path = write_log(tmp_path / "run.jsonl", final=False)
    write_lines(path, {"event": "nonfinite", "step": 5}, append=True)
    assert "run.jsonl: the run has diverged: lower its rates or set GRAD_CLIP_NORM=1; its last event is of step 5\n" in events.summarize(path)
    lines = write_log(path).read_text()
    for old, new, said in (('"val_bpb": [^,}]*', '"val_bpb": null', "final score is not finite"),
                           ('"config": {', '"config": {"SIZE_CAP": 1, ', "bytes of model and code, more than SIZE_CAP=1")):
        path.write_text("\n".join(re.sub(old, new, line) if '"final"' in line or "SIZE" in new else line
                                  for line in lines.splitlines()))
        run_script(monkeypatch, events, path)
        assert said in capsys.readouterr().out


def test_missing_packages_are_installed_from_any_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(common, "find_spec", lambda package: None)
    for folder, file in ((REPOSITORY, "requirements-dev.txt"), (tmp_path, REPOSITORY / "requirements-dev.txt")):
        monkeypatch.chdir(folder)
        with pytest.raises(SystemExit, match="^2$"):
            common.require_packages()
        assert capsys.readouterr().err.endswith(f" -m pip install -r {file}\n")


def test_a_lock_in_a_folder_that_is_a_dead_link_names_its_target(tmp_path):
    (tmp_path / "logs").symlink_to("gone/logs")
    with pytest.raises(FileNotFoundError, match="gone/logs"), common.only_one(tmp_path / "logs" / "x.lock"):
        pass


def test_a_machine_without_the_gpu_of_a_run_is_not_measured(monkeypatch):
    monkeypatch.setattr(common, "measure_tflops", lambda start: 9)
    monkeypatch.setattr(common, "gpu_names", lambda: ["NVIDIA L4"])
    run, rate = {"config": {"DTYPE": "float32", "MODEL_DIM": 8}}, "9 TFLOP/s in float32 at width 8"
    assert common.describe_machine({**run, "gpu": "NVIDIA H100", "world_size": 8}) == "8x NVIDIA H100"
    assert common.describe_machine({**run, "gpu": "NVIDIA L4", "world_size": 1}) == f"1x NVIDIA L4, {rate}"
    assert re.fullmatch(rf"\d+ cores of .*, {rate}", common.describe_machine({**run, "gpu": "", "world_size": 1}))


def test_the_test_of_significance_is_welchs():
    """By hand: means 1.0 and 1.1, variances 1e-4 and 4e-4 of three each; t = -0.1 / sqrt(5e-4 / 3), 2.94 degrees. A
    margin of 0.01 nats per token is 0.005 bits per byte if the loss in nats is twice the bits per byte."""
    pytest.importorskip("scipy")

    def seeds(scores, nats=1.0):
        return [{"val_bpb": x, "val_loss": nats * x} for x in scores]

    ours, theirs = seeds([0.99, 1.0, 1.01]), seeds([1.08, 1.1, 1.12])
    test = common.compare_scores({}, ours, theirs)
    assert test["difference"] == pytest.approx(-0.1) and test["n"] == [3, 3] and test["margin"] == 0
    assert test["p"] == pytest.approx(0.00245, abs=3e-4)
    other = common.compare_scores({"margin_nats": 0.01}, ours, seeds([1.08, 1.1, 1.12], nats=2.0))
    assert other["margin"] == pytest.approx(0.005) and other["p"] > test["p"]
    assert common.compare_scores({}, ours[:1], theirs) is None
