"""Nothing is lost: resuming, signals, steps that are not finite, damaged checkpoints, full disks, ranks that differ."""

import errno
import gc
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import OrderedDict
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import (  # first: it finds the trainer
    REPOSITORY, events, make_shards, one_process, run_here, run_trainer, tiny_arguments, tiny_config, write_shard)
import train_gpt

SHOW_WARNING = warnings.showwarning  # Python's own, before pytest's
DISK_IS_FULL = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))


def tiny_run(monkeypatch, folder, data, **changes):
    """A run in `folder`, in this process; returns its events."""
    folder.mkdir(exist_ok=True)
    settings = {"RUN_ID": "run", "ITERATIONS": 9, "VAL_LOSS_EVERY": 4, **changes}
    run_here(monkeypatch, folder, *tiny_arguments(data, **settings))
    return events(folder, settings["RUN_ID"] or "run")


def at_calls(monkeypatch, owner, name, calls, act):
    """Does `act` before the calls of a function whose numbers, from 1 on, are in `calls`."""
    plain, made = getattr(owner, name), []

    def patched(*arguments):
        made.append(1)
        if len(made) in calls:
            act()
        return plain(*arguments)

    monkeypatch.setattr(owner, name, patched)


def broken_forward(monkeypatch, calls, value=float("nan")):
    """Multiplies the loss of the given calls (from 1 on) of the model in training."""
    count, forward = [0], train_gpt.GPT.forward

    def patched(self, tokens, targets):
        loss = forward(self, tokens, targets)
        count[0] += loss.requires_grad
        return loss * value if loss.requires_grad and count[0] in calls else loss

    monkeypatch.setattr(train_gpt.GPT, "forward", patched)


def losses(log):
    """What was computed in each step, without what depends on the clock."""
    return [(e["event"], e["step"], e.get("train_loss"), e.get("val_loss"), e.get("grad_norm"), e.get("lr"))
            for e in log if e["event"] in ("train", "val")]


def artifacts(folder):
    return [(folder / name).read_bytes() for name in ("final_model.pt", "final_model.int8.ptz")]


def checkpoints(folder):
    return sorted((folder / "checkpoints").glob("*.pt"))


