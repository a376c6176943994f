"""Nothing is lost: resuming, signals, steps that are not finite, hostile and damaged files, two runs at once."""

import contextlib
import errno
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
import zlib
from collections import OrderedDict

import numpy as np
import pytest
import torch
import train_gpt
from conftest import (REPOSITORY, events, make_shards, make_trainer, read_checkpoint, run_here, run_trainer, silent_log,
                      tiny_arguments, tiny_config, write_shard)


def tiny_run(monkeypatch, folder, data, **changes):
    """A run in `folder`, in this process; returns its events."""
    folder.mkdir(exist_ok=True)
    settings = {"RUN_ID": "run", "ITERATIONS": 9, "VAL_LOSS_EVERY": 4, **changes}
    run_here(monkeypatch, folder, *tiny_arguments(data, **settings))
    return events(folder, settings["RUN_ID"] or "run")


def run_driver(folder, code, *arguments, ranks=0):
    """Runs code that replaces a part of the script and calls its main, by torchrun where `ranks` > 0."""
    (folder / "driver.py").write_text(f"""
import os, sys, time
sys.path[:0] = [{str(REPOSITORY)!r}, {str(REPOSITORY / "tests")!r}]
import train_gpt
leave = os._exit
def start(*arguments):  # one of several runs of this process
    sys.argv[1:] = arguments
    os._exit = lambda status: None
    status = train_gpt.main()
    os._exit = leave
    if train_gpt.dist.is_initialized():
        train_gpt.dist.destroy_process_group()
    return status
{code}
sys.exit(train_gpt.main())""")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    return subprocess.run([sys.executable, *launcher, "driver.py", *arguments], cwd=folder, timeout=240, text=True, check=False,
                          capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def two_ranks(folder, *arguments):
    """Runs two ranks, each with arguments of its own. Returns their exit statuses and messages."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": port}
    ranks = [subprocess.Popen([sys.executable, str(REPOSITORY / "train_gpt.py"), *words], cwd=folder, text=True,
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**shared, "RANK": rank, "LOCAL_RANK": rank})
             for rank, words in zip("01", arguments)]
    messages = [rank.communicate(timeout=120)[1].removeprefix(f"joining 2 ranks at 127.0.0.1:{port}\n") for rank in ranks]
    return [rank.returncode for rank in ranks], messages


def losses(log):
    """What was computed in each step, without what depends on the clock."""
    return [(e["event"], e["step"], e.get("train_loss"), e.get("val_loss"), e.get("grad_norm"), e.get("lr"))
            for e in log if e["event"] in ("train", "val")]


def artifacts(folder):
    return [(folder / name).read_bytes() for name in ("final_model.pt", "final_model.int8.ptz")]


def checkpoints(folder):
    return sorted((folder / "checkpoints").glob("*.pt"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("data"))


@pytest.fixture
def checkpointed(tmp_path, monkeypatch, data):
    """The folder of a finished run with checkpoints of steps 3, 6 and 9."""
    tiny_run(monkeypatch, tmp_path / "whole", data, CHECKPOINT_EVERY=3, KEEP_CHECKPOINTS=9)
    return tmp_path / "whole"


@pytest.mark.parametrize("loader", ["sequential", "shuffled"])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path, monkeypatch, data, loader, capsys):
    whole = tiny_run(monkeypatch, tmp_path / "whole", data, LOADER=loader, TRAIN_BATCH_TOKENS=4096)
    saved = tiny_run(monkeypatch, tmp_path / "saved", data, LOADER=loader, TRAIN_BATCH_TOKENS=4096, CHECKPOINT_EVERY=2,
                     KEEP_CHECKPOINTS=9, WARMUP_STEPS=0)
    assert losses(whole) == losses(saved) and artifacts(tmp_path / "whole") == artifacts(tmp_path / "saved")
    assert [e["step"] for e in saved if e["event"] == "checkpoint"] == [2, 4, 6, 8, 9]
    for path in checkpoints(tmp_path / "saved"):
        step, folder = int(path.stem.split("_")[1]), tmp_path / path.stem
        capsys.readouterr()
        resumed = tiny_run(monkeypatch, folder, data, LOADER=loader, TRAIN_BATCH_TOKENS=4096, RESUME=path)
        after = [entry for entry in losses(whole) if entry[1] > step or entry[:2] == ("val", step)]
        done = losses(resumed) if step % 4 == 0 or step == 9 else [e for e in losses(resumed) if e[1] > step]
        assert done == [entry for entry in after if entry[:2] != ("val", step) or step % 4 == 0 or step == 9]
        assert artifacts(folder) == artifacts(tmp_path / "whole")
        assert f"resumed: step:{step} train_time:" in capsys.readouterr().out


@pytest.mark.slow
def test_two_ranks_resume_bitwise_from_every_checkpoint_with_both_loaders(tmp_path, data):
    """All runs follow each other in the same two processes, which saves their start."""
    runs = {}
    for loader in ("sequential", "shuffled"):
        every = tiny_arguments(data, LOADER=loader, ITERATIONS=9, VAL_LOSS_EVERY=0, TRAIN_BATCH_TOKENS=4096)
        runs[loader] = [*every, f"RUN_ID={loader}", f"OUT_DIR={loader}", "CHECKPOINT_EVERY=2", "KEEP_CHECKPOINTS=9"]
        for step in (2, 4, 6, 8, 9):
            name = f"{loader}_from_{step}"
            runs[name] = [*every, f"RUN_ID={name}", f"OUT_DIR={name}", f"RESUME={loader}/checkpoints/{loader}_{step:08d}.pt"]
    result = run_driver(tmp_path, f"""
for number, arguments in enumerate({list(runs.values())!r}):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # as if torchrun had started the ranks again
    start(*arguments)
leave(0)
""", ranks=2)
    assert result.returncode == 0, result.stderr
    for name in runs.keys() - {"sequential", "shuffled"}:
        loader, step = name.split("_from_")
        assert artifacts(tmp_path / name) == artifacts(tmp_path / loader), name
        whole = [e for e in losses(events(tmp_path, loader)) if e[0] == "val" or e[1] > int(step)]
        assert losses(events(tmp_path, name)) == whole, name
    assert artifacts(tmp_path / "sequential") != artifacts(tmp_path / "shuffled")


def test_the_newest_whole_checkpoint_is_found_and_damaged_ones_are_named(checkpointed, monkeypatch, data, capsys):
    wanted = artifacts(checkpointed)
    three, six, nine = checkpoints(checkpointed)
    nine.write_bytes(nine.read_bytes()[:-1])
    damaged = bytearray(six.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    six.write_bytes(damaged)
    for number, path in enumerate((three, six, nine)):  # writing changed the order
        os.utime(path, (number, number))
    log = tiny_run(monkeypatch, checkpointed, data, RESUME="auto", RUN_ID="")
    out = capsys.readouterr().err
    assert f"warning: checkpoint {nine.relative_to(checkpointed)} cannot be used: File is not a zip file" in out
    assert f"warning: checkpoint {six.relative_to(checkpointed)} cannot be used" in out
    resume = next(e for e in log if e["event"] == "resume")
    assert resume["step"] == 3 and artifacts(checkpointed) == wanted
    with pytest.raises(SystemExit, match=f"checkpoint {nine} cannot be used"):
        tiny_run(monkeypatch, checkpointed, data, RESUME=nine)
    for name, reason in {"run": "No such file", "final_model.pt": "it is no checkpoint of format 3", ".": "Is a directory"}.items():
        with pytest.raises(SystemExit, match=f"checkpoint {name} cannot be used: .*{reason}.*; RESUME is auto or a file"):
            tiny_run(monkeypatch, checkpointed, data, RESUME=name)


def test_without_checkpoints_auto_starts_anew(tmp_path, monkeypatch, data, capsys):
    log = tiny_run(monkeypatch, tmp_path / "new", data, RESUME="auto", CHECKPOINT_EVERY=1000)
    assert "RESUME=auto: there is no checkpoint to continue; this run is new" in capsys.readouterr().err
    assert [e["step"] for e in log if e["event"] == "train"] == list(range(1, 10))
    assert len(checkpoints(tmp_path / "new")) == 1  # of the end, so that the export can be done again


def test_only_the_newest_of_the_run_are_kept(tmp_path, monkeypatch, data):
    tiny_run(monkeypatch, tmp_path / "a", data, CHECKPOINT_EVERY=2, RUN_ID="one")
    tiny_run(monkeypatch, tmp_path / "a", data, CHECKPOINT_EVERY=2, RUN_ID="two", KEEP_CHECKPOINTS=1)
    assert [path.stem for path in checkpoints(tmp_path / "a")] == ["one_00000008", "one_00000009", "two_00000009"]


def test_an_old_checkpoint_that_cannot_be_deleted_is_named(tmp_path, monkeypatch, data, capsys):
    def unlink(path, missing_ok=False):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(train_gpt.Path, "unlink", unlink)
    tiny_run(monkeypatch, tmp_path / "a", data, CHECKPOINT_EVERY=3, KEEP_CHECKPOINTS=1)
    assert len(checkpoints(tmp_path / "a")) == 3  # all were written
    assert re.search("warning: checkpoint of step 6: .*Permission denied: '.*_00000003.pt'", capsys.readouterr().out)


def test_changed_settings_are_refused_by_name_and_harmless_ones_are_not(checkpointed, tmp_path, monkeypatch, data):
    path = checkpoints(checkpointed)[0]
    with pytest.raises(SystemExit, match=r"MATRIX_LR was 0.02 and is 0.03; BETA2 was 0.95 and is 0.9; undo that, or start anew with a new RUN_ID$"):
        tiny_run(monkeypatch, tmp_path / "b", data, RESUME=path, MATRIX_LR=0.03, BETA2=0.9)
    state = torch.load(path)
    state["config"]["no_such_switch"] = True  # of a script that has one more
    torch.save(state, tmp_path / "silu.pt")
    with pytest.raises(SystemExit, match="it was trained with other settings: NO_SUCH_SWITCH was True and is 'unknown to this script'; undo"):
        tiny_run(monkeypatch, tmp_path / "b", data, RESUME=tmp_path / "silu.pt")
    del state["config"]["no_such_switch"]
    state["config"]["switch_that_was_off_and_is_gone"] = False
    torch.save(state, tmp_path / "older.pt")
    tiny_run(monkeypatch, tmp_path / "d", data, RESUME=tmp_path / "older.pt")
    assert artifacts(tmp_path / "d") == artifacts(checkpointed)
    other = make_shards(tmp_path)
    write_shard(other / "tiny_train_000002.bin", np.arange(256) % 256)
    with pytest.raises(SystemExit, match="does not fit this run: it read 14000 tokens, but DATA_PATH has 14256; undo that"):
        tiny_run(monkeypatch, tmp_path / "b", other, RESUME=path)
    tiny_run(monkeypatch, tmp_path / "c", data, RESUME=path, TRAIN_LOG_EVERY=3, VAL_LOSS_EVERY=0, RUN_ID="renamed",
             WARMUP_STEPS=2, CHECKPOINT_EVERY=1)
    assert artifacts(tmp_path / "c") == artifacts(checkpointed)


def test_a_refused_resume_leaves_the_finished_run_as_it_is(checkpointed, monkeypatch, data):
    before = {path: path.read_bytes() for path in checkpointed.rglob("*.*")}
    with pytest.raises(SystemExit, match="MATRIX_LR was 0.02 and is 0.03; undo that, or start anew with a new RUN_ID"):
        tiny_run(monkeypatch, checkpointed, data, RESUME=checkpoints(checkpointed)[-1], MATRIX_LR=0.03)
    assert {path: path.read_bytes() for path in checkpointed.rglob("*.*")} == before
    assert [path.name for path in sorted((checkpointed / "logs").iterdir())] == ["run.jsonl", "run.txt"]


def test_a_resumed_run_can_be_made_longer(checkpointed, tmp_path, monkeypatch, data):
    path = checkpoints(checkpointed)[0]
    log = tiny_run(monkeypatch, tmp_path / "longer", data, RESUME=path, ITERATIONS=12)
    assert [e["step"] for e in log if e["event"] == "train"] == list(range(4, 13))
    with pytest.raises(SystemExit, match="it is of step 3 and .* ms, not within ITERATIONS"):
        tiny_run(monkeypatch, tmp_path / "shorter", data, RESUME=path, ITERATIONS=2)


# ---- The end of a run -----------------------------------------------------------------------------


def test_the_floats_are_on_disk_before_calibration_begins(tmp_path, monkeypatch, data):
    def calibrate(*arguments):
        raise RuntimeError("no calibration today")

    monkeypatch.setattr(train_gpt, "calibrate", calibrate)
    with pytest.raises(RuntimeError, match="no calibration today"):
        tiny_run(monkeypatch, tmp_path, data, GPTQ_BATCHES=1)
    monkeypatch.undo()
    tiny_run(monkeypatch, tmp_path / "whole", data)
    assert (tmp_path / "final_model.pt").read_bytes() == (tmp_path / "whole" / "final_model.pt").read_bytes()


def test_weights_that_are_only_exported_can_be_calibrated(tmp_path, monkeypatch, data):
    """On the batches of step 0. With OVERFIT, those after the last step are the same, and so is the artifact."""
    settings = dict(EXPORT_BITS=5, INT8_KEEP_FLOAT_MAX_NUMEL=100, OVERFIT=1)
    tiny_run(monkeypatch, tmp_path / "trained", data, GPTQ_BATCHES=2, **settings)
    again = dict(ITERATIONS=0, INIT_FROM=tmp_path / "trained" / "final_model.pt", **settings)
    for batches in (0, 2):
        tiny_run(monkeypatch, tmp_path / str(batches), data, GPTQ_BATCHES=batches, **again)
    trained, rounded, calibrated = (artifacts(tmp_path / name) for name in ("trained", "0", "2"))
    assert calibrated == trained and rounded[0] == trained[0] and rounded[1] != trained[1]


@pytest.mark.slow
def test_all_ranks_begin_with_the_weights_of_the_first(tmp_path, data):
    """The second rank finds another file under INIT_FROM."""
    results = []
    for name, other in (("same", 0), ("different", 1)):
        (tmp_path / name).mkdir()
        for number in (0, 1):
            torch.manual_seed(number)
            torch.save(train_gpt.GPT(tiny_config()).state_dict(), tmp_path / name / f"init{number}.pt")
        result = run_driver(tmp_path / name, f"""
sys.argv.append("INIT_FROM=init" + str({other} * int(os.environ["RANK"])) + ".pt")
""", *tiny_arguments(data, RUN_ID="run"), ranks=2)
        assert result.returncode == 0, result.stderr
        results.append((losses(events(tmp_path / name, "run")), artifacts(tmp_path / name)))
    assert results[0] == results[1]


def test_the_clock_goes_on_and_the_export_can_be_done_again(checkpointed, tmp_path, monkeypatch, data):
    log = tiny_run(monkeypatch, tmp_path / "again", data, RESUME=checkpoints(checkpointed)[-1], VAL_LOSS_EVERY=0)
    assert artifacts(tmp_path / "again") == artifacts(checkpointed)
    assert [e["event"] for e in log if e["event"] != "val"] == ["config", "resume", "export", "final"]
    assert log[-1]["step"] == 9
    bare = make_shards(tmp_path)
    for path in bare.glob("*_train_*"):  # an export needs none
        path.unlink()
    tiny_run(monkeypatch, tmp_path / "only", bare, INIT_FROM=checkpoints(checkpointed)[-1], ITERATIONS=0)
    assert artifacts(tmp_path / "only") == artifacts(checkpointed)
    capped = tiny_run(monkeypatch, tmp_path / "capped", data, MAX_WALLCLOCK_SECONDS=1, ITERATIONS=100000, CHECKPOINT_EVERY=5)
    last = max(e["train_time_ms"] for e in capped if e["event"] == "train")
    log = tiny_run(monkeypatch, tmp_path / "capped", data, MAX_WALLCLOCK_SECONDS=1, ITERATIONS=100000, RESUME="auto",
                   CHECKPOINT_EVERY=5)
    assert next(e for e in log if e["event"] == "resume")["train_time_ms"] >= last - 1
    times = [e["train_time_ms"] for e in log if e["event"] == "train"]
    assert not times and log[-1]["step"] == capped[-1]["step"]  # the cap was reached before


@pytest.mark.slow
def test_another_world_size_goes_on_with_the_same_mathematics(checkpointed, tmp_path, data):
    result = run_trainer(tmp_path, *tiny_arguments(data, ITERATIONS=9, VAL_LOSS_EVERY=4, RUN_ID="two", OUT_DIR="out",
                                                   RESUME=checkpoints(checkpointed)[0]), ranks=2)
    assert result.returncode == 0, result.stderr
    one, two = losses(events(checkpointed, "run")), losses(events(tmp_path, "two"))
    assert [entry[:2] for entry in two] == [entry[:2] for entry in one if entry[1] > 3]
    assert [entry[2] or entry[3] for entry in two] == pytest.approx([e[2] or e[3] for e in one if e[1] > 3], abs=2e-3)


def test_a_hostile_checkpoint_is_refused(checkpointed, tmp_path, monkeypatch, data):
    state = read_checkpoint(checkpoints(checkpointed)[0])
    name = next(iter(state["model"]))

    def refused(change, wanted):
        path = tmp_path / "bad_00000003.pt"
        torch.save({**state, **change}, path)
        with pytest.raises(SystemExit, match=wanted):
            tiny_run(monkeypatch, tmp_path / "bad", data, RESUME=path)

    refused({"format": 1}, "it is no checkpoint of format 3; one of another script is resumed by that script")
    refused({"time_ms": float("nan")}, "it is of step 3 and nan ms, not within ITERATIONS")
    refused({"config": {**state["config"], "seed": torch.zeros(3)}}, "does not fit this run")
    refused({"model": {**state["model"], name: torch.zeros(3)}}, f"size mismatch for {name}|{name}.*expected torch.Tensor")
    refused({"model": {**state["model"], name: "text"}}, f"size mismatch for {name}|{name}.*expected torch.Tensor")
    refused({"model": {}}, "Missing key")
    refused({"optimizers": state["optimizers"][:1]}, "does not fit this run")
    refused({"optimizers": [{}, {}]}, "does not fit this run")
    refused({"step": "three"}, "does not fit this run")
    refused({"step": 2**2000}, "does not fit this run")
    refused({"config": {"run_id": "bad"}}, "was trained with other settings")
    refused({"config": 3}, "cannot be used: ")
    refused({"model": [1]}, "does not fit this run")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(SystemExit, match="list.pt cannot be used: "):
        tiny_run(monkeypatch, tmp_path / "bad", data, RESUME=tmp_path / "list.pt")

    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("the pickle ran code",))

    refused({"scaler": Bomb()}, "cannot be used: ")


def test_a_checkpoint_of_the_older_format_is_named(checkpointed, monkeypatch, data, capsys):
    """RESUME=auto passes over it with a warning, and trains from the start."""
    for path in checkpoints(checkpointed):
        path.unlink()
    older = checkpointed / "checkpoints" / "run_00000003_0123456789abcdef.pt"
    torch.save({"format": 1, "step": 3, "config": {}}, older)
    log = tiny_run(monkeypatch, checkpointed, data, RESUME="auto")
    assert "run_00000003_0123456789abcdef.pt cannot be used: it is no checkpoint of format 3" in capsys.readouterr().err
    assert not any(e["event"] == "resume" for e in log) and log[-1]["event"] == "final"


# ---- Signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_ends_the_run_after_a_step_and_a_checkpoint(tmp_path, data, number):
    arguments = tiny_arguments(data, ITERATIONS=100000, VAL_LOSS_EVERY=0, RUN_ID="run", TRAIN_LOG_EVERY=0)
    process = subprocess.Popen([sys.executable, str(REPOSITORY / "train_gpt.py"), *arguments], cwd=tmp_path, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for line in process.stdout:
        if line.startswith("step:10/"):
            break
    process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number and errors.startswith("stopping after this step"), errors
    found = re.search(rf"stopped: signal {int(number)} after step:(\d+); set RESUME=auto to go on", out)
    assert read_checkpoint(*checkpoints(tmp_path))["step"] == int(found[1]) >= 10


def test_a_signal_that_nohup_ignores_stays_ignored(tmp_path, data):
    arguments = tiny_arguments(data, ITERATIONS=30, VAL_LOSS_EVERY=0, RUN_ID="run")
    process = subprocess.Popen([sys.executable, str(REPOSITORY / "train_gpt.py"), *arguments], cwd=tmp_path, text=True,
                               stdout=subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    for line in process.stdout:
        if line.startswith("step:2/"):
            process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == 0 and events(tmp_path, "run")[-1]["event"] == "final"


def test_a_signal_to_one_rank_ends_all_of_them_after_the_checkpoint(tmp_path, data):
    """The main rank takes its time to write, and the launcher sends more signals when the other one has left."""
    result = run_driver(tmp_path, """
whole, step = train_gpt.write_whole, train_gpt.Trainer.train_step
def slow(path, data):
    time.sleep(2)
    whole(path, data)
def signalled(trainer, batches):
    if trainer.ranks.rank == 1 and trainer.clock.step == 5:
        os.kill(os.getpid(), 15)
    return step(trainer, batches)
train_gpt.write_whole, train_gpt.Trainer.train_step = slow, signalled
""", *tiny_arguments(data, RUN_ID="run", ITERATIONS=100000, VAL_LOSS_EVERY=0), ranks=2)
    assert result.returncode and "exitcode  : 143" in result.stderr, result.stderr
    assert "stopped: signal 15 after step:6" in result.stdout
    assert read_checkpoint(*checkpoints(tmp_path))["step"] == 6


@pytest.mark.slow
def test_two_ranks_that_are_stopped_and_started_again_make_the_same_artifact(tmp_path, data):
    """As a cluster does, with the same command: in the warm-up, in a validation, and in GPTQ, which is done first."""
    arguments = tiny_arguments(data, RUN_ID="run", ITERATIONS=9, VAL_LOSS_EVERY=4, TRAIN_BATCH_TOKENS=4096, WARMUP_STEPS=3,
                               GPTQ_BATCHES=2, EXPORT_BITS=5, INT8_KEEP_FLOAT_MAX_NUMEL=100, CHECKPOINT_EVERY=100, RESUME="auto")
    places = {"train_step": ("Trainer", 2), "score": ("Validation", 2), "calibrate": ("", 1)}  # in which call
    result = run_driver(tmp_path, f"""
attempts = []
def start_in(place):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(len(attempts))
    attempts.append(place)
    return start(*{arguments!r}, f"OUT_DIR={{place}}")
def stopped_in(owner, name, call):
    original, made = getattr(owner, name), []
    def signalled(*arguments):
        made.append(1)
        if len(made) == call:
            os.kill(os.getpid(), 15)
        return original(*arguments)
    setattr(owner, name, signalled)
    code = start_in(name)
    setattr(owner, name, original)
    return code
start_in("whole")
for name, (owner, call) in {places!r}.items():
    codes = stopped_in(getattr(train_gpt, owner, train_gpt), name, call), start_in(name)
    if os.environ["RANK"] == "0":
        print("codes of", name, codes, flush=True)
leave(0)
""", ranks=2)
    assert result.returncode == 0, result.stderr
    assert re.findall(r"codes of (.*)", result.stdout) == [f"{name} (143, 0)" for name in places]
    assert re.findall(r"(?:stopped: .*after|resumed:) (step:\d+)", result.stdout) == [
        "step:0", "step:4", "step:4", "step:9", "step:9"]
    for name in places:
        assert artifacts(tmp_path / name) == artifacts(tmp_path / "whole"), name


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_is_killed_at_random_moments_ends_with_the_same_artifact(tmp_path, data, ranks):
    """SIGKILL to all processes within 0.1 s of a random line, five times; each start resumes by itself."""
    words = tiny_arguments(data, RUN_ID="run", ITERATIONS=30, VAL_LOSS_EVERY=10, CHECKPOINT_EVERY=3, KEEP_CHECKPOINTS=1,
                           RESUME="auto", LOADER="shuffled", GPTQ_BATCHES=1, EXPORT_BITS=5, INT8_KEEP_FLOAT_MAX_NUMEL=100)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, str(REPOSITORY / "train_gpt.py"), *words]
    options = dict(env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    whole = subprocess.run([*command, "OUT_DIR=whole"], cwd=tmp_path, timeout=240, check=True, **options).stdout.splitlines()
    first = next(i for i, line in enumerate(whole) if line.startswith("step:0/"))
    random = np.random.default_rng(ranks)
    starts = []
    for _ in range(5):
        process = subprocess.Popen([*command, "OUT_DIR=killed"], cwd=tmp_path, start_new_session=True, **options)
        left = first + int(random.integers((len(whole) - first) // 3))
        while left and process.stdout.readline():
            left -= 1
        time.sleep(random.uniform(0, 0.1))
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False).stdout.split()
        for pid in (*map(int, children), process.pid):  # torchrun's workers have sessions of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        starts.append(process.communicate()[0])
    last = subprocess.run([*command, "OUT_DIR=killed"], cwd=tmp_path, timeout=240, check=False, **options)
    assert last.returncode == 0 and artifacts(tmp_path / "killed") == artifacts(tmp_path / "whole"), last.stdout
    resumed = re.search(r"resumed: step:(\d+) ", last.stdout)
    assert resumed and int(resumed[1]) > 0


def signal_in_score(monkeypatch, call):
    """A signal that comes in one of the run's scores: of steps 0, 4, 8, and 9, which is in the export."""
    score, calls = train_gpt.Validation.score, []

    def signalled(*arguments):
        calls.append(1)
        if len(calls) == call:
            signal.raise_signal(signal.SIGTERM)
        return score(*arguments)

    monkeypatch.setattr(train_gpt.Validation, "score", signalled)


@pytest.mark.parametrize("call", [1, 2])
def test_a_signal_in_a_validation_ends_the_run_before_the_next_step(tmp_path, monkeypatch, data, call):
    signal_in_score(monkeypatch, call)
    with pytest.raises(SystemExit, match="143"):
        tiny_run(monkeypatch, tmp_path, data)
    step = 4 * (call - 1)
    assert [e["step"] for e in events(tmp_path, "run") if e["event"] == "train"] == list(range(1, step + 1))
    assert [path.stem for path in checkpoints(tmp_path)] == [f"run_{step:08d}"] * (step > 0)
    hint = "set RESUME=auto to go on" if step else "there is no checkpoint"
    assert f"stopped: signal 15 after step:{step}; {hint}" in (tmp_path / "logs" / "run.txt").read_text()


def test_a_signal_in_the_export_waits_for_the_files(tmp_path, monkeypatch, data, capsys):
    tiny_run(monkeypatch, tmp_path / "whole", data)
    signal_in_score(monkeypatch, 4)
    with pytest.raises(SystemExit, match="143"):
        tiny_run(monkeypatch, tmp_path, data)
    assert events(tmp_path, "run")[-1]["event"] == "export" and artifacts(tmp_path) == artifacts(tmp_path / "whole")
    assert "stopped: signal 15 after step:9; there is no checkpoint" in capsys.readouterr().out


def test_a_signal_in_the_final_scores_ends_the_process_at_once(tmp_path, monkeypatch, data):
    tiny_run(monkeypatch, tmp_path / "whole", data)
    result = run_driver(tmp_path, """
score = train_gpt.Validation.score
def signalled(*arguments):
    if train_gpt.Path("final_model.int8.ptz").exists():
        os.kill(os.getpid(), 15)
        print("survived", flush=True)
    return score(*arguments)
train_gpt.Validation.score = signalled
""", *tiny_arguments(data, RUN_ID="run", ITERATIONS=9, VAL_LOSS_EVERY=4))
    assert result.returncode == -signal.SIGTERM and "survived" not in result.stdout and not result.stderr, result.stderr
    assert events(tmp_path, "run")[-1]["event"] == "export" and artifacts(tmp_path) == artifacts(tmp_path / "whole")


def test_only_files_of_the_run_are_its_checkpoints_and_the_latest_is_never_deleted(tmp_path, data):
    """Another run's name may begin like this one's or match it as a pattern; another file's time may lie ahead."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for name in ("a_00000001.pt", "a_20261122_00000009.pt", "b_00000001.pt", "lr[0.1]_00000002.pt"):
        (folder / name).write_bytes(b"x")
    later = time.time() + 3600
    os.utime(folder / "a_00000001.pt", (later, later))
    listed = {run_id: [path.name for path in train_gpt.list_checkpoints(tiny_config(out_dir=str(tmp_path), run_id=run_id))]
              for run_id in ("a", "*", "lr[0.1]")}
    assert listed == {"a": ["a_00000001.pt"], "*": [], "lr[0.1]": ["lr[0.1]_00000002.pt"]}
    trainer = make_trainer(out_dir=str(tmp_path), run_id="a", keep_checkpoints=1, data_path=str(data))
    trainer.clock.set(2, 0.0)
    train_gpt.save_checkpoint(trainer, train_gpt.TokenLoader(trainer.config, trainer.ranks), silent_log())
    assert sorted(path.name for path in folder.glob("a_0*")) == ["a_00000002.pt"]


def test_checkpoints_of_a_clock_that_was_ahead(tmp_path, monkeypatch, data):
    """The newest file is the newest checkpoint, whatever an older one's time says, once that is deleted."""
    tiny_run(monkeypatch, tmp_path, data, CHECKPOINT_EVERY=4, KEEP_CHECKPOINTS=1)
    later = time.time() + 3600
    os.utime(*checkpoints(tmp_path), (later, later))
    tiny_run(monkeypatch, tmp_path, data, CHECKPOINT_EVERY=4, KEEP_CHECKPOINTS=1, SEED=7)
    assert read_checkpoint(*checkpoints(tmp_path))["config"]["seed"] == 7


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_signal_in_the_warm_up_ends_it(tmp_path, data, ranks):
    """With two ranks, only the second one gets it."""
    result = run_driver(tmp_path, f"""
step, taken = train_gpt.Trainer.train_step, []
def signalled(trainer, batches):
    taken.append(1)
    if len(taken) == 3 and trainer.ranks.rank == {max(ranks - 1, 0)}:
        os.kill(os.getpid(), 2)
    return step(trainer, batches)
train_gpt.Trainer.train_step = signalled
""", *tiny_arguments(data, RUN_ID="run", WARMUP_STEPS=100), ranks=ranks)
    assert result.returncode == 130 or (ranks == 2 and "exitcode  : 130" in result.stderr), result.stderr
    assert "warmup_step:3/100" in result.stdout and "warmup_step:4/100" not in result.stdout
    assert "stopped: signal 2 after step:0" in result.stdout and not checkpoints(tmp_path)


def test_ctrl_c_before_the_training_is_one_sentence(tmp_path, monkeypatch, data):
    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(train_gpt.Validation, "__init__", interrupted)
    with pytest.raises(SystemExit, match="^train_gpt.py: stopped$"):
        tiny_run(monkeypatch, tmp_path, data)


def test_a_second_ctrl_c_ends_the_process_at_once(tmp_path, data):
    """But not within a second of the first one, since launchers repeat signals."""
    result = run_driver(tmp_path, """
def slow(trainer, batches):
    for wait in (0, 0.2, 1.3):
        time.sleep(wait)
        os.kill(os.getpid(), 2)
        print(f"survived after {wait}", flush=True)
train_gpt.Trainer.train_step = slow
""", *tiny_arguments(data))
    assert result.returncode == 130 and result.stderr.count("stopping after this step or score") == 1
    assert "survived after 0.2" in result.stdout and "survived after 1.3" not in result.stdout


# ---- Loss and gradients that are not finite -------------------------------------------------------


def broken_forward(monkeypatch, calls, value=float("nan")):
    """Multiplies the loss of the given calls (from 1 on) of the model in training."""
    count, forward = [0], train_gpt.GPT.forward

    def patched(self, tokens, targets):
        loss = forward(self, tokens, targets)
        count[0] += loss.requires_grad
        return loss * value if loss.requires_grad and count[0] in calls else loss

    monkeypatch.setattr(train_gpt.GPT, "forward", patched)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e37])  # the last has a finite loss
