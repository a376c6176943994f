"""What ./run.sh chooses for a machine, and what it shows of a run: tools/start.py."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import Mock, call

import common
import events
import pytest
import settings
import start
import train_gpt
from conftest import REPOSITORY, make_shards, run_here, run_script, tiny_arguments

FINEWEB, SPEECHES = "data/datasets/fineweb10B_sp1024", "data/datasets/sotu_caseops2048"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the presets, for a user who has set nothing, on a machine without a GPU."""
    shutil.copytree(REPOSITORY / "records" / "presets", tmp_path / "records" / "presets")
    monkeypatch.chdir(tmp_path)
    for module in (start, common, events):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(settings, "PRESETS", tmp_path / "records" / "presets")
    for field in train_gpt.fields(train_gpt.Config):
        monkeypatch.delenv(field.name.upper(), raising=False)
    has_gpus(monkeypatch, 0)
    monkeypatch.setattr(start, "gpu_names", list)
    monkeypatch.setattr(start, "suit_machine", lambda gpus: {})
    return tmp_path


def has_gpus(monkeypatch, count: int) -> None:
    monkeypatch.setattr(train_gpt.torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(train_gpt.torch.cuda, "device_count", lambda: count)


@pytest.fixture
def calls(monkeypatch):
    """The scripts of data/ that were called; they make what is then found."""
    seen = []

    def call(*command):
        seen.append(" ".join(command))
        if "prepare.py" in command[0]:
            write_manifest(Path(command[-1]), 3_300_000)
        else:
            add_fineweb(10)

    monkeypatch.setattr(start, "call", call)
    monkeypatch.setattr(start.subprocess, "run", lambda command, **_: seen.append(" ".join(command[1:])))
    return seen


def write_manifest(folder: Path, tokens) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    about = {"tokenizer": {"name": "byte260", "vocab_size": 260}, "splits": {"train": {"tokens": tokens}}}
    (folder / "manifest.json").write_text(json.dumps(about))
    (folder / "x_val_000000.bin").touch()


def add_fineweb(shards: int) -> None:
    for name in ("val_0", *(f"train_{number}" for number in range(shards))):
        path = Path(FINEWEB, f"fineweb_{name}.bin")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    Path("data/tokenizers").mkdir(parents=True, exist_ok=True)
    Path("data/tokenizers/fineweb_1024_bpe.model").touch()


def without_name(arguments: list[str]) -> list[str]:
    """The arguments without the RUN_ID that a new run gets."""
    names = [word for word in arguments if re.fullmatch(r"RUN_ID=\d{8}-\d{6}-\d+", word)]
    assert len(names) == 1
    return [word for word in arguments if word not in names]


def test_the_first_command_trains_quick_on_speeches(place, calls):
    found = start.plan([], "")
    assert without_name(found.arguments) == [f"DATA_PATH={SPEECHES}", "@records/presets/quick.env"] and found.ranks == 1
    assert calls == [f"data/prepare.py sotu --tokenizer caseops2048 --out {SPEECHES}"]
    assert without_name(start.plan([], "").arguments) == without_name(found.arguments) and len(calls) == 1
    add_fineweb(1)  # a first shard is enough on a CPU
    assert without_name(start.plan([], "").arguments) == [
        f"DATA_PATH={FINEWEB}", "TOKENIZER_PATH=data/tokenizers/fineweb_1024_bpe.model", "@records/presets/quick.env"]


def test_on_gpus_fineweb_is_fetched_unless_the_preset_is_for_speeches(place, calls, monkeypatch, capsys):
    has_gpus(monkeypatch, 2)
    minute = start.plan([], "gpu_minute")
    assert minute.ranks == 2 and without_name(minute.arguments) == [f"DATA_PATH={SPEECHES}", "@records/presets/gpu_minute.env"]
    assert "fetching" not in capsys.readouterr().out
    add_fineweb(1)  # one is not all
    found = start.plan(["SEED=7"], "")
    assert "fetching FineWeb" in (said := capsys.readouterr().out) and "--preset gpu_minute" in said
    assert calls[-1] == "data/download.py --variant sp1024 --train-shards 10" and "huggingface_hub" in calls[-2]
    assert found.ranks == 2 and without_name(found.arguments) == [
        f"DATA_PATH={FINEWEB}", "TOKENIZER_PATH=data/tokenizers/fineweb_1024_bpe.model", "SEED=7"]
    done = len(calls)
    Path(FINEWEB).rename("disk")
    Path(FINEWEB).symlink_to(place / "disk")
    start.plan([], "")
    assert len(calls) == done
    Path("data/tokenizers/fineweb_1024_bpe.model").unlink()
    start.plan([], "")
    assert len(calls) == done + 2


def test_a_script_that_fails_ends_the_start_with_its_status(place, capfd):
    Path("data").mkdir()
    Path("data/prepare.py").write_text("print('yardstick', flush=True); print('next: train', flush=True); exit(3)")
    with pytest.raises(SystemExit, match="^3$"):
        start.plan([], "")
    assert capfd.readouterr().out == "yardstick\n"


@pytest.mark.parametrize("gpus, words, wanted, ranks", [
    (0, [], "DROPOUT=0.3 ITERATIONS=35 VAL_LOSS_EVERY=4 @records/presets/quick.env", 1),
    (2, [], "DROPOUT=0.3 ITERATIONS=35 VAL_LOSS_EVERY=4 @records/presets/quick.env", 1),  # one GPU is enough
    (3, [], "DROPOUT=0.3 ITERATIONS=35 VAL_LOSS_EVERY=4 @records/presets/quick.env", 1),
    (3, ["INIT_FROM=tiny"], "", 2),  # which can share a batch
    (0, ["TRAIN_BATCH_TOKENS=2048"], "DROPOUT=0.3 ITERATIONS=69 VAL_LOSS_EVERY=7 @records/presets/quick.env", 1),
    (0, ["DROPOUT=0.2", "ITERATIONS=9"], "VAL_LOSS_EVERY=1 @records/presets/quick.env", 1)])
def test_a_small_text_gets_dropout_and_ten_epochs(place, calls, monkeypatch, capsys, gpus, words, wanted, ranks):
    has_gpus(monkeypatch, gpus)
    write_manifest(Path("tiny"), 14_000)
    found = start.plan(["DATA_PATH=tiny", *words], "")
    assert without_name(found.arguments) == [*wanted.split(), "DATA_PATH=tiny", *words] and found.ranks == ranks
    said = capsys.readouterr().out
    with monkeypatch.context() as patched:
        for word in words:
            patched.setenv(*word.split("="))
        found = start.plan(["DATA_PATH=tiny"], "")
        assert without_name(found.arguments) == [*wanted.split(), "DATA_PATH=tiny"] and found.ranks == ranks
    assert ("14,000 tokens, few for this model" in said) == bool(wanted)
    assert ("Of 3 GPUs, at most 2 train" in said) == (gpus == 3)  # also where one is enough
    assert ("at most 9 steps, which read it 2.6 times" in said) == ("ITERATIONS=9" in words)
    for tokens in (2_000_000, 0, None, "14000 "):  # enough, only a validation split, or it does not say
        write_manifest(Path("tiny"), tokens)
        assert ("DROPOUT=0.3" in start.plan(["DATA_PATH=tiny"], "").arguments) == (tokens == "14000 ")
    assert not calls


@pytest.mark.parametrize("preset, tokens, wanted", [
    ("cpu_1mb", 800_000, "DROPOUT=0.1 ITERATIONS=1954 VAL_LOSS_EVERY=196"), ("quick", 822_300, "DROPOUT=0.1 ITERATIONS=2008"),
    ("cpu_1mb", 2_000_000, ""), ("gpu_minute", 599_999, "DROPOUT=0.3 ITERATIONS=92 VAL_LOSS_EVERY=10"), ("gpu_minute", 1_900_000, "ITERATIONS=290 VAL_LOSS_EVERY=30")])
def test_with_any_preset_a_small_text_gets_only_what_the_preset_lacks(place, preset, tokens, wanted):
    write_manifest(Path("mine"), tokens)
    found = without_name(start.plan(["DATA_PATH=mine"], preset).arguments)
    assert found == [*wanted.split(), f"@records/presets/{preset}.env", "DATA_PATH=mine"]


@pytest.mark.parametrize("preset", ["cpu_1mb", "cpu_1mb_avx2", "gpu_minute", "quick"])
def test_a_preset_for_the_speeches_takes_the_vocabulary_of_any_text(place, preset):
    write_manifest(Path("mine"), 3_000_000)
    config, _ = train_gpt.load_config(start.plan(["DATA_PATH=mine"], preset).arguments, {})
    assert config.vocab_size == 260


def test_what_the_user_says_wins_over_a_preset(place, calls, monkeypatch):
    has_gpus(monkeypatch, 2)
    monkeypatch.setenv("MLP_SLOPE", "0.1")
    found = start.plan(["NUM_LAYERS=2"], "cpu_1mb")
    assert found.ranks == 1  # the preset is for CPUs
    assert without_name(found.arguments) == [f"DATA_PATH={SPEECHES}", "@records/presets/cpu_1mb.env", "NUM_LAYERS=2"]
    config, _ = train_gpt.load_config(found.arguments, os.environ)
    assert (config.num_layers, config.mlp_slope, config.max_wallclock_seconds) == (2, 0.1, 599)
    assert start.plan(["DEVICE=auto"], "cpu_1mb").ranks == 2
    monkeypatch.setenv("RUN_ID", "")  # an empty variable is not set
    assert without_name(start.plan(["DEVICE=CPU"], "").arguments)[-1] == "DEVICE=CPU"
    (place / "records/presets/mine.env").write_bytes(b"\xef\xbb\xbf# tokenizer: caseops2048\r\nDEVICE=cpu\r\n")
    assert without_name(start.plan([], "mine").arguments) == [f"DATA_PATH={SPEECHES}", "@records/presets/mine.env"]


@pytest.mark.parametrize("words, preset, message", [
    (["NUM_LAYER=2"], "", "did you mean NUM_LAYERS"), (["NUM_LAYERS=nine"], "", "NUM_LAYERS='nine'"),
    ([], "rehearsal", "has no line like '# tokenizer: sp1024'"), ([], "quik", "there is no .*quik.env; .*: cpu_1mb .*quick"),
    (["DATA_PATH=mine"], "", "DATA_PATH=mine does not exist in .*; you may mean DATA_PATH=.*/other/mine"),
    (["DATA_PATH=other/mine"], "", "has no .*_val_.*.bin: .*: '/my envs/python' data/prepare.py other/mine --tokenizer unigram1024 --out data/datasets/mine$"),
    (["INIT_FROM=gone.ptz"], "", "^INIT_FROM=gone.ptz does not exist in "), (["RESUME=gone.pt"], "", "^RESUME=gone.pt does not exist in "),
    (["DATA_PATH=x"], "cpu_1mb", "you may mean DATA_PATH=data/datasets/diary or DATA_PATH='data/datasets/my plays'$")])
def test_mistakes_are_found_before_anything_is_fetched(place, calls, monkeypatch, words, preset, message):
    Path("other/mine").mkdir(parents=True)
    for name in ("diary", "my plays"):
        write_manifest(Path("data/datasets", name), 3_000_000)
    monkeypatch.setenv("OLDPWD", str(place / "other"))
    monkeypatch.setattr(sys, "executable", "/my envs/python")
    with pytest.raises(ValueError, match=message):
        start.plan(words, preset)
    assert not calls


def test_a_mistake_in_a_preset_is_told_to_those_who_use_it(place, monkeypatch):
    (place / "records/presets/mine.env").write_text("# tokenizer: sp1024\nNUM_LAYERS 4\n")
    run_script(monkeypatch, start, "--check", "--preset", "quick")
    with pytest.raises(SystemExit, match="^run.sh: records/presets/mine.env: 'NUM_LAYERS 4' is not VARIABLE=value$"):
        run_script(monkeypatch, start, "--check", "--preset", "mine")


@pytest.mark.parametrize("counted", [0, 1])  # device_count asks the driver's library, however old that is
def test_the_cpu_does_not_train_where_pytorch_cannot_use_the_gpus(place, calls, monkeypatch, counted):
    monkeypatch.setattr(train_gpt.torch.cuda, "device_count", lambda: counted)
    monkeypatch.setattr(start, "gpu_names", lambda: ["Tesla T4"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ValueError, match="PyTorch cannot use this machine's GPUs: install a build"):
        start.plan([], "")
    assert start.plan(["DEVICE=cpu"], "").ranks == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert start.plan([], "").ranks == 1


def test_where_pytorch_cannot_compile_it_is_not_asked_to(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(start, "ROOT", Path("/my/folder"))
    monkeypatch.setattr(start.sys, "platform", "linux")
    monkeypatch.setattr(start.shutil, "which", lambda name: "/usr/bin/g++")
    monkeypatch.setattr(start.sysconfig, "get_path", lambda name: str(tmp_path))
    assert start.suit_machine(gpus=0) == {"COMPILE": "0"} and start.suit_machine(gpus=1) == {}
    (tmp_path / "Python.h").touch()
    assert start.suit_machine(gpus=0) == {}
    monkeypatch.setattr(start, "ROOT", Path("/my folder"))
    assert start.suit_machine(gpus=1) == {"COMPILE": "0"}
    assert capsys.readouterr().out.splitlines()[1].startswith("The path of this folder has a space")


def test_a_run_is_resumed_with_the_settings_that_it_began_with(place, monkeypatch):
    """What the user gives now wins. A preset is given again, or if it has changed, what it set."""
    data, preset = make_shards(place), Path("records/presets/wide.env")
    preset.write_text("# tokenizer: byte260\nMODEL_DIM=64\n")
    words = [word for word in tiny_arguments(data, RUN_ID="mine", OUT_DIR="", CHECKPOINT_EVERY=4) if "MODEL_DIM" not in word]
    run_here(monkeypatch, place, f"@{preset}", *words)
    checkpoint = "logs/mine/checkpoints/mine_00000004.pt"
    monkeypatch.setenv("SEED", "1337")
    for words in (["RUN_ID=mine", "RESUME=auto"], ["RESUME=auto"], [f"RESUME={checkpoint}"], ["RESUME=auto", "ITERATIONS=6"]):
        found = start.plan(words, "").arguments
        assert found[-len(words):] == words and len(found) == len({word.split("=")[0] for word in found})
        assert {f"DATA_PATH={data}", f"@{preset}", "RUN_ID=mine"} <= set(found) and "SEED=1337" not in found
    run_here(monkeypatch, place, *found)
    assert Path(checkpoint.replace("4.pt", "6.pt")).exists()
    preset.write_text("# tokenizer: byte260\nMODEL_DIM=32\n")
    assert "MODEL_DIM=64" in (found := start.plan(["RESUME=auto"], "").arguments) and f"@{preset}" not in found
    for log in place.glob("logs/*.jsonl"):
        log.write_text("damaged")
    assert "MODEL_DIM=64" not in start.plan([f"RESUME={checkpoint}", f"DATA_PATH={data}"], "").arguments


def begin(log: str, step: int, then: str = "checkpoint", **settings) -> None:
    """Write the log of a run that has these settings, and an event after so many steps."""
    overrides = {name: [text, "argument"] for name, text in settings.items()}
    lines = [{"event": "config", "config": settings, "overrides": overrides, "world_size": 1},
             {"event": then, "step": step, "file": f"mine_{step:08d}.pt"}]
    Path("logs").mkdir(exist_ok=True)
    Path("logs", log).write_text("".join(json.dumps(event) + "\n" for event in lines))


def test_a_run_without_a_checkpoint_is_begun_again_or_if_it_has_ended_refused(place, calls, capsys):
    """Begun again with its own settings; a name that is not known begins."""
    words = ["RUN_ID=diary", "RESUME=auto"]
    write_manifest(Path("mine"), 3_000_000)
    begin("diary.jsonl", 4, "train", DATA_PATH="mine", OUT_DIR="logs/diary", SEED="7")
    assert {"DATA_PATH=mine", "SEED=7", *words} <= set(start.plan(words, "").arguments)
    assert "There is no checkpoint: diary begins again, with the settings of logs/diary.jsonl" in capsys.readouterr().out
    assert "DATA_PATH=other" in start.plan([*words, "DATA_PATH=other"], "").arguments
    begin("diary.jsonl", 4, "final", DATA_PATH="mine", OUT_DIR="logs/diary", SEED="7")
    with pytest.raises(ValueError, match="RUN_ID=diary has ended .*events.py diary says what it left"):
        start.plan(words, "")
    Path("logs/diary").mkdir()
    Path("logs/diary/final_model.int8.ptz").touch()
    with pytest.raises(ValueError, match="as a new run: .*DATA_PATH=mine INIT_FROM=logs/diary/final_model.int8.ptz$"):
        start.plan(words, "")
    assert not calls
    Path("logs/empty.jsonl").touch()
    for name in ("x", "empty", ""):
        assert f"DATA_PATH={SPEECHES}" in start.plan(["RESUME=auto", f"RUN_ID={name}"], "").arguments


def test_checkpoints_are_found_where_the_log_of_their_run_says(place):
    """Unless that log is damaged, or of an older version, or they are gone: then in logs/, as without RUN_ID."""
    def settings_found(*words):
        return " ".join(word for word in start.plan([*words, "RESUME=auto"], "").arguments if word[:4] in ("SEED", "OUT_"))

    for folder in ("far", "logs/mine"):
        Path(folder, "checkpoints").mkdir(parents=True)
    older, far = Path("logs/mine.1767225600000000000.jsonl"), Path("far/checkpoints/mine_00000004.pt")
    far.touch()
    Path("logs/mine/checkpoints/mine_00000008.pt").touch()
    begin(older.name, 8, SEED="1")
    begin("mine.jsonl", 4, SEED="2", OUT_DIR="far")
    assert settings_found("RUN_ID=mine") == "SEED=2 OUT_DIR=far" and settings_found() == "SEED=1"
    far.unlink()
    assert settings_found("RUN_ID=mine") == "SEED=1"
    Path("logs/mine.jsonl").write_text("damaged")
    assert settings_found("RUN_ID=mine") == "SEED=1"
    older.unlink()
    begin("mine.jsonl", 8, SEED="3")
    assert settings_found("RUN_ID=mine") == "SEED=3"


# ---- The view ----------------------------------------------------------------------------------


def progress_of(limit_s: float, iterations: int, val_loss_every: int) -> start.Progress:
    progress = start.Progress()
    config = {"MAX_WALLCLOCK_SECONDS": limit_s, "ITERATIONS": iterations, "VAL_LOSS_EVERY": val_loss_every}
    assert progress.read({"event": "config", "config": config}, 0) == ""
    return progress


def train_event(step: int, seconds: float) -> dict:
    return {"event": "train", "step": step, "train_time_ms": 1000 * seconds, "tok_per_sec": 23456.7, "epoch": 0.123}


@pytest.mark.parametrize("limit_s, iterations, wanted", [
    (100, 20_000, "20 %  1:20 left"), (0, 50, "20 %  1:20 left"), (100, 1000, "20 %  1:20 left"), (0, 20_000, "  0 %  666 min left")])
def test_what_ends_a_run_first_is_what_is_left(limit_s, iterations, wanted):
    progress = progress_of(limit_s, iterations, 0)
    assert progress.line(5) == (0, "starting")
    progress.read(train_event(10, 20), 100)
    done, text = progress.line(100)
    assert wanted in text and text.endswith("  23,457 tokens/s  epoch 0.12")
    assert done == pytest.approx(0.2 if "20 %" in wanted else 0.0005)


def test_between_two_events_the_bar_moves_as_far_as_the_next_one_or_the_next_validation():
    progress = progress_of(100, 20_000, 20)
    val = {"event": "val", "val_loss": 2.0, "val_bpb": 1.23456}
    assert progress.read(val | {"step": 0, "train_time_ms": 0}, 0) == "step 0, 0 s: 1.2346 bits per byte"
    for step, seen_s in ((8, 108), (16, 116)):
        progress.read(train_event(step, step), seen_s)
    assert [progress.line(now_s)[0] for now_s in (116, 118, 120, 130)] == pytest.approx([0.16, 0.18, 0.2, 0.2])
    assert "left  last score 1.2346  23,457" in progress.line(130)[1]
    progress.read(train_event(20, 20), 130)
    assert progress.line(130)[1].startswith(" 20 %  1:20 left  validating  ")
    assert progress.read(val | {"step": 20, "train_time_ms": 20_000, "val_bpb": None}, 140) == "step 20, 20 s: not finite"
    assert [progress.line(now_s)[0] for now_s in (140, 142, 144, 199)] == pytest.approx([0.2, 0.22, 0.24, 0.24])
    progress.read({"event": "export"}, 200)
    assert progress.line(200) == (1, "scoring the saved model")
    assert progress.read({"event": "final", "val_bpb": 1.25}, 201) == "the saved model: 1.2500 bits per byte"


def test_of_the_console_warnings_are_shown_and_phases_known():
    progress = progress_of(0, 1, 0)
    for line, kept, phase in [
            ("compiling: a minute", "", "compiling, a minute or more the first time"), ("warmup_step:1/2", "", "warming up"),
            ("WARNING: above SIZE_CAP=1", "WARNING: above SIZE_CAP=1", "warming up"), ("seed:1", "", "warming up"),
            ("RESUME=auto finds no checkpoint", "RESUME=auto finds no checkpoint", "warming up")]:
        assert (progress.hear(line), progress.phase) == (kept, phase)
    progress.hear("stopped: signal 2 after step:34; set RESUME=auto to go on")
    assert progress.step == 34


STAND_IN = """
import json, pathlib, signal, sys, time
def stop(number, frame):
    global signals
    signals += 1
signals = 0
signal.signal(signal.SIGINT, stop)
config = dict(MAX_WALLCLOCK_SECONDS=100, ITERATIONS=50, VAL_LOSS_EVERY=0, DTYPE="float32", DATA_PATH="my texts", OUT_DIR="logs/x")
events = [dict(event="config", config=config, overrides={"DATA_PATH": ["my texts", "argument"], "NUM_LAYERS": ["3", "argument"]}),
          dict(event="val", step=0, train_time_ms=0, val_loss=2, val_bpb=3.21),
          dict(event="train", step=25, train_time_ms=9000, tok_per_sec=9, epoch=1)]
pathlib.Path("logs").mkdir()
pathlib.Path("logs/x.jsonl").write_text("".join(json.dumps(event) + "\\n" for event in events))
print("compiling: a minute\\nlogs/x.txt\\nseed:1", flush=True)
print("something is wrong", file=sys.stderr, flush=True)
while not signals:
    time.sleep(0.01)
time.sleep(0.7)
print("warning: signals:", signals, flush=True)
print("stopped: signal 2 after step:26; there is no checkpoint", flush=True)
sys.exit(130)
"""
MOVING = r" \d\d %  0:0\d left  last score 3\.2100  9 tokens/s  epoch 1\.00"
STARTED = """
import sys
sys.path.insert(0, sys.argv[1])
import start
start.SCRIPT = "stand_in.py"
outcome = start.train(start.Start([], 1), "")
start.conclude(outcome)
sys.exit(outcome.status)
"""


def watch_until(stream: int, text: str, shown="") -> str:
    """Read a terminal until it shows a text, or its program ends."""
    deadline = time.monotonic() + 30
    while text not in shown and time.monotonic() < deadline:
        try:
            shown += os.read(stream, 1000).decode()
        except OSError:  # Linux says so that the other end is closed.
            break
    return shown


def test_on_a_terminal_a_line_moves_and_ctrl_c_reaches_the_trainer_once(tmp_path):
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (30, 120))
    process = subprocess.Popen([sys.executable, "-c", STARTED, REPOSITORY / "tools"], cwd=tmp_path, stdin=theirs, stdout=theirs,
                               stderr=theirs, start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
    os.close(theirs)
    shown = watch_until(ours, " left ")
    os.write(ours, b"\x03")
    shown = watch_until(ours, "no such text", shown)
    assert process.wait(timeout=30) == 130
    assert "step 0, 0 s: 3.2100 bits per byte\r\n" in shown and "\rsomething is wrong\r\n" in re.sub(" {10,}\r", "", shown)
    assert re.search(MOVING, shown) and "seed:1" not in shown
    assert "warning: signals: 1\r\n" in shown
    assert "Stopped by Ctrl-C after 26 steps." in shown
    assert "train_gpt.py 'DATA_PATH=my texts' NUM_LAYERS=3    # again" in shown


def test_signals_to_this_process_alone_reach_the_trainer_and_without_a_terminal_lines_are_plain(tmp_path, capfd):
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    process = subprocess.Popen([sys.executable, "-c", STARTED, REPOSITORY / "tools"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    lines = iter(process.stdout.readline, "")
    shown = [next(lines)]
    while " left " not in shown[-1]:
        shown.append(next(lines))
    assert re.fullmatch(MOVING + "\n", shown[-1]) and "compiling, a minute or more the first time\n" in shown
    process.send_signal(signal.SIGINT)
    shown = list(lines)
    assert process.wait(timeout=30) == 130 and "warning: signals: 1\n" in shown
    assert "something is wrong\n" in capfd.readouterr().err


def test_the_trainer_outlives_the_reader_of_its_output(tmp_path):
    """As `| head` ends: signals still reach the trainer, and its status is returned."""
    talking = STAND_IN.replace("    time.sleep(0.01)\n", "    time.sleep(0.01)\n    print('warning: still here', flush=True)\n")
    (tmp_path / "stand_in.py").write_text(talking)
    process = subprocess.Popen([sys.executable, "-c", STARTED, REPOSITORY / "tools"], cwd=tmp_path, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert any("still here" in line for line in iter(process.stdout.readline, ""))
    process.stdout.close()
    time.sleep(0.5)  # in which it writes again
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    assert process.stderr.read() == "something is wrong\n"


def test_after_the_training_ctrl_c_reaches_the_tracker_and_it_is_not_waited_for_long(tmp_path, monkeypatch, capsys):
    """It would wait for ever for a server, or for an event that a full disk has lost."""
    def wait(seconds):
        signal.raise_signal(signal.SIGINT)
        raise subprocess.TimeoutExpired("track.py", seconds)

    (tmp_path / "stand_in.py").write_text(STAND_IN.replace("while not signals", "while False").replace("sys.exit(130)", ""))
    monkeypatch.chdir(tmp_path)
    child = subprocess.Popen([sys.executable, "stand_in.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    tracking = Mock(wait=wait)
    monkeypatch.setattr(start.subprocess, "Popen", lambda *words, **more: tracking)
    with start.signals_forwarded(child):
        outcome = start.follow(child, "wandb")
    assert outcome.status == 0 and tracking.method_calls == [call.send_signal(signal.SIGINT), call.kill()]
    assert capsys.readouterr().out.endswith(" tools/track.py wandb x --once\n")


def test_a_tracker_starts_when_the_log_has_begun(tmp_path, monkeypatch):
    """The trainer names its log before it waits for nvidia-smi, which takes seconds on some machines."""
    monkeypatch.chdir(tmp_path)
    log, seen = Path("logs", "x.jsonl"), []
    log.parent.mkdir()
    log.touch()
    val = json.dumps({"event": "val", "step": 0, "train_time_ms": 0, "val_bpb": 1})
    script = f"import time; print('logs/x.txt', flush=True); time.sleep(1.5); open('{log}', 'w').write('{val}\\n')"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    monkeypatch.setattr(start.subprocess, "Popen", lambda *words, **more: seen.append(log.read_text()) or Mock())
    assert start.follow(child, "wandb").status == 0
    assert seen == [f"{val}\n"]


def test_after_a_signal_to_torchrun_the_run_was_stopped_and_did_not_fail(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = "print('stopped: signal 10 after step:26; there is no checkpoint', flush=True); exit(1)"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    outcome = start.follow(child, "")
    assert (outcome.status, outcome.progress.step) == (138, 26)


def test_the_next_commands_are_for_the_repository_wherever_run_sh_was_called(place, monkeypatch, capsys):
    begin("mine.jsonl", 4, "train", OUT_DIR="logs/mine", DTYPE="float32", DATA_PATH="mine")
    there = f"The next commands are for the folder {place}.\n"
    memory = " If memory ran out, set a lower MICRO_BATCH_TOKENS."  # as after Linux's OOM killer
    for called_from, number, said in ((place, 2, "Ctrl-C after 4 steps.\n"), (place / "logs", 9, f"SIGKILL after 4 steps.{memory}\n{there}")):
        monkeypatch.setenv("OLDPWD", str(called_from))
        start.conclude(start.Outcome(128 + number, Path("logs/mine.jsonl"), start.Progress(step=4), 1.0))
        assert capsys.readouterr().out.startswith(f"Stopped by {said}logs/mine.jsonl: the run has not ended")
    Path("logs/empty.jsonl").touch()  # Ctrl-C before the first event
    begin("lost.jsonl", 4, "final")
    for name, said in (("empty", "logs/empty.jsonl is empty: the run has not begun"), ("lost", "'val_bpb'")):
        start.conclude(start.Outcome(0, Path(f"logs/{name}.jsonl"), start.Progress(), 1.0))
        assert capsys.readouterr().out == f"{there}There is no summary: {said}\n"
    monkeypatch.setattr(start, "summarize", lambda log: "final_model.pt")
    monkeypatch.setattr(start.subprocess, "run", Mock(side_effect=KeyboardInterrupt))  # Ctrl-C during the sample
    start.conclude(start.Outcome(0, Path("logs/mine.jsonl"), start.Progress(), 1.0))
    assert capsys.readouterr().out.endswith("final_model.pt\n")


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="only Linux tells how long threads wait for a core")
def test_busy_cores_are_said(monkeypatch, capsys):
    times = {}
    start.read_core_times(os.getpid(), times)
    assert str(os.getpid()) in times and times[str(os.getpid())][0] > 0
    for share, status, step, says in ((0.42, 0, 9, "this run had 42 % of the time"), (0.51, 0, 9, ""), (0.42, 130, 9, ""), (0.42, 0, 0, "")):
        start.conclude(start.Outcome(status, None, start.Progress(step=step), share))
        said = capsys.readouterr().out
        assert says in said and bool(said) == bool(says)


@pytest.mark.parametrize("found", [None, ModuleSpec("wandb", None)])  # the folder that another environment's has left
def test_a_tracker_is_asked_for_before_the_start(place, monkeypatch, found):
    monkeypatch.setattr(start, "find_spec", lambda name: found)
    with pytest.raises(SystemExit, match="--track wandb needs a package: .*python.* -m pip install wandb"):
        run_script(monkeypatch, start, "--track", "wandb", "DATA_PATH=x")


@pytest.mark.slow
@pytest.mark.parametrize("card, gpus, wanted", [
    ("cuda 9.0 80", 1, r"1 x pretended, bfloat16, attention cudnn, [\d,]+ tokens/s, 0\.7 GiB of its memory"),
    ("cuda 7.5 15", 1, r"1 x pretended, float16, attention efficient, [\d,]+ tokens/s, 0\.7 GiB of its memory"),
    ("mps 0.0 0", 0, r"mps, float32, attention math, [\d,]+ tokens/s")], ids=["H100", "T4", "Mac"])
def test_the_first_minute_on_a_gpu_says_what_was_found(place, monkeypatch, capfd, card, gpus, wanted):
    """On cards that are not there; the preset's settings, with a smaller model and a text of bytes."""
    monkeypatch.setattr(start, "SCRIPT", str(REPOSITORY / "tests" / "pretended.py"))
    monkeypatch.setenv("PRETEND", card)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    has_gpus(monkeypatch, gpus)
    data = make_shards(place)
    sizes = dict(MODEL_DIM=32, NUM_HEADS=2, NUM_KV_HEADS=1, NUM_LAYERS=2, TRAIN_SEQ_LEN=32, TRAIN_BATCH_TOKENS=512, ITERATIONS=8,
                 VOCAB_SIZE=260, TOKENIZER_PATH="byte260", DATA_PATH=data)
    with pytest.raises(SystemExit, match="^0$"):
        run_script(monkeypatch, start, "--preset", "gpu_minute", *(f"{name}={value}" for name, value in sizes.items()))
    shown = capfd.readouterr().out
    assert re.search(f"\nmachine   {wanted}", shown), shown