def read_checkpoint(path):
    return train_gpt.find_checkpoint(tiny_config(resume=str(path)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data):
    """The folder of a finished run with checkpoints of steps 3, 6 and 9."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(train_gpt, "KEPT_CHECKPOINTS", 9)
        tiny_run(monkeypatch, folder, data, CHECKPOINT_EVERY=3)
    return folder


@pytest.fixture
def checkpointed(tmp_path, whole):
    """A copy of it that may be damaged."""
    return train_gpt.Path(shutil.copytree(whole, tmp_path / "copy"))


# ---- Resuming ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loader", ["sequential", "shuffled"])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path, monkeypatch, data, loader, capsys):
    """Over the end of an epoch, in step 7. Checkpoints and the warm-up change nothing."""
    settings = dict(LOADER=loader, TRAIN_BATCH_TOKENS=2048, DROPOUT=0.2)
    plain = tiny_run(monkeypatch, tmp_path / "plain", data, **settings)
    monkeypatch.setattr(train_gpt, "KEPT_CHECKPOINTS", 9)
    saved = tiny_run(monkeypatch, tmp_path / "saved", data, **settings, CHECKPOINT_EVERY=4, WARMUP_STEPS=0)
    assert losses(plain) == losses(saved) and artifacts(tmp_path / "plain") == artifacts(tmp_path / "saved")
    assert [e["step"] for e in saved if e["event"] == "checkpoint"] == [4, 8, 9]
    for step in (4, 8):
        path = tmp_path / "saved" / "checkpoints" / f"run_{step:08d}.pt"
        resumed = tiny_run(monkeypatch, tmp_path / str(step), data, **settings, RESUME=path)
        assert losses(resumed) == [entry for entry in losses(plain) if entry[1] > step or entry[:2] == ("val", step)]
        assert artifacts(tmp_path / str(step)) == artifacts(tmp_path / "plain")
        assert f"resumed: step:{step} train_time:" in capsys.readouterr().out
        assert [e["step"] for e in resumed if e["event"] == "checkpoint"] == [9]  # RESUME=auto would not go back


def test_the_newest_readable_checkpoint_is_found_and_damaged_ones_are_named(checkpointed, whole, monkeypatch, data, capsys):
    three, six, nine = checkpoints(checkpointed)
    nine.write_bytes(nine.read_bytes()[:-1])
    damaged = bytearray(six.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    six.write_bytes(damaged)
    for number, path in enumerate((three, six, nine)):  # writing changed the order
        os.utime(path, (number, number))
    with pytest.warns(UserWarning) as notes:
        log = tiny_run(monkeypatch, checkpointed, data, RESUME="auto", RUN_ID="")
    out = capsys.readouterr().err
    assert f"warning: checkpoint {nine.relative_to(checkpointed)} cannot be used: File is not a zip file" in out
    assert f"warning: checkpoint {six.relative_to(checkpointed)} cannot be used" in out
    assert next(e for e in log if e["event"] == "resume")["step"] == 3 and artifacts(checkpointed) == artifacts(whole)
    kept = list((checkpointed / "checkpoints").glob("run_0000000[69].*.pt"))
    assert len(kept) == 2 and not six.exists()  # They were later than the resumed one: set aside.
    told = " ".join(str(note.message) for note in notes)
    assert re.findall(r"logs/run(\.\w+) exists; it is kept as run\.\d+(\.\w+)", told) == [(".txt",) * 2, (".jsonl",) * 2]
    assert read_checkpoint(nine)["step"] == 9  # that of the resumed run's end
    nine.write_bytes(b"PK")
    for name, reason in {nine: "not a zip", "run": "No such file", "final_model.pt": "it has another format"}.items():
        with pytest.raises(SystemExit, match=f"RESUME={name}: no usable checkpoint"):
            tiny_run(monkeypatch, checkpointed, data, RESUME=name)
        assert re.search(f"warning: checkpoint {name} cannot be used: .*{reason}", capsys.readouterr().err)
    for path in (three, six, nine):
        path.write_bytes(b"PK")  # to start anew would delete them
    with pytest.raises(SystemExit, match="RESUME=auto: no usable checkpoint"):
        tiny_run(monkeypatch, checkpointed, data, RESUME="auto", CHECKPOINT_EVERY=1)
    assert {three, six, nine, *kept} == set(checkpoints(checkpointed))


def test_only_the_newest_checkpoints_of_the_run_are_kept(tmp_path, monkeypatch, data):
    """By their steps: a laptop's clock may have been ahead. Another run's name may begin like this one's or match it as a
    pattern."""
    folder, tomorrow = tmp_path / "checkpoints", time.time() + 86400
    for iterations, kept in ((4, [2, 4]), (9, [8, 9])):
        tiny_run(monkeypatch, tmp_path, data, CHECKPOINT_EVERY=2, RUN_ID="lr0", RESUME="auto", ITERATIONS=iterations)
        assert [path.name for path in checkpoints(tmp_path)] == [f"lr0_{step:08d}.pt" for step in kept]
        for path in checkpoints(tmp_path):
            os.utime(path, (tomorrow, tomorrow))
    others = {"lr0_00000008.pt", "lr0_00000009.pt", "lr[01]_20261122_00000009.pt", "b_00000001.pt"}
    for name in ("lr[01]_20261122_00000009.pt", "b_00000001.pt", "lr[01]_00000099.pt"):
        (folder / name).write_bytes(b"x")
    os.utime(folder / "lr[01]_00000099.pt", (tomorrow, tomorrow))
    tiny_run(monkeypatch, tmp_path, data, CHECKPOINT_EVERY=9, RUN_ID="lr[01]")
    names = {re.sub(r"\.\d{19}\.", ".TIME.", path.name) for path in folder.iterdir()}
    assert names == others | {"lr[01]_00000009.pt", "lr[01]_00000099.TIME.pt"}  # of an earlier run, which no RESUME finds


def test_changed_settings_are_refused_by_name_and_harmless_ones_are_not(checkpointed, tmp_path, monkeypatch, data):
    path = checkpoints(checkpointed)[0]
    before = {path: path.read_bytes() for path in checkpointed.rglob("*.*")}

    def refused(wanted, folder=checkpointed, data=data, **changes):
        with pytest.raises(SystemExit, match=wanted + ".*; undo that, or start anew with a new RUN_ID$"):
            tiny_run(monkeypatch, folder, data, **{"RESUME": path, **changes})

    refused("MATRIX_LR was 0.02 and is 0.03; BETA2 was 0.95 and is 0.9", MATRIX_LR=0.03, BETA2=0.9)
    refused("its step is beyond ITERATIONS", ITERATIONS=2)
    refused("its step is beyond ITERATIONS", ITERATIONS=0)  # which reads no training text
    refused("does not fit this run: pieces changed: by data, ranks or GRAD_ACCUM_STEPS", GRAD_ACCUM_STEPS=2)
    other = make_shards(tmp_path)
    write_shard(other / "tiny_train_000002.bin", np.arange(256) % 256)
    refused("does not fit this run: training_tokens, text_sha256 changed: by data, ranks or GRAD_ACCUM_STEPS", data=other)
    assert {path: path.read_bytes() for path in checkpointed.rglob("*.*")} == before  # also the finished run's log
    state = torch.load(path)
    state["config"]["no_such_switch"] = True  # of a script that has one more
    torch.save(state, tmp_path / "newer.pt")
    refused("settings: NO_SUCH_SWITCH is unknown now", RESUME=tmp_path / "newer.pt")
    state["config"] |= {"no_such_switch": False, "ema_decay": 0.9, "num_loops": 0, "loop_end": 1, "loop_at": 0.35}
    torch.save(state, tmp_path / "averaged.pt")  # of an older script, with a switch on that is gone
    refused("settings: EMA_DECAY is unknown now", RESUME=tmp_path / "averaged.pt")
    state["config"]["ema_decay"], state["average"] = 0.0, []
    torch.save(state, tmp_path / "older.pt")
    tiny_run(monkeypatch, tmp_path / "c", data, RESUME=tmp_path / "older.pt", TRAIN_LOG_EVERY=3, VAL_LOSS_EVERY=0,
             RUN_ID="renamed", WARMUP_STEPS=2, CHECKPOINT_EVERY=1)
    assert artifacts(tmp_path / "c") == artifacts(checkpointed)


def test_a_hostile_checkpoint_is_refused_or_harmless(whole, tmp_path, monkeypatch, data):
    state = read_checkpoint(checkpoints(whole)[0])
    name = next(iter(state["model"]))

    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("the pickle ran code",))

    path = tmp_path / "bad_00000003.pt"
    for wanted, changes in (
            ("does not fit this run", {"config": {**state["config"], "seed": torch.zeros(3)}}),
            ("was trained with other settings", {"config": {"run_id": "bad"}}),
            ("cannot be used: ", {"config": 3}),
            (f"size mismatch for {name}", {"model": {**state["model"], name: torch.zeros(3)}}),
            (f"{name}.*expected torch.Tensor", {"model": {**state["model"], name: "text"}}),
            ("Missing key", {"model": {}}), ("does not fit this run", {"model": [1]}),
            ("does not fit this run", {"optimizers": state["optimizers"][:1]}),
            ("does not fit this run", {"optimizers": [{}, {}]}),
            ("does not fit this run", {"step": "three"}), ("does not fit this run", {"step": 2**2000}),
            ("cannot be used: ", {"scaler": Bomb()})):
        torch.save({**state, **changes}, path)
        with pytest.raises(SystemExit, match=wanted):
            tiny_run(monkeypatch, tmp_path / "bad", data, RESUME=path)
    state["model"] = OrderedDict(state["model"])
    assigns = {"assign_to_params_buffers": True}  # the optimizers would keep the tensors before
    state["model"]._metadata = OrderedDict((name.rpartition(".")[0], assigns) for name in ["", *state["model"]])
    torch.save(state, path)
    tiny_run(monkeypatch, tmp_path / "resumed", data, RESUME=path)
    assert artifacts(tmp_path / "resumed") == artifacts(whole)


def test_the_clock_goes_on_and_the_export_can_be_done_again(whole, tmp_path, monkeypatch, data):
    log = tiny_run(monkeypatch, tmp_path / "again", data, RESUME=checkpoints(whole)[-1], VAL_LOSS_EVERY=0)
    assert artifacts(tmp_path / "again") == artifacts(whole)
    assert [e["event"] for e in log] == ["config", "resume", "val", "export", "final"] and log[-1]["step"] == 9
    bare = make_shards(tmp_path)
    for path in bare.glob("*_train_*"):  # an export needs none
        path.unlink()
    tiny_run(monkeypatch, tmp_path / "only", bare, INIT_FROM=checkpoints(whole)[-1], ITERATIONS=0)
    assert artifacts(tmp_path / "only") == artifacts(whole)
    cap = dict(MAX_WALLCLOCK_SECONDS=0.5, ITERATIONS=100000, CHECKPOINT_EVERY=1000, VAL_LOSS_EVERY=0)
    capped = tiny_run(monkeypatch, tmp_path / "capped", data, **cap)
    last_ms = max(e["train_time_ms"] for e in capped if e["event"] == "train")
    log = tiny_run(monkeypatch, tmp_path / "capped", data, **cap, RESUME="auto")
    assert next(e for e in log if e["event"] == "resume")["train_time_ms"] >= last_ms - 1 and last_ms >= 500
    assert not any(e["event"] == "train" for e in log) and log[-1]["step"] == capped[-1]["step"]  # it was reached before


# ---- Signals -----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def heard():
    """As in a terminal, also where the tests run by nohup or in the background, whose processes ignore signals."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_ends_the_run_after_a_step_and_a_checkpoint(tmp_path, monkeypatch, data, capsys, number):
    at_calls(monkeypatch, train_gpt.Trainer, "train_step", {7}, lambda: signal.raise_signal(number))  # the first warms up
    with pytest.raises(SystemExit, match=str(128 + number)):
        tiny_run(monkeypatch, tmp_path, data)
    assert f"stopped: signal {int(number)} after step:6; set RESUME=auto to go on" in capsys.readouterr().out
    assert read_checkpoint(*checkpoints(tmp_path))["step"] == 6


def test_a_signal_that_nohup_ignores_stays_ignored(tmp_path, monkeypatch, data):
    at_calls(monkeypatch, train_gpt.Trainer, "train_step", {7}, lambda: signal.raise_signal(signal.SIGHUP))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert tiny_run(monkeypatch, tmp_path, data)[-1]["event"] == "final"


@pytest.mark.parametrize("call, step", [(1, 0), (2, 4), (4, 9)])  # the last is in the export, which ends with its files
def test_a_signal_in_a_validation_ends_the_run_before_the_next_step(tmp_path, monkeypatch, data, whole, call, step):
    at_calls(monkeypatch, train_gpt.Validation, "score", {call}, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit, match="143"):
        tiny_run(monkeypatch, tmp_path, data)
    log = events(tmp_path, "run")
    assert [e["step"] for e in log if e["event"] == "train"] == list(range(1, step + 1))
    assert [path.stem for path in checkpoints(tmp_path)] == [f"run_{step:08d}"] * (step == 4)
    hint = "set RESUME=auto to go on" if step == 4 else "there is no checkpoint"
    assert f"stopped: signal 15 after step:{step}; {hint}" in (tmp_path / "logs" / "run.txt").read_text()
    assert (log[-1]["event"] == "export") == (step == 9) and (step < 9 or artifacts(tmp_path) == artifacts(whole))


def test_a_step_is_saved_once_where_a_signal_comes_in_its_validation(tmp_path, monkeypatch, data):
    at_calls(monkeypatch, train_gpt.Validation, "score", {2}, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit, match="143"):
        tiny_run(monkeypatch, tmp_path, data, CHECKPOINT_EVERY=4)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["run_00000004.pt"]


def test_a_signal_is_heard_where_the_terminal_is_closed(monkeypatch):
    """As that of `2>&1 | tee`, which a Ctrl-C ends first."""
    clock, write = train_gpt.Clock(tiny_config(), one_process()), Mock(side_effect=BrokenPipeError)
    monkeypatch.setattr(os, "write", write)
    clock.on_signal(signal.SIGHUP, None)
    assert write.called and clock.signal == signal.SIGHUP


@pytest.mark.parametrize("name, call", [("__init__", 1), ("score", 5)])  # before the training; the final scores
def test_ctrl_c_outside_the_training_is_one_sentence(tmp_path, monkeypatch, data, capsys, name, call):
    at_calls(monkeypatch, train_gpt.Validation, name, {call}, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit, match="^130$"):
        tiny_run(monkeypatch, tmp_path, data)
    assert capsys.readouterr().err == "train_gpt.py: stopped\n"


@pytest.mark.parametrize("number, wanted", [
    (signal.SIGINT, "stopped while compiling"), (0, "COMPILE=blocks failed: RuntimeError: no gcc; try 0")])
def test_what_ended_the_compiling_is_said(monkeypatch, number, wanted):
    """In a terminal, Ctrl-C also ends g++. A process that compiles for a GPU sends its whole traceback."""
    trainer = train_gpt.Trainer(tiny_config(compile="blocks"), one_process())
    trainer.clock.signal = number
    error = torch._dynamo.exc.TorchDynamoException("SubprocException:\nTraceback:\n  File 'x'\nRuntimeError: no gcc\n")
    monkeypatch.setattr(train_gpt.GPT, "forward", Mock(side_effect=error))
    with pytest.raises(ValueError, match=f"^{wanted}$"):
        train_gpt.compile_model(trainer, Mock(**{"batches.return_value": [(None, None)]}))


def test_saving_the_model_is_no_training(tmp_path, monkeypatch, data):
    at_calls(monkeypatch, train_gpt, "write_whole", {1}, lambda: time.sleep(0.3))
    log = tiny_run(monkeypatch, tmp_path, data, ITERATIONS=0)
    assert next(event for event in log if event["event"] == "val")["train_time_ms"] < 200


# ---- Nothing of an earlier run is lost or mistaken -----------------------------------------------------------


def test_an_earlier_run_of_the_same_name_is_neither_resumed_nor_deleted(tmp_path, monkeypatch, data):
    """Nor is what follows an older checkpoint, after a return to it."""
    tiny_run(monkeypatch, tmp_path, data, CHECKPOINT_EVERY=2, SEED=2)
    first = {path.read_bytes() for path in tmp_path.rglob("*.p*") if "cache" not in str(path)}
    tiny_run(monkeypatch, tmp_path, data, CHECKPOINT_EVERY=2, ITERATIONS=4)
    assert [path.stem for path in checkpoints(tmp_path) if path.stem.count(".") == 0] == ["run_00000002", "run_00000004"]
    assert first <= {path.read_bytes() for path in tmp_path.rglob("*.p*")}
    two = tmp_path / "checkpoints" / "run_00000002.pt"
    tiny_run(monkeypatch, tmp_path, data, RESUME=two, CHECKPOINT_EVERY=1, ITERATIONS=3)
    log = tiny_run(monkeypatch, tmp_path, data, RESUME="auto", ITERATIONS=5)
    assert next(e for e in log if e["event"] == "resume")["step"] == 3


def test_a_resume_says_what_it_finds_and_removes_what_a_kill_left(tmp_path, monkeypatch, data, capsys):
    tiny_run(monkeypatch, tmp_path, data, RESUME="auto", CHECKPOINT_EVERY=3)
    assert "RESUME=auto finds no checkpoint; starting at step 0" in capsys.readouterr().out
    left = tmp_path / "checkpoints" / "run_00000007.pt.tmp"
    left.write_bytes(b"half")
    tiny_run(monkeypatch, tmp_path, data, RESUME="auto", CHECKPOINT_EVERY=3, ITERATIONS=12)
    assert not left.exists()


def test_logs_that_are_a_dead_link_are_named(tmp_path, monkeypatch, data):
    (tmp_path / "logs").symlink_to("/nowhere/scratch")
    with pytest.raises(SystemExit, match="/nowhere/scratch"):
        tiny_run(monkeypatch, tmp_path, data)


@pytest.mark.parametrize("split", ["train", "val"])
def test_other_text_of_the_same_size_is_noticed(checkpointed, tmp_path, monkeypatch, split):
    other = make_shards(tmp_path)
    path, *_ = sorted(other.glob(f"*_{split}_*.bin"))
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    with pytest.raises(SystemExit, match="does not fit this run: text_sha256 changed: by data"):
        tiny_run(monkeypatch, checkpointed, other, RESUME=checkpoints(checkpointed)[0])


@pytest.mark.slow
def test_the_log_holds_the_script_that_runs(tmp_path, data):
    """Though it is edited while its imports run."""
    script = tmp_path / "mine.py"
    source = train_gpt.Path(train_gpt.__file__).read_text()
    edit = f"Path({str(script)!r}).write_text('# my next idea')\n"
    script.write_text(source.replace("import difflib\n", edit + "import difflib\n"))
    started = script.read_bytes()
    subprocess.run([sys.executable, script, *tiny_arguments(data, RUN_ID="run")], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    exported, = (e for e in events(tmp_path, "run") if e["event"] == "export")
    assert exported["code_sha256"] == hashlib.sha256(started).hexdigest() and script.read_text() == "# my next idea"


def test_a_folder_that_is_removed_meanwhile_is_made_again(tmp_path, monkeypatch, data):
    at_calls(monkeypatch, train_gpt.Trainer, "train_step", {6}, lambda: shutil.rmtree(tmp_path / "model"))
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, RUN_ID="run", OUT_DIR="model", CHECKPOINT_EVERY=2, ITERATIONS=8))
    assert (tmp_path / "model" / "final_model.int8.ptz").exists() and (tmp_path / "model" / "checkpoints").exists()


