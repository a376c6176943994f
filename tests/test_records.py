"""Records and tracks: what the tools make is accepted, and each mistake that a person can make is named."""

import argparse
import json
import re
import shutil
from hashlib import sha256
from pathlib import Path
from unittest.mock import Mock

import make
import probe
import pytest
import train_gpt
import verify
from conftest import REPOSITORY, TINY, make_shards, run_here, run_script, tiny_arguments
from events import read_events

pytest.importorskip("matplotlib", reason="records have pictures: pip install -r requirements-dev.txt")
pytest.importorskip("scipy", reason="records are tested for significance: pip install -r requirements-dev.txt")

BYTE260 = {"original_per_decoded_byte": 1.25, "tokenizer_sha256": sha256(b"byte260").hexdigest(),
           "val_tokens": [3000, 3000], "val_bytes": [2999, 2999]}
TRACK = {"title": "Tiny", "max_bytes": 200_000, "max_train_seconds": 600, "max_eval_seconds": 600, "max_export_seconds": 120,
         "max_threads": 2, "max_world_size": 2, "min_seeds": 3, "settings": {"OVERFIT": [False], "INIT_FROM": [""]},
         "divisions": {"tiny": {"get": "make_it.py {tokenizer}", "set": "DATA_PATH={tokenizer} VOCAB_SIZE={size}",
                                "scored": {"byte260": BYTE260}}}}
CAP = {"MAX_WALLCLOCK_SECONDS": "600"}


def run_make(monkeypatch, *arguments: str):
    with pytest.raises(SystemExit) as end:
        run_script(monkeypatch, make, *arguments)
    return end.value.code


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A repository with six finished runs and the two records made of them, the second with the first as its base."""
    root, patch = tmp_path_factory.mktemp("repository"), pytest.MonkeyPatch()
    make_shards(root)
    (root / "records" / "track_tiny").mkdir(parents=True)
    (root / "records" / "track_tiny" / "track.json").write_text(json.dumps(TRACK))
    shutil.copy(REPOSITORY / "train_gpt.py", root / "train_gpt.py")
    (root / "records" / "README.md").write_text(f"# Records\n\n{make.BEGIN}old\n{make.END}\nMore.\n")
    for module in (verify, make):
        patch.setattr(module, "ROOT", root)
    for name, changes in (("Control", {}), ("Slow", {"MATRIX_LR": "0.001", "TIED_EMBED_LR": "0.001"})):
        run_ids = [f"{name}_seed{seed}" for seed in (1, 2, 3)]
        for run_id in run_ids:
            own = {"SEED": run_id[-1], "RUN_ID": run_id, "OUT_DIR": f"logs/{run_id}"}
            run_here(patch, root, *tiny_arguments("tiny", **own, **CAP, **changes))
        base = next((f"track_tiny/{path.name}" for path in root.glob("records/*/*_Control")), "")
        assert run_make(patch, "--track", "track_tiny", "--division", "tiny", "--name", name, "--author", "me", "--blurb",
                        "What is new.", "--base", base, *["--in-turn"][:len(base)], "--runs", ",".join(run_ids)) == 0
    yield root
    patch.undo()


@pytest.fixture
def records(root, tmp_path):
    """A copy of the records; returns the folder of the second one, which may be spoilt."""
    shutil.copytree(root / "records", tmp_path / "records")
    return next((tmp_path / "records" / "track_tiny").glob("*_Slow"))


def edit(path: Path, pattern: str, new: str) -> None:
    """Replaces what a pattern finds first; it has to find something."""
    changed, found = re.subn(pattern, new, path.read_text(), count=1)
    assert found, (path, pattern)
    path.write_text(changed)


def change(folder: Path, kind: str, **values) -> None:
    """Changes the last event of a kind in the .jsonl of seed 2."""
    path = folder / "train_seed2.jsonl"
    events = read_events(path)
    [event for event in events if event["event"] == kind][-1].update(values)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def put(path: Path, **values) -> None:
    """Changes values of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def pin(folder: Path, **values) -> None:
    """Changes values of the track's table of a tokenizer."""
    put(folder.parent / "track.json", divisions={"tiny": {"scored": {"byte260": {**BYTE260, **values}}}})