def test_the_run_stops_and_names_the_step(tmp_path, monkeypatch, data, value):
    broken_forward(monkeypatch, {1 + 8 * 4 + 3}, value)  # the warm-up's forward comes first: this is step 5
    with pytest.raises(SystemExit, match="gradient near step:5 is not finite; lower the rates or set GRAD_CLIP_NORM=1$"):
        tiny_run(monkeypatch, tmp_path, data, CHECKPOINT_EVERY=1, MICRO_BATCH_TOKENS=128)
    log = events(tmp_path, "run")
    assert log[-1].keys() == {"event", "step", "elapsed_s"} and (log[-1]["event"], log[-1]["step"]) == ("nonfinite", 5)
    state = read_checkpoint(checkpoints(tmp_path)[-1])
    assert state["step"] == 4 and all(t.isfinite().all() for t in state["model"].values())


def test_rates_that_are_far_too_high_are_an_error(tmp_path, monkeypatch, data):
    with pytest.raises(SystemExit, match="not finite; lower the rates"):
        tiny_run(monkeypatch, tmp_path, data, MATRIX_LR=1e9)


def test_the_log_of_a_gradient_that_overflows_is_strict_json(tmp_path, monkeypatch, data):
    broken_forward(monkeypatch, range(8 * 2 + 1, 8 * 3 + 1), value=3e37)  # step 3, which is skipped
    assert tiny_run(monkeypatch, tmp_path, data, DTYPE="float16", MICRO_BATCH_TOKENS=128, WARMUP_STEPS=0)[-1]["event"] == "final"
    log = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "logs" / "run.jsonl").read_text().splitlines()]
    assert [e["step"] for e in log if e["event"] == "train" and e["grad_norm"] is None] == [3]