def test_more_shards_than_files_may_be_open(tmp_path, monkeypatch, data):
    resource = pytest.importorskip("resource")
    many = tmp_path / "data"
    many.mkdir()
    for path in data.glob("*_val_*.bin"):
        shutil.copy(path, many)
    for i in range(300):
        write_shard(many / f"many_train_{i:06d}.bin", np.arange(40) % 256)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
    try:
        for loader in ("sequential", "shuffled"):
            assert tiny_run(monkeypatch, tmp_path, many, LOADER=loader)[-1]["event"] == "final"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.slow
def test_a_run_that_is_killed_at_random_moments_ends_with_the_same_artifact(tmp_path, data):
    """SIGKILL within 0.1 s of a random line, three times; each start resumes by itself."""
    words = tiny_arguments(data, RUN_ID="run", ITERATIONS=20, VAL_LOSS_EVERY=10, CHECKPOINT_EVERY=3,
                           RESUME="auto", LOADER="shuffled", EXPORT_BITS=5, INT8_KEEP_FLOAT_MAX_NUMEL=100)
    command = [sys.executable, str(REPOSITORY / "train_gpt.py"), *words]
    options = dict(cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = subprocess.run([*command, "OUT_DIR=whole"], timeout=240, check=True, **options).stdout.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("step:0/"))
    random = np.random.default_rng(1)
    for _ in range(3):
        process = subprocess.Popen([*command, "OUT_DIR=killed"], **options)
        left = first + int(random.integers((len(lines) - first) // 3))
        while left and process.stdout.readline():
            left -= 1
        time.sleep(random.uniform(0, 0.1))
        process.kill()
        process.communicate()
    last = subprocess.run([*command, "OUT_DIR=killed"], timeout=240, check=False, **options)
    assert last.returncode == 0 and artifacts(tmp_path / "killed") == artifacts(tmp_path / "whole"), last.stdout
    resumed = re.search(r"resumed: step:(\d+) ", last.stdout)
    assert resumed and int(resumed[1]) > 0


# ---- Loss and gradients that are not finite ----------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), 3e37])  # the last has a finite loss
def test_the_run_stops_and_names_the_step(tmp_path, monkeypatch, data, value):
    broken_forward(monkeypatch, {1 + 8 * 4 + 3}, value)  # the warm-up's forward comes first: this is step 5
    with pytest.raises(SystemExit, match="gradient near step:5 is not finite; lower the rates or set GRAD_CLIP_NORM=1$"):
        tiny_run(monkeypatch, tmp_path, data, CHECKPOINT_EVERY=1, MICRO_BATCH_TOKENS=128)
    log = events(tmp_path, "run")
    assert log[-1].keys() == {"event", "step", "elapsed_s"} and (log[-1]["event"], log[-1]["step"]) == ("nonfinite", 5)
    state = read_checkpoint(checkpoints(tmp_path)[-1])
    assert state["step"] == 4 and all(t.isfinite().all() for t in state["model"].values())


def test_a_final_score_that_is_not_finite_is_an_error(tmp_path, monkeypatch, data):
    with pytest.raises(SystemExit, match="the final score is not finite; lower the rates"):
        tiny_run(monkeypatch, tmp_path, data, MATRIX_LR=1e9, ITERATIONS=1)


def test_float16_skips_a_step_that_overflows_and_its_log_is_strict_json(tmp_path, monkeypatch, data):
    broken_forward(monkeypatch, range(8 * 2 + 1, 8 * 3 + 1), value=3e37)  # step 3
    tiny_run(monkeypatch, tmp_path, data, DTYPE="float16", MICRO_BATCH_TOKENS=128, WARMUP_STEPS=0)
    log = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "logs" / "run.jsonl").read_text().splitlines()]
    assert [e["step"] for e in log if e["event"] == "train" and e["grad_norm"] is None] == [3] and log[-1]["event"] == "final"


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_an_overflow_of_float16_updates_nothing(clip):
    """Not even by Muon's momentum, though its own gradients are finite; the next step is as usual."""
    trainer = train_gpt.Trainer(tiny_config(dtype="float16", grad_clip_norm=clip), one_process())
    batch = [tuple(torch.randint(260, (2, 4, 32), generator=torch.Generator().manual_seed(0)))]
    trainer.train_step(batch)
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    hook = trainer.model.tok_emb.weight.register_hook(lambda grad: grad * float("inf"))
    _, norm = trainer.train_step(batch)
    assert not norm.isfinite() and all(map(torch.equal, weights, trainer.model.parameters()))
    hook.remove()
    _, norm = trainer.train_step(batch)
    assert norm.isfinite() and not any(map(torch.equal, weights[:2], trainer.model.parameters()))