MISTAKES = {
    "a resumed run": (lambda f: change(f, "train", event="resume"), "it was resumed, but a record is one run from its first step to its end"),
    "a link": (lambda f: ((f / "curve.png").unlink(), (f / "curve.png").symlink_to("README.md")), "curve.png is missing, or a link"),
    "an unfinished run": (lambda f: change(f, "final", event="other"), "train_seed2: a log is missing, unfinished or damaged"),
    "a script changed after the runs": (lambda f: edit(f / "train_gpt.py", "DEVICES", "DEVICE"), "train_seed2: its script is not train_gpt.py"),
    "code that is not counted": (lambda f: change(f, "export", code_bytes=9), "train_seed2: its script is not train_gpt.py"),
    "a score by other bytes": (lambda f: change(f, "final", val_bpb=1.0), "val_bpb 1.0 is not val_loss . tokens", "train_seed2.log lacks the score of train_seed2.jsonl"),
    "a log that is half copied": (lambda f: edit(f / "train_seed2.log", "final_int8(?s:.*)", ""), "train_seed2.log lacks the score of train_seed2.jsonl"),
    "too few seeds": (lambda f: [path.unlink() for path in f.glob("*_seed3.*")], "the track asks for 3 seeds; there are 2"),
    "the log of another seed": (lambda f: edit(f / "train_seed2.jsonl", '"SEED": 2', '"SEED": 3'), "train_seed2.log has SEED=3"),
    "other settings, another machine": (lambda f: (edit(f / "train_seed2.jsonl", '"MATRIX_LR": 0.001', '"MATRIX_LR": 0.1'), change(f, "config", gpu="T4", world_size=8)),
                                        "seed 2 differs in MATRIX_LR, world_size, gpu from seed 1"),
    "what the track forbids": (lambda f: (pin(f, val_tokens=[2000, 9000], val_bytes=[6000, 6000]), put(f.parent / "track.json", max_bytes=90_000, max_threads=5, max_eval_seconds=0, machine="H100"), edit(f / "train_seed1.jsonl", r'"world_size": 1, "threads": \d+', '"world_size": 2, "threads": 3')),
                               "2976 validation tokens of 2976 bytes are not those", r"bytes is [\d,]+, more than 90,000", "threads is 6, more than 5", "eval_seconds is .*, more than 0", "the GPU is none, not H100"),
    "too long a training": (lambda f: change(f, "val", train_time_ms=900e3), "train_seconds is 674, more than 600"),
    "too long an export": (lambda f: change(f, "export", elapsed_s=1e4), "export_seconds is .*, more than 120"),
    "other text": (lambda f: pin(f, val_tokens=[4000, 4000], train_shards_sha256=["0"], val_shards_sha256=["0"]),
                   "2976 validation tokens of 2976 bytes are not those of the division 'tiny'", "the train shards of tiny are not those", "the val shards of tiny"),
    "a slow clock": (lambda f: change(f, "val", elapsed_s=1e4), "its clock counts .* s of training in .* s"),
    "in turn with nothing": (lambda f: put(f / "submission.json", base=""), "in_turn needs a base of the same machine and versions, not ''"),
    "a base that was not trained in turn": (lambda f: put(f / "submission.json", in_turn=False), "against_base is .* but the logs give .*'p': None"),
    "a base of another machine": (lambda f: put(next(f.parent.glob("*_Control")) / "submission.json", hardware="2 cores of Other, 1 TFLOP/s"), "in_turn needs a base of the same machine and versions, not 'track_tiny/.*_Control"),
    "itself as a base": (lambda f: put(f / "submission.json", base=f"track_tiny/{f.name}"), "is not another record of track_tiny and the division 'tiny'"),
    "another tokenizer": (lambda f: pin(f, tokenizer_sha256="0"), "the tokenizer is not one of the division's"),
    "other files": (lambda f: ((f / "weights.bin").touch(), (f / "artifact_seed2.int8.ptz").unlink(), (f / "artifact_seed3.int8.ptz").write_bytes(b"")),
                    "artifact_seed2.int8.ptz is missing", "weights.bin does not belong in a record", "artifact_seed3.int8.ptz is not the artifact of the log"),
    "a renamed record": (lambda f: put(f / "submission.json", name="Other"), "submission.json is of track_tiny/.*_Other"),
}