def test_float16_that_overflows_in_every_step_stops_the_run(tmp_path, monkeypatch, data):
    """The scaler skips each such step and halves the scale; without a limit nothing would be trained."""
    broken_forward(monkeypatch, range(10_000), value=3e37)  # the loss is finite, its gradient is not
    with pytest.raises(SystemExit, match="step:36 is not finite"):  # from 2**16 to 2**-20
        tiny_run(monkeypatch, tmp_path, data, DTYPE="float16", ITERATIONS=60, WARMUP_STEPS=0, VAL_LOSS_EVERY=0)


def test_all_ranks_stop_where_one_is_not_finite(tmp_path, data):
    """The second rank alone has a loss that is not finite."""
    result = run_driver(tmp_path, """
import pytest, test_faults
if os.environ["RANK"] == "1":
    test_faults.broken_forward(pytest.MonkeyPatch(), {1 + 4 * 2 + 1})
""", *tiny_arguments(data, RUN_ID="run", ITERATIONS=5, CHECKPOINT_EVERY=1, MICRO_BATCH_TOKENS=128), ranks=2)
    assert result.returncode and result.stderr.count("step:3 is not finite") >= 1, result.stderr
    assert [e["step"] for e in events(tmp_path, "run") if e["event"] == "nonfinite"] == [3]
    assert read_checkpoint(checkpoints(tmp_path)[-1])["step"] == 2