def test_float16_that_overflows_in_every_step_stops_the_run(tmp_path, monkeypatch, data):
    """The scaler skips each such step and halves the scale; without a limit nothing would be trained."""
    broken_forward(monkeypatch, range(10_000), value=3e37)  # the loss is finite, its gradient is not
    with pytest.raises(SystemExit, match="step:36 is not finite"):  # from 2**16 to 2**-20
        tiny_run(monkeypatch, tmp_path, data, DTYPE="float16", ITERATIONS=60, WARMUP_STEPS=0, VAL_LOSS_EVERY=0)


# ---- Full disks and little memory --------------------------------------------------------------------------


def test_a_full_disk_loses_no_checkpoint_and_stops_no_training(tmp_path, monkeypatch, data, whole, capsys):
    (tmp_path / "final_model.int8.ptz").write_bytes(b"of an earlier run")
    with monkeypatch.context() as patch:
        at_calls(patch, os, "fsync", range(3, 99), DISK_IS_FULL)  # there is room for two checkpoints
        with pytest.raises(SystemExit, match="final_model.pt could not be written: .*No space left"):
            tiny_run(patch, tmp_path, data, CHECKPOINT_EVERY=2)
    out = capsys.readouterr().out
    assert all(f"warning: checkpoint of step {step}: checkpoints/run_0000000{step}.pt" in out for step in (6, 8, 9))
    assert [path.stem for path in checkpoints(tmp_path)] == ["run_00000002", "run_00000004"]
    assert not list(tmp_path.rglob("*.tmp")) and not (tmp_path / "final_model.pt").exists()
    assert (tmp_path / "final_model.int8.ptz").read_bytes() == b"of an earlier run"
    tiny_run(monkeypatch, tmp_path, data, RESUME="auto")
    assert artifacts(tmp_path) == artifacts(whole)