def test_what_the_tools_make_is_accepted(root):
    for folder in sorted((root / "records" / "track_tiny").glob("*_*")):
        found, notes = verify.verify_record(folder)
        assert not found and "bits per byte, 3 seeds" in notes[0], found
        text, submission = (folder / "README.md").read_text(), json.loads((folder / "submission.json").read_text())
        assert f"    python records/track_tiny/{folder.name}/train_gpt.py COMPILE=0 " in text
    assert "`train_gpt.py`: unchanged." in text and "| MATRIX_LR |  | 0.001 |" in text
    assert re.search(r"against track_tiny/.*_Control: \+\d\.\d+ bits per byte; trained in turn, one-sided Welch", notes[1])
    table, score = (root / "records" / "README.md").read_text(), submission["val_bpb"] / 1.25  # of the original text
    assert re.search(rf"\| \d\.\d{{4}} ± .*_Control\) \|\n\| {score:.4f} ± \d\.\d{{4}} \| 3 seeds \| .*_Slow\) \|\n(?s:.*)\nMore\.\n", table)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(records, mistake, capsys):
    spoil, *messages = MISTAKES[mistake]
    spoil(records)
    assert not verify.report(records)
    found = capsys.readouterr().out
    assert all(re.search(f"REFUSED: .*{message}", found) for message in messages), found


def test_one_bad_folder_does_not_hide_the_others_and_is_named(records, monkeypatch, capsys):
    records.with_name("2026-01-03_Empty").mkdir()
    monkeypatch.setattr(verify, "ROOT", records.parents[2])
    with pytest.raises(SystemExit, match="^1$"):
        run_script(monkeypatch, verify)
    assert re.findall(r"^\S+_(\w+): (\w+)", capsys.readouterr().out, re.M) == [("Empty", "refused"), ("Control", "accepted"), ("Slow", "accepted")]
    put(records / "submission.json", val_bpb=1.0, hardware=None)
    assert re.findall(r"\[\S+_(\w+)\]\(track_tiny/", make.leaderboard(records.parents[1])) == ["Control"]