@pytest.mark.parametrize("changes, wanted", [
    (dict(MATRIX_LR=0.05), "MATRIX_LR"), (dict(ITERATIONS=6), "ITERATIONS"), ({}, "the validation text")])
def test_ranks_that_do_not_agree_say_so_before_the_first_step(tmp_path, data, changes, wanted):
    other = shutil.copytree(data, tmp_path / "other")
    if not changes:
        write_shard(other / "tiny_val_000000.bin", [1, *range(4, 254)] * 12)
    codes, messages = two_ranks(tmp_path, tiny_arguments(data), tiny_arguments(other, **changes))
    assert codes == [1, 1] and messages == [f"train_gpt.py: the ranks do not agree on {wanted}\n"] * 2
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("first", [True, False])
def test_a_rank_that_ends_alone_says_why_and_the_other_that_it_has(tmp_path, data, first):
    """Its text has a token that is too large, in what is read before the first step or later."""
    other = shutil.copytree(data, tmp_path / "other")
    tokens = train_gpt.open_shard(other / "tiny_train_000000.bin").copy()
    tokens[200 if first else 2900:][:100] = 300
    write_shard(other / "tiny_train_000000.bin", tokens)
    codes, messages = two_ranks(tmp_path, tiny_arguments(data), tiny_arguments(other))
    assert codes == [1, 1] and messages[0].endswith("\nAnother rank has ended, or MASTER_ADDR is wrong\n")
    assert re.fullmatch("train_gpt.py: .*tiny_train_000000.bin holds token 300, too large for VOCAB_SIZE=260;.*\n", messages[1])
    assert (tmp_path / "logs").exists() != first