def test_a_run_id_that_is_still_training_is_refused(tmp_path, monkeypatch):
    """Processes that try to lock a run's log, or have done so, stand for other runs."""
    monkeypatch.chdir(tmp_path)
    train_gpt.Path("logs").mkdir()
    lock = "import fcntl; file = open('logs/run.txt', 'a'); fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB); "
    with subprocess.Popen([sys.executable, "-c", lock + "print(1, flush=True); input()"],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(ValueError, match="RUN_ID=run is still running$"):
            train_gpt.RunLog("run", "", is_main=True)
        assert os.listdir("logs") == ["run.txt"]
        other.communicate(b"\n")
    with pytest.warns(UserWarning, match="run.txt exists; it is kept"):
        log = train_gpt.RunLog("run", "", is_main=True)
    second = subprocess.run([sys.executable, "-c", lock], capture_output=True, check=False)
    assert b"BlockingIOError" in second.stderr and log.files
    with monkeypatch.context() as patch:
        patch.setattr(train_gpt.fcntl, "lockf", Mock(side_effect=OSError("no locks on this file system")))
        train_gpt.RunLog("unlocked", "", is_main=True)


def test_a_log_that_cannot_be_written_stops_no_training(tmp_path, monkeypatch):
    """A full disk, a console that was closed with its stderr, one that has no name or cannot show a letter."""
    monkeypatch.chdir(tmp_path)
    train_gpt.Path("logs").mkdir(exist_ok=True)
    train_gpt.Path("nvidia-smi").write_text(r"#!/bin/sh" "\n" r"printf '\205'" "\n")  # a path in no known encoding
    train_gpt.Path("nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    log = train_gpt.RunLog("run", "", is_main=True)
    closed = Mock(spec=["write"], write=Mock(side_effect=ValueError("closed")))
    with open("logs/run.txt", encoding="utf-8") as unwritable, open("ascii", "w", encoding="ascii") as narrow:
        for file, reason in ((unwritable, "logs/run.txt: line missing: not writable"), (narrow, "ascii: line"), (closed, ": closed")):
            log.files = (file,)
            with pytest.warns(UserWarning, match=reason):
                log.line("step:1/9 \xe9")
        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("always")
            patch.setattr(warnings, "showwarning", SHOW_WARNING)
            patch.setattr(sys, "stderr", Mock(spec=["write"], write=Mock(side_effect=BrokenPipeError)))
            log.event("train", "step:1/9", step=1)
            train_gpt.write_whole(train_gpt.Path(tmp_path, "ascii"), b"new")
    assert events(tmp_path, "run")[0]["step"] == 1 and (tmp_path / "ascii").read_bytes() == b"new"


@pytest.mark.parametrize("setting", ["COMPILE=auto", pytest.param("COMPILE=1", marks=pytest.mark.slow)])
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux compiles by default")
def test_a_compiler_that_fails_is_a_sentence(tmp_path, data, setting):
    environment = {"CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    result = run_trainer(tmp_path, *tiny_arguments(data, RUN_ID="run"), setting, environment=environment)
    line, = (line for line in result.stderr.splitlines() if "InvalidCxxCompiler: No working C++ compiler" in line)
    wanted = f"train_gpt.py: {setting.replace('auto', 'blocks')} failed: "
    assert result.returncode == 1 and line.startswith(wanted) and "try 0" in line


def test_a_run_puts_back_what_it_changes_in_its_process(tmp_path, monkeypatch, data):
    """For notebooks."""
    def process():
        return [signal.getsignal(number) for number in signal.Signals], gc.isenabled(), torch.get_num_threads()

    before = process()
    arguments = *train_gpt.load_config(tiny_arguments(data, RUN_ID="run"), {}), ""
    monkeypatch.chdir(tmp_path)
    train_gpt.run(*arguments)
    assert process() == before
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a bug"):
        patch.setattr(train_gpt, "train", Mock(side_effect=RuntimeError("a bug")))
        train_gpt.run(*arguments)
    assert process() == before


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux compiles by default")
def test_a_notebook_may_train_many_models(tmp_path, monkeypatch, data):
    """PyTorch limits how often a process compiles a function, and all models share theirs."""
    with torch._dynamo.config.patch(recompile_limit=2):
        for width in (32, 64, 96):
            tiny_run(monkeypatch, tmp_path / str(width), data, COMPILE=1, MODEL_DIM=width, ITERATIONS=2)


@pytest.mark.parametrize("error, ends, says", [
    (torch.OutOfMemoryError("CUDA out of memory."), SystemExit, "memory.\nLower MICRO_BATCH"),
    (torch.distributed.DistNetworkError("port in use"), SystemExit, "^train_gpt.py: port in use$"),
    (RuntimeError("a bug"), RuntimeError, "^a bug$")])
def test_a_gpu_without_memory_is_a_sentence_and_a_bug_a_traceback(
        tmp_path, monkeypatch, data, error, ends, says):
    monkeypatch.setattr(train_gpt, "train", Mock(side_effect=error))
    with pytest.raises(ends, match=says):
        tiny_run(monkeypatch, tmp_path, data)


# ---- Two ranks ---------------------------------------------------------------------------------------------


PLACES = {"train_step": (train_gpt.Trainer, 2), "score": (train_gpt.Validation, 2), "export": (train_gpt, 1)}


def worker(data):
    """A rank of several runs, which follow each other in this process. Only the second rank gets signals and faults."""
    is_second, leave, starts = os.environ["RANK"] == "1", os._exit, []
    stopped = dict(RUN_ID="run", TRAIN_BATCH_TOKENS=4096, WARMUP_STEPS=3, LOADER="shuffled", EXPORT_BITS=5, EXPORT_CLIP=8,
                   INT8_KEEP_FLOAT_MAX_NUMEL=100, CHECKPOINT_EVERY=100, RESUME="auto")

    def start(folder, **settings):
        settings = {"RUN_ID": folder, "OUT_DIR": folder, "ITERATIONS": 9, "VAL_LOSS_EVERY": 4, **settings}
        sys.argv[1:] = tiny_arguments(data, **settings)
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(len(starts) * is_second)  # as --rdzv-backend=c10d does
        starts.append(folder)
        os._exit = lambda status: None
        status = train_gpt.main()
        os._exit = leave
        if train_gpt.dist.is_initialized():
            train_gpt.dist.destroy_process_group()
        return status

    def stop():
        if is_second:
            signal.raise_signal(signal.SIGTERM)

    start("whole", **stopped)
    for name, (owner, call) in PLACES.items():
        with pytest.MonkeyPatch.context() as patch:
            at_calls(patch, owner, name, {call}, stop)
            codes = [start(name, **stopped)]
        codes.append(start(name, **stopped))
        if not is_second:
            print("codes of", name, codes, flush=True)
    with pytest.MonkeyPatch.context() as patch:
        broken_forward(patch, {1 + 4 * 2 + 1} if is_second else ())
        start("nan", CHECKPOINT_EVERY=1, MICRO_BATCH_TOKENS=128)
    start("other", **({"ITERATIONS": 6, "MATRIX_LR": 0.05} if is_second else {}))
    start("capped", ITERATIONS=100000, MAX_WALLCLOCK_SECONDS=0.5)
    with pytest.MonkeyPatch.context() as patch:
        at_calls(patch, train_gpt, "write_whole", {1}, lambda: time.sleep(2))
        at_calls(patch, train_gpt.Trainer, "train_step", {7}, stop)
        leave(start("last"))  # launchers send more signals to the rank that is left


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, data):
    """The folder of the runs of two workers, and what torchrun printed."""
    folder = tmp_path_factory.mktemp("two_ranks")
    return folder, run_trainer(folder, data, ranks=2, script=__file__)


@pytest.mark.slow
def test_two_ranks_that_are_stopped_and_started_again_make_the_same_artifact(two_ranks):
    """As a cluster does, with the same command: in the warm-up, in a validation, and in the export, which is done first."""
    folder, result = two_ranks
    assert re.findall(r"codes of (.*)", result.stdout) == [f"{name} [143, 0]" for name in PLACES], result.stderr
    assert re.findall(r"(?:stopped: .*after|resumed:) (step:\d+)", result.stdout)[:5] == [
        "step:0", "step:4", "step:4", "step:9", "step:9"]
    for name in PLACES:
        assert artifacts(folder / name) == artifacts(folder / "whole"), name


@pytest.mark.slow
def test_all_ranks_end_together(two_ranks):
    """At a loss that is not finite in one rank, at the cap, and at a signal to one rank, after the checkpoint, for which the
    main rank takes its time. Ranks with other settings do not begin."""
    folder, result = two_ranks
    assert result.stderr.count("step:3 is not finite") == 2, result.stderr
    assert [e["step"] for e in events(folder, "nan") if e["event"] == "nonfinite"] == [3]
    assert read_checkpoint(checkpoints(folder / "nan")[-1])["step"] == 2
    assert result.stderr.count("train_gpt.py: the ranks differ in settings or data") == 2
    assert not (folder / "other").exists()
    assert "stopping_early: wallclock_cap" in result.stdout and events(folder, "capped")[-1]["event"] == "final"
    assert result.returncode and "exitcode  : 143" in result.stderr
    assert result.stdout.rstrip().endswith("stopped: signal 15 after step:6; set RESUME=auto to go on")
    assert read_checkpoint(*checkpoints(folder / "last"))["step"] == 6


if __name__ == "__main__":
    worker(train_gpt.Path(sys.argv[1]))