AGAIN = {
    "an artifact that git does not keep": (lambda f: (f / "artifact_seed2.int8.ptz").unlink(), "^artifact_seed2.int8.ptz is not in the folder, .*: put it there"),
    "another artifact": (lambda f: (f / "artifact_seed1.int8.ptz").rename(f / "artifact_seed2.int8.ptz"), "seed 2: its log says .*, but by its logits"),
    "other shards here": (lambda f: pin(f, train_shards_sha256=["0"]), "the train shards of tiny are not those"),
    "a model that reads a file": (lambda f: edit(f / "train_gpt.py", "return x if lane", "return x * bool(open(__file__)) if lane"), "it reads /.*train_gpt.py while"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", AGAIN)
def test_an_artifact_that_scores_otherwise_is_named(records, monkeypatch, kind):
    monkeypatch.setenv("MATRIX_LR", "wrong")  # of the environment, the trainer's variables do not count
    spoil, message = AGAIN[kind]
    found = verify.Findings()
    seed = verify.read_folder(records, TRACK, "tiny", found)[1]
    spoil(records)
    verify.rescore(records, "tiny", [seed], found)
    assert re.search(message, found[0])


@pytest.mark.parametrize("stride", [5, 40])  # of rows of 32, which are windows that move by 32 or more
def test_the_score_is_that_of_windows_where_the_track_counts_them(root, monkeypatch, stride):
    run_here(monkeypatch, root, *tiny_arguments("tiny", RUN_ID="windows", OUT_DIR="logs/windows", EVAL_STRIDE=stride, **CAP))
    events = read_events(root / "logs" / "windows.jsonl")
    last = {event["event"]: event for event in events}
    assert (last["windows"]["val_bpb"] == last["final"]["val_bpb"]) == (stride > 32)
    for kind in ("windows", "final"):
        seed = verify.summarize(events, "Running Python 3", "model_params:1", kind == "windows")
        text = probe.read_text(seed["settings"], root)
        found = probe.check_artifact(root / "train_gpt.py", root / "logs/windows/final_model.int8.ptz", seed["settings"], text, seed["val_bpb"], 1, seed["stride"])
        assert seed["eval_seconds"] == pytest.approx(sum(last[one]["eval_time_ms"] for one in ("windows", "final")) / 1000)
        assert seed["val_bpb"] == last[kind]["val_bpb"] and found == (pytest.approx(seed["val_bpb"], abs=1e-5), "")


@pytest.mark.parametrize("more, message", [
    (["DATA_PATH=/home/me/tiny"], "DATA_PATH must be relative to the repository"), (["@none.env"], "No such file .*none.env"),
    (["OVERFIT=1"], r"OVERFIT=True is not one of \[False\]"), (["NUM_LAYRS=3"], "did you mean NUM_LAYERS"),
    (["--seeds", "1,x"], "invalid literal .*'x'"), (["--seeds", "1,2,02"], "the track asks for 3 seeds; there are 2"),
    (["--runs", "Control_seed1,Control_seed1"], "File exists: .*train_seed1.log"), (["--division", ""], "--track, --name and --division are needed"), (["--division", "other"], "division 'other' must be one of tiny"),
    (["--name", "My MLP"], "--name 'My MLP' must be letters"), (["--track", "none"], "there is no .*none/track.json"),
    (["--name", "Control"], "_Control is there: choose another --name"), (["RESUME=auto", "SEED=5"], "RESUME, SEED cannot be set"), (["--ranks", "3"], "threads is 3, more than 2"), (["DEVICE=cuda"], "2 GPUs, but --ranks is 1; to use fewer GPUs, set CUDA_VISIBLE_DEVICES"), (["DEVICE=cuda", "--ranks", "4"], "2 GPUs, but --ranks is 4; .* in several machines, .* give --runs"), (["MAX_WALLCLOCK_SECONDS=0"], "MAX_WALLCLOCK_SECONDS=0 must be more than 0 and at most 600"),
    (["DATA_PATH=none"], r"no DATA_PATH=none with \*_val_\*\.bin.* with\n    \S*python\S* make_it.py byte260\nand set DATA_PATH=byte260 VOCAB_SIZE=260"),
    (tiny_arguments("tiny", **CAP), "^make.py: now they train")])
def test_mistakes_are_found_before_the_runs(root, monkeypatch, capsys, tmp_path, more, message):
    monkeypatch.chdir(tmp_path)  # The paths in settings are relative to the repository.
    monkeypatch.setattr(make, "run_seeds", Mock(side_effect=ValueError("now they train")))
    monkeypatch.setattr(train_gpt.torch.cuda, "device_count", lambda: 2)
    found = run_make(monkeypatch, "--track", "track_tiny", "--division", "tiny", "--name", "New", "MAX_WALLCLOCK_SECONDS=10", "DEVICE=cpu", *more)
    assert re.search(message, f"{capsys.readouterr().err if found == 2 else found}")


def test_finished_runs_are_kept_and_a_trainer_that_is_left_keeps_others_away(root, monkeypatch, capsys):
    monkeypatch.setattr(make, "launcher", lambda ranks: ["sh", "-c", "trap 'exit 3' TERM; sleep 5 & sleep 2; kill $PPID; wait"])  # as a scheduler
    options, settings = argparse.Namespace(name="Control", ranks=1, seeds=[1, 2], division="tiny"), {**TINY, "DATA_PATH": "tiny", **CAP}
    assert make.run_seeds(options, TRACK, settings) == ["Control_seed1", "Control_seed2"]
    assert capsys.readouterr().out.count("has already finished") == 2
    with pytest.raises(ValueError, match="^seed 1: bytes is .*, more than 90,000; the other seeds are not trained"):
        make.run_seeds(options, {**TRACK, "max_bytes": 90_000}, settings)
    for message in ("Control_seed1 ended with status 3: see above; then run the same command again", "or a trainer that it has left"):
        with pytest.raises(ValueError, match=message):
            make.run_seeds(options, TRACK, {**settings, "MATRIX_LR": "0.3"})
    make.signal.signal(make.signal.SIGTERM, make.signal.SIG_DFL)


def test_settings_are_the_bases_then_those_of_files_then_the_commands(root):
    base = next(root.glob("records/track_tiny/*_Control")).name
    options = argparse.Namespace(base=f"track_tiny/{base}", settings=["NUM_LAYERS=5", f"@{REPOSITORY}/records/presets/quick.env"])
    found = make.plan_settings(options, {"settings": {"DEVICE": ["cuda"]}})
    assert found.items() >= {"NUM_LAYERS": "5", "MODEL_DIM": "192", "DEVICE": "cpu", "TOKENIZER_PATH": "byte260"}.items()
    options.settings = ["DATA_PATH=others"]  # whose manifest has these
    assert not {"TOKENIZER_PATH", "TOKENIZER_SHA256", "VOCAB_SIZE"} & make.plan_settings(options, {}).keys()


def test_a_record_of_the_open_track_is_written_again_and_its_notes_are_kept(root, monkeypatch, capsys):
    shutil.copytree(REPOSITORY / "records" / "track_open", root / "records" / "track_open")
    assert run_make(monkeypatch, "--track", "track_open/", "--division", "own", "--name", "Alone", "--author", "me", "--runs", "Control_seed1") == 0
    folder, said = next(root.glob("records/track_open/*_Alone")), capsys.readouterr().out
    assert f"which is this computer; if the runs are of another one, name that in {folder}/submission.json" in said
    (folder / "README.md").write_text((folder / "README.md").read_text() + "Written by hand.\n")
    put(folder / "submission.json", blurb="Another blurb.", author="A | B\nC")
    assert run_make(monkeypatch, "--again", str(folder)) == 0
    assert re.search(r"Another blurb\.(?s:.*)## Notes\nWritten by hand\.\n\Z", (folder / "README.md").read_text())
    assert re.search(r"\| one seed \| .* \| A \\\| B C \| \[", (root / "records" / "README.md").read_text())
    edit(folder / "README.md", "## Notes", "## My notes")  # to write it again would lose them
    assert "has no line '## Notes'" in run_make(monkeypatch, "--again", str(folder))


def test_all_committed_records_are_as_they_say_and_can_be_bases(monkeypatch):
    records = REPOSITORY / "records"
    assert make.leaderboard(records) == (records / "README.md").read_text(encoding="utf-8")
    monkeypatch.setattr(make, "ROOT", REPOSITORY)
    for folder in {path.parent for path in records.glob("track_*/*/submission.json")}:
        assert verify.verify_record(folder)[0] == [], folder
        settings = make.plan_settings(argparse.Namespace(base=f"{folder.parent.name}/{folder.name}", settings=[]), {})
        train_gpt.load_config([f"{name}={text}" for name, text in settings.items()], {})


@pytest.mark.parametrize("preset, track", [("h100_8gpu_16mb", "track_10min_16mb"), ("h100_1gpu_16mb", "track_10min_16mb_1gpu"),
                                           ("cpu_1mb", "track_10min_1mb_cpu"), ("cpu_1mb_avx2", "track_10min_1mb_cpu")])
def test_every_preset_passes_the_checks_of_its_track_except_for_missing_data(root, preset, track, monkeypatch):
    file, folder = REPOSITORY / "records" / "presets" / f"{preset}.env", REPOSITORY / "records" / track / "2026-01-31_Any"
    rules = json.loads((folder.parent / "track.json").read_text())
    tokenizer = re.search(r"# tokenizer: (\w+)", file.read_text())[1]
    options = argparse.Namespace(base="", division=[*rules["divisions"]][0], seeds=[1, 2, 3], ranks=1, settings=[f"@{file}"])
    monkeypatch.setattr(train_gpt.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(make.common, "gpu_names", lambda: ["NVIDIA T400", "NVIDIA H100 80GB HBM3"])
    with pytest.raises(ValueError, match=f"no DATA_PATH=data/datasets/fineweb10B_sp1024 .*\n    .* data/.* {tokenizer} .*\nand set DATA_PATH=.*{tokenizer}"):
        make.check_plan(options, folder, make.plan_settings(options, rules))