# ---- Full disks and little memory -----------------------------------------------------------------


def test_a_full_disk_loses_no_checkpoint_and_stops_no_training(tmp_path, monkeypatch, data, capsys):
    fsync, synced = os.fsync, []

    def full(number):
        if len(synced) == 2:  # checkpoints
            raise OSError(errno.ENOSPC, "No space left on device")
        synced.append(fsync(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SystemExit, match="final_model.int8.ptz could not be written: .*No space left"):
        tiny_run(monkeypatch, tmp_path, data, CHECKPOINT_EVERY=2)
    out = capsys.readouterr().out
    assert all(f"warning: checkpoint of step {step}: checkpoints/run_0000000{step}.pt" in out for step in (6, 8, 9))
    assert [path.stem for path in checkpoints(tmp_path)] == ["run_00000002", "run_00000004"]
    assert not list(tmp_path.rglob("*.tmp")) and not list(tmp_path.glob("final_model*"))
    monkeypatch.setattr(os, "fsync", fsync)
    tiny_run(monkeypatch, tmp_path, data, RESUME="auto")
    tiny_run(monkeypatch, tmp_path / "whole", data)
    assert artifacts(tmp_path) == artifacts(tmp_path / "whole")


def test_a_disk_that_is_too_full_for_the_floats_gets_the_artifact(tmp_path, monkeypatch, data, capsys):
    """Which is a third of their size. The floats are not tried again, and the run has not failed."""
    fsync, tried = os.fsync, []

    def full(number):
        tried.append(number)
        if len(tried) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(number)

    monkeypatch.setattr(os, "fsync", full)
    log = tiny_run(monkeypatch, tmp_path, data)
    assert "\nwarning: final_model.pt could not be written: [Errno 28] No space left on device\n" in capsys.readouterr().out
    assert [event["event"] for event in log[-2:]] == ["export", "final"]
    assert len(tried) == 2 and not (tmp_path / "final_model.pt").exists()
    wanted = next(event for event in tiny_run(monkeypatch, tmp_path / "whole", data) if event["event"] == "export")
    assert log[-2]["model_bytes"] == wanted["model_bytes"]
    assert (tmp_path / "final_model.int8.ptz").read_bytes() == artifacts(tmp_path / "whole")[1]


def test_a_log_that_cannot_be_written_stops_no_training(tmp_path, monkeypatch, data, capsys):
    class Full(io.StringIO):
        name = "logs/run.txt"

        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    opened = train_gpt.RunLog.__init__

    def init(self, *arguments, **more):
        opened(self, *arguments, **more)
        self.text = Full()

    monkeypatch.setattr(train_gpt.RunLog, "__init__", init)
    with pytest.warns(UserWarning, match=r"logs/run.txt: a line was not written: \[Errno 28\]"):
        log = tiny_run(monkeypatch, tmp_path, data)
    assert log[-1]["event"] == "final"


@pytest.mark.parametrize("error, wanted", [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 80 GiB of which 1 GiB is free."),
     "Tried to allocate 2.00 GiB.*1 GiB is free.*MICRO_BATCH_TOKENS or MODEL_DIM"),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
     "tried to allocate 9 bytes.*MICRO_BATCH_TOKENS"),
    (RuntimeError("a compiler's long story, " * 40 + "out of memory"), "long story.*MICRO_BATCH_TOKENS")])
def test_too_little_memory_names_the_knobs(tmp_path, monkeypatch, data, error, wanted):
    def train(*arguments):
        raise error

    monkeypatch.setattr(train_gpt, "train", train)
    with pytest.raises(SystemExit, match="(?s)" + wanted):
        tiny_run(monkeypatch, tmp_path, data)


# ---- Hostile weights ------------------------------------------------------------------------------


def artifact_of(config):
    torch.manual_seed(0)
    model = train_gpt.GPT(config)
    return model, train_gpt.quantize(model.state_dict(), config)[0]


def write_artifact(path, artifact):
    content = io.BytesIO()
    torch.save(artifact, content)
    path.write_bytes(zlib.compress(content.getvalue(), 9))
    return path


def test_hostile_artifacts_are_refused(tmp_path):
    config = tiny_config(int8_keep_float_max_numel=100)
    model, artifact = artifact_of(config)
    name = "blocks.0.mlp.fc.weight"
    train_gpt.load_weights(model, write_artifact(tmp_path / "good.ptz", artifact))
    before = {key: t.clone() for key, t in model.state_dict().items()}

    def refused(wanted, **changes):
        path = write_artifact(tmp_path / "bad.ptz", {**artifact, **changes})
        with pytest.raises(ValueError, match=f"(?s)bad.ptz cannot be loaded into this model: {wanted}"):
            train_gpt.load_weights(model, path)

    for value in (0.0, -1.0, float("nan"), float("inf")):
        scale = artifact["scales"][name].clone()
        scale[3] = value
        refused(f"a scale of {name} is not positive", scales={**artifact["scales"], name: scale})
    other = f"{name} or its scale has another shape or type"
    refused(other, scales={**artifact["scales"], name: artifact["scales"][name][:-1]})
    refused(other, quantized={**artifact["quantized"], name: artifact["quantized"][name].float()})
    refused(other, quantized={**artifact["quantized"], name: artifact["quantized"][name][:, :-1]})
    refused(".*Missing key", passthrough={})
    refused(".*Unexpected key", passthrough={**artifact["passthrough"], "extra": torch.zeros(1)})
    key = next(iter(artifact["passthrough"]))
    for value in (torch.zeros(3), "text", [1.0], None):
        refused(f".*{key}", passthrough={**artifact["passthrough"], key: value})
    refused("", scales={})
    refused("", quantized=[1])
    # A stride of zero promises more values than any memory holds: nothing may compute with them before it is refused.
    rows = len(artifact["quantized"][name])
    refused(other, quantized={**artifact["quantized"], name: torch.zeros(1, dtype=torch.int8).expand(rows, 10**11)})
    refused(other, scales={**artifact["scales"], name: torch.ones(1).half().expand(10**12)})
    state = OrderedDict((key, t.double()) for key, t in model.state_dict().items())
    state._metadata = {key: {"assign_to_params_buffers": True} for key in ("", *dict(model.named_modules()))}
    torch.save(state, tmp_path / "own.pt")
    train_gpt.load_weights(model, tmp_path / "own.pt")
    assert all(t.dtype == before[key].dtype for key, t in model.state_dict().items())


@pytest.mark.slow
def test_bombs_are_refused_at_once_and_in_little_memory(tmp_path):
    """10 GB of zlib in 10 MB, and zip archives whose entries inflate."""
    code = f"""
import sys, time, resource
sys.path[:0] = [{str(REPOSITORY)!r}, {str(REPOSITORY / 'tests')!r}]
import train_gpt
from conftest import tiny_config
model = train_gpt.GPT(tiny_config())
before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
try:
    train_gpt.load_weights(model, sys.argv[1])
except ValueError as error:
    print(error)
print(time.perf_counter() - started, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    packer = zlib.compressobj(9)
    start = packer.compress(bytes(1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(bytes(1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH)  # can be repeated
    (tmp_path / "bomb.ptz").write_bytes(start + 600 * block)
    assert (tmp_path / "bomb.ptz").stat().st_size > 9e6
    torch.save({"x": torch.zeros(10_000_000)}, tmp_path / "stored.pt")
    with zipfile.ZipFile(tmp_path / "stored.pt") as stored, \
            zipfile.ZipFile(tmp_path / "deflated.pt", "w", zipfile.ZIP_DEFLATED) as deflated:
        for entry in stored.infolist():
            deflated.writestr(entry.filename, stored.read(entry.filename))
    (tmp_path / "inside.ptz").write_bytes(zlib.compress((tmp_path / "deflated.pt").read_bytes()))
    for name, wanted in (("bomb.ptz", "it has more than the"), ("deflated.pt", "packed entries"),
                         ("inside.ptz", "packed entries"), ("stored.pt", "it has more than the")):
        result = subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], capture_output=True, text=True, check=True)
        message, figures = result.stdout.strip().rsplit("\n", 1)
        seconds, mib = map(float, figures.split())
        assert wanted in message and seconds < 1 and mib < 300, (name, result.stdout)


def test_damaged_weights_are_errors_or_what_they_were(tmp_path):
    """Bytes are changed at random; what loads all the same is what it was, or was damaged in the archive's padding."""
    random, config = np.random.default_rng(3), tiny_config(int8_keep_float_max_numel=100)
    model, artifact = artifact_of(config)
    other = train_gpt.GPT(config)
    write_artifact(tmp_path / "good.ptz", artifact)
    torch.save(model.state_dict(), tmp_path / "good.pt")
    refused = 0
    for i in range(200):
        good = tmp_path / ("good.ptz", "good.pt")[i % 2]
        damaged = bytearray(good.read_bytes())
        for at in random.integers(0, len(damaged), int(random.integers(1, 4))):
            damaged[at] = int(random.integers(256))
        (tmp_path / "bad").write_bytes(damaged)
        train_gpt.load_weights(other, good)
        wanted = {name: t.clone() for name, t in other.state_dict().items()}
        try:
            train_gpt.load_weights(other, tmp_path / "bad")
        except ValueError as error:
            assert "bad cannot be loaded into this model" in str(error)
            refused += 1
        assert all(torch.equal(t, wanted[name]) for name, t in other.state_dict().items())
    assert refused > 150
