"""Records and tracks: what the tools make is accepted, and each mistake that a person can make is named."""

import argparse
import json
import re
import shutil
import sys
import time
from hashlib import sha256
from pathlib import Path
from unittest.mock import Mock

import common
import make
import pytest
import train_gpt
import verify
from conftest import REPOSITORY, make_shards, run_here, run_script, tiny_arguments

pytest.importorskip("matplotlib", reason="records have pictures: pip install -r requirements-dev.txt")
pytest.importorskip("scipy", reason="records are tested for significance: pip install -r requirements-dev.txt")

TRACK = {"title": "Tiny", "max_bytes": 200_000, "max_train_seconds": 600, "max_eval_seconds": 600, "max_export_seconds": 120,
         "max_threads": 64, "max_world_size": 1, "min_seeds": 3, "settings": {"OVERFIT": [False], "INIT_FROM": [""]},
         "divisions": {"tiny": {"get": "make_it.py {tokenizer}", "set": "DATA_PATH={tokenizer} VOCAB_SIZE={size}",
                                "scored": {"byte260": {"original_per_decoded_byte": 1.25, "tokenizer_sha256": sha256(b"byte260").hexdigest(),
                                                       "val_tokens": [3000, 3000], "val_bytes": [2999, 2999]}}}}}
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
            settings = {"SEED": run_id[-1], "RUN_ID": run_id, "OUT_DIR": f"logs/{run_id}", **CAP, **changes}
            run_here(patch, root, *tiny_arguments("tiny", **settings))
        base = next((f"track_tiny/{path.name}" for path in root.glob("records/*/*_Control")), "")
        assert run_make(patch, "--track", "track_tiny", "--division", "tiny", "--name", name, "--author", "me", "--blurb",
                        "What is new.", "--base", base, *["--in-turn"][:len(base)], "--runs", ",".join(run_ids)) == 0
        patch.setattr(make, "draw", lambda groups, out: out.write_bytes(b""))
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
    lines = path.read_text().splitlines()
    at = max(i for i, line in enumerate(lines) if json.loads(line)["event"] == kind)
    lines[at] = json.dumps({**json.loads(lines[at]), **values})
    path.write_text("\n".join(lines) + "\n")


def setting(folder: Path, name: str, new: str, seeds: str = "2") -> None:
    for seed in seeds:
        edit(folder / f"train_seed{seed}.jsonl", f'"{name}": [^,]*', f'"{name}": {new}')


def claims(folder: Path) -> dict:
    return json.loads((folder / "submission.json").read_text())


def claim(folder: Path, **values) -> None:
    (folder / "submission.json").write_text(json.dumps({**claims(folder), **values}))


def track(folder: Path, **values) -> None:
    (folder.parent / "track.json").write_text(json.dumps({**TRACK, **values}))


def pin(folder: Path, **values) -> None:
    tiny = TRACK["divisions"]["tiny"]
    track(folder, divisions={"tiny": {**tiny, "scored": {"byte260": {**tiny["scored"]["byte260"], **values}}}})


MISTAKES = {
    "a resumed run": (lambda f: change(f, "train", event="resume"), "a record is one run from its first step to its end"),
    "a link": (lambda f: ((f / "curve.png").unlink(), (f / "curve.png").symlink_to("README.md")), "curve.png must be files, not links"),
    "a loss that is not finite": (lambda f: change(f, "train", train_loss=None), "train_seed2: a loss is not finite"),
    "an unfinished run": (lambda f: change(f, "final", event="other"), "train_seed2: a log is missing, unfinished or damaged"),
    "a log that is missing": (lambda f: (f / "train_seed2.jsonl").unlink(), "train_seed2: a log is missing, unfinished or damaged"),
    "a script changed after the runs": (lambda f: edit(f / "train_gpt.py", "DEVICES", "DEVICE"), "are not train_gpt.py's"),
    "a score by other bytes": (lambda f: change(f, "final", val_bpb=1.0), "val_bpb 1.0 is not val_loss . tokens"),
    "too few seeds": (lambda f: [path.unlink() for path in f.glob("*_seed3.*")], "the track asks for 3 seeds; there are 2"),
    "the log of another seed": (lambda f: setting(f, "SEED", "3"), "train_seed2.log has SEED=3"),
    "other settings": (lambda f: setting(f, "MATRIX_LR", "0.1"), "seed 2 differs in MATRIX_LR from seed 1"),
    "another machine": (lambda f: change(f, "config", gpu="T4", world_size=8), "seed 2 differs in world_size, gpu from seed 1"),
    "too large": (lambda f: track(f, max_bytes=90_000), r"bytes is [\d,]+, more than 90,000"),
    "too long a training": (lambda f: change(f, "val", train_time_ms=900e3), "900.0 s of training pass the cap by more than"),
    "too long an evaluation": (lambda f: track(f, max_eval_seconds=0), "eval_seconds is .*, more than 0"),
    "too long an export": (lambda f: change(f, "export", elapsed_s=1e4), "export_seconds is .*, more than 120"),
    "too high a cap": (lambda f: track(f, max_train_seconds=599), "MAX_WALLCLOCK_SECONDS=600 must be more than 0 and at most 599"),
    "another GPU": (lambda f: track(f, machine="H100"), "nvidia-smi's output or the name of the GPU has no H100"),
    "a setting of no record": (lambda f: setting(f, "OVERFIT", "true", "123"), "OVERFIT=True is not one of .False."),
    "a path of one machine": (lambda f: setting(f, "DATA_PATH", '"/home/me"', "123"), "DATA_PATH must be relative"),
    "another division": (lambda f: claim(f, division="big", base="", in_turn=False), "division 'big' must be one of tiny"),
    "other text": (lambda f: pin(f, val_tokens=[4000, 4000]), "2976 validation tokens of 2976 bytes are not those of the division 'tiny'"),
    "other bytes": (lambda f: pin(f, val_bytes=[9999, 9999]), "2976 validation tokens of 2976 bytes are not those of the division 'tiny'"),
    "a slow clock": (lambda f: change(f, "val", elapsed_s=1e4), "its clock counts .* s of training in .* s"),
    "in turn with nothing": (lambda f: claim(f, base=""), "in_turn is true, but there is no base"),
    "a base that was not trained in turn": (lambda f: claim(f, in_turn=False), "against_base is .* but the logs give .*'p': None"),
    "other training shards": (lambda f: pin(f, train_shards_sha256=["0"]), "the train shards are not those of the division"),
    "other validation shards": (lambda f: pin(f, val_shards_sha256=["0"]), "the val shards are not those of the division"),
    "another tokenizer": (lambda f: pin(f, tokenizer_sha256="0"), "the tokenizer is not one of the division's"),
    "more files": (lambda f: (f / "weights.bin").touch(), "weights.bin does not belong in a record"),
    "no script": (lambda f: (f / "train_gpt.py").unlink(), "train_gpt.py is missing"),
    "no artifact": (lambda f: (f / "artifact_seed2.int8.ptz").unlink(), "artifact_seed2.int8.ptz is missing"),
    "the artifact of another run": (lambda f: (f / "artifact_seed2.int8.ptz").write_bytes(b""), "is not the artifact of the log"),
    "a renamed record": (lambda f: claim(f, name="Other"), "submission.json names track_tiny/.*_Other, not track_tiny/.*_Slow"),
    "an edited number": (lambda f: claim(f, val_bpb=1.0), "submission.json: val_bpb is 1.0, but the logs give"),
    "a base that is not there": (lambda f: claim(f, base="track_tiny/2020-01-01_No"), "is not another record of track_tiny"),
    "a blurb that is no text": (lambda f: claim(f, blurb=5), "submission.json: blurb must be text"),
}


def test_what_the_tools_make_is_accepted(root):
    for folder in sorted((root / "records" / "track_tiny").glob("*_*")):
        found, notes = verify.verify_record(folder)
        assert not found and "bits per byte, 3 seeds" in notes[0], found
        text = (folder / "README.md").read_text()
        assert f"and {claims(folder)['val_bpb'] / 1.25:.4f} per byte of the original text." in text
        assert f"    python records/track_tiny/{folder.name}/train_gpt.py COMPILE=0 " in text
    assert "`train_gpt.py`: unchanged." in text and "| MATRIX_LR |  | 0.001 |" in text
    assert re.search(r"against track_tiny/.*_Control: \+\d\.\d+ bits per byte; trained in turn, one-sided Welch", notes[1])
    table = (root / "records" / "README.md").read_text()
    assert re.search(r"\| \d\.\d{4} ± \d\.\d{4} \| 3 seeds \|(?s:.*)_Control\)(?s:.*)_Slow\)", table)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(records, mistake):
    spoil, message = MISTAKES[mistake]
    spoil(records)
    found, _ = verify.verify_record(records)
    assert any(re.search(message, finding) for finding in found), found


def test_one_bad_folder_does_not_hide_the_others(records, monkeypatch, capsys):
    undated = shutil.copytree(records, records.parents[1] / "track_other" / "Slow")
    half = shutil.copytree(records, records.with_name("2026-01-02_Half"))
    (half / "submission.json").write_text(json.dumps({"author": None}))
    records.with_name("2026-01-03_Empty").mkdir()
    monkeypatch.setattr(verify, "ROOT", records.parents[2])
    with pytest.raises(SystemExit, match="^1$"):
        run_script(monkeypatch, verify)
    said = capsys.readouterr().out
    assert re.findall(r"^\S+_(\w+): (\w+)", said, re.M) == [
        ("Half", "refused"), ("Empty", "refused"), ("Control", "accepted"), ("Slow", "accepted")]
    assert re.search(r"track_other/Slow: refused\n +REFUSED: .*track.json is missing", said) and undated.exists()
    assert make.leaderboard(records.parents[1]).count("[20") == 2


@pytest.mark.parametrize("scores, in_turn, wanted", [
    ([1.0], False, "1.0000 bits per byte, one seed"), ([1.0, 1.2], False, "1.1000 ± 0.1414 bits per byte, 2 seeds")])
def test_one_seed_has_no_deviation(scores, in_turn, wanted):
    results = {str(seed): {"val_bpb": bpb} for seed, bpb in enumerate(scores)}
    assert verify.describe_score({"seed_results": results}) == wanted


SUM, STREAM = "total = ranks.sum\\(nats\\).item\\(\\)", "return x if lane is None else lane"  # of the trainer
WRONG_SCORES = {
    "a validation that loses tokens": (SUM, "total = 0.9 * ranks.sum(nats).item()", "by its logits, the artifact scores"),
    "a model that sees its targets": (STREAM, "return x + torch.roll(x0, -1, dims=1)", "depend on later tokens"),
    "a model that sees other rows": (STREAM, "return x + torch.roll(x0, 1, dims=0)", "depend on other rows"),
    "a model that reads a file": (STREAM, "return x * Path('more.txt').stat().st_size", "gives no logits: .*No such file"),
    "a script that answers itself": (STREAM, "print('{}', flush=True) or os._exit(0)", "answers instead of probe.py")}


def score_again(folder: Path, **changes) -> tuple[list[str], list[str]]:
    found = verify.Findings()
    seeds = [{**verify.read_folder(folder, "tiny", found)[1], **changes}]
    return verify.rescore(folder, "tiny", seeds, found), list(found)


@pytest.mark.slow
def test_an_artifact_is_scored_again(records, monkeypatch):
    monkeypatch.setenv("MATRIX_LR", "wrong")  # of the environment, the trainer's variables do not count
    lines, found = score_again(records)
    assert re.match(r"seed 2: scored again (\S+), in the log (\S+), ", lines[0]) and not found
    shutil.copy(records / "artifact_seed1.int8.ptz", records / "artifact_seed2.int8.ptz")
    assert "by its logits, the artifact scores" in score_again(records)[1][0]
    pin(records, train_shards_sha256=["0"])
    assert score_again(records)[1][0] == "DATA_PATH=tiny: the train shards are not those of the division"
    pin(records, tokenizer_sha256="0")
    assert "DATA_PATH=tiny: the tokenizer is not one of the division's" in score_again(records)[1]
    assert "tokens and bytes to score, not those of the logs" in score_again(records, val_bytes=3000)[1][-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG_SCORES)
def test_a_wrong_score_is_found(records, name):
    pattern, new, message = WRONG_SCORES[name]
    edit(records / "train_gpt.py", pattern, new)
    _, found = score_again(records, val_bpb=0.9 * claims(records)["seed_results"]["2"]["val_bpb"])
    assert any(re.search(f"(?s){message}", text) for text in found), found


@pytest.mark.parametrize("more, message", [
    (["DATA_PATH=/home/me/tiny"], "DATA_PATH must be relative to the repository"),
    (["OVERFIT=1"], r"OVERFIT=True is not one of \[False\]"), (["NUM_LAYRS=3"], "did you mean NUM_LAYERS"),
    (["--seeds", "1,-2"], "--seeds: '1,-2' must be whole numbers"), (["--ranks", "2"], "--ranks 2 is more than the track's 1"), (["--seeds", "1,2,02"], r"--seeds \[1, 2, 2\] must be different"),
    (["--division", "other"], "division 'other' must be one of tiny"), (["--name", "My MLP"], "--name 'My MLP' must be letters"),
    (["MAX_WALLCLOCK_SECONDS=0"], "MAX_WALLCLOCK_SECONDS=0 must be more than 0 and at most 600"),
    (["NUM_LAYERS"], "'NUM_LAYERS' is not VARIABLE=value"),
    (["DATA_PATH=none"], r"no DATA_PATH=none with \*_val_\*\.bin.* with\n    \S*python\S* make_it.py byte260\nand set DATA_PATH=byte260 VOCAB_SIZE=260"),
    (["--track", "none"], r"invalid choice: 'none' \(choose from .*track_tiny"),
    (["--base", "none"], r"invalid choice: 'none' \(choose from .*_Control")])
def test_mistakes_are_found_before_the_runs(root, monkeypatch, capsys, more, message):
    given = ["--track", "track_tiny", "--division", "tiny", "--name", "New", "MAX_WALLCLOCK_SECONDS=10"]
    found = run_make(monkeypatch, *given, *more)
    assert re.search(message, f"{found} {capsys.readouterr().err}")


def test_an_artifact_that_is_too_large_ends_the_runs(root, monkeypatch):
    monkeypatch.setattr(common, "has_finished", lambda *_: True)
    with pytest.raises(ValueError, match=r"Control_seed1 has [\d,]+ bytes, more than 1,000; raise EXPORT_CLIP"):
        make.run_seeds(argparse.Namespace(name="Control", ranks=1, seeds=[1, 2]), {"max_bytes": 1000}, {})


def test_the_model_of_another_run_is_not_deleted(root):
    model = root / "logs" / "Control_seed1" / train_gpt.MODEL_FILE
    options = argparse.Namespace(name="Control", ranks=1, seeds=[1])
    with pytest.raises(ValueError, match="logs/Control_seed1 has the model of another run: move it, or choose another --name"):
        make.run_seeds(options, {}, {"MATRIX_LR": "0.3"})
    assert model.exists()
    checkpoints = root / "logs" / "Stopped_seed1" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "Stopped_seed1_00000500.pt").touch()
    options.name = "Stopped"
    with common.only_one(root / "logs" / "Stopped.lock") as lock:  # as another make.py
        for message in ("another command trains these runs", "Stopped_seed1 has checkpoints of a run that may still train"):
            with pytest.raises(ValueError, match=message):
                make.run_seeds(options, {}, {})
            lock.close()
    assert [*checkpoints.iterdir()]


def test_what_stops_the_runs_waits_for_the_trainer_and_drops_its_checkpoint(root, monkeypatch):
    """So that the same command can begin the seed anew. The trainer here saves half a second after it was told to stop."""
    folder = root / "logs" / "Ended_seed1" / "checkpoints"
    folder.mkdir(parents=True)
    save = (f"import signal, sys, time\ndef stop(*_):\n    time.sleep(0.5)\n    open({str(folder / 'a.pt')!r}, 'w')\n    sys.exit(143)\n"
            f"signal.signal(signal.SIGTERM, stop)\nopen({str(folder / 'ready')!r}, 'w')\nsignal.pause()")
    wait = make.subprocess.Popen.wait

    def interrupted(process, timeout=None):
        monkeypatch.setattr(make.subprocess.Popen, "wait", wait)
        while not (folder / "ready").exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(common, "launcher", lambda ranks: [sys.executable, "-c", save])
    monkeypatch.setattr(make.subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt), common.only_one(root / "logs" / "Ended.lock") as lock:
        make.run_seed({"RUN_ID": "Ended_seed1"}, 1, {}, lock)
    assert not folder.exists()


def test_paths_are_relative_to_the_repository(root, monkeypatch, tmp_path):
    data = shutil.copytree(root / "tiny", root / "kept")
    (data / "manifest.json").write_text(json.dumps({"tokenizer": {"name": "byte260", "vocab_size": 260}}))
    monkeypatch.setattr(make, "run_seeds", Mock(side_effect=ValueError("now they train")))
    monkeypatch.chdir(tmp_path)
    words = [word for word in tiny_arguments("kept", **CAP) if not word.startswith(("TOKENIZER_PATH=", "VOCAB_SIZE="))]
    given = ["--track", "track_tiny", "--division", "tiny", "--name", "New"]
    assert run_make(monkeypatch, *given, *words) == "make.py: now they train"


def test_the_open_track_needs_a_name_of_the_data_and_notes_are_kept(root, monkeypatch, capsys):
    (root / "records" / "track_open").mkdir()
    (root / "records" / "track_open" / "track.json").write_text('{"title": "Open"}')
    run_here(monkeypatch, root, *tiny_arguments("tiny", RUN_ID="alone", OUT_DIR="logs/alone"))
    words = ["--track", "track_open/", "--name", "Alone", "--author", "me", "--runs", "alone"]
    assert run_make(monkeypatch, *words) == 2 and "--division is needed" in capsys.readouterr().err
    assert run_make(monkeypatch, *words, "--division", "own") == 0
    folder = next(root.glob("records/track_open/*_Alone"))
    text = (folder / "README.md").read_text()
    assert "original text" not in text and "bits per byte, one seed" in text
    (folder / "README.md").write_text(text + "Written by hand.\n")
    claim(folder, blurb="Another blurb.")
    assert run_make(monkeypatch, "--again", str(folder)) == 0
    assert re.search(r"Another blurb\.(?s:.*)## Notes\nWritten by hand\.\n\Z", (folder / "README.md").read_text())
    claim(folder, blurb="New.", author="A | B\nC")
    assert run_make(monkeypatch, "--again", str(folder)) == 0
    assert r" | A \| B C | [" in (root / "records" / "README.md").read_text()
    edit(folder / "README.md", "## Notes", "## My notes")  # to write it again would lose them
    assert "has no line '## Notes'" in run_make(monkeypatch, "--again", str(folder))


def test_the_environment_wins_over_the_base_and_the_command_over_both(root, monkeypatch, tmp_path):
    base = next(root.glob("records/track_tiny/*_Control")).name
    given = ["--track", "track_tiny", "--name", "New", "--base", f"track_tiny/{base}"]
    monkeypatch.setenv("NUM_LAYERS", "several")
    assert "NUM_LAYERS='several'" in run_make(monkeypatch, *given)
    assert "NUM_LAYERS='many'" in run_make(monkeypatch, *given, "NUM_LAYERS=many")
    preset = tmp_path / "preset.env"
    preset.write_text("\ufeffNUM_LAYERS=nine\n# a preset\n", encoding="utf-8")
    assert "NUM_LAYERS='nine'" in run_make(monkeypatch, *given, f"@{preset}")
    preset.write_bytes(b"\xff\xfeN")
    assert re.search("preset.env: .* can't decode .*; save the file as UTF-8", run_make(monkeypatch, *given, f"@{preset}"))
    monkeypatch.setenv("NUM_LAYERS", "")  # as if it were not set
    assert make.plan_settings(argparse.Namespace(base=given[-1], settings=[]), root / "records/track_tiny/New")["NUM_LAYERS"] == "2"


def test_all_committed_records_are_as_they_say(monkeypatch):
    """And each can be a base, although its script's variables may have other names now, or none."""
    records = REPOSITORY / "records"
    assert f"{make.BEGIN}\n{make.leaderboard(records)}\n{make.END}" in (records / "README.md").read_text()
    monkeypatch.setattr(make, "ROOT", REPOSITORY)
    folders = [path.parent for path in records.glob("track_*/*/submission.json")]
    assert folders
    for folder in folders:
        assert verify.verify_record(folder)[0] == [], folder
        options = argparse.Namespace(base=f"{folder.parent.name}/{folder.name}", settings=[])
        settings = make.plan_settings(options, folder)
        train_gpt.load_config([f"{name}={text}" for name, text in settings.items()], {})
        options.settings = ["DATA_PATH=others"]
        assert not {"TOKENIZER_PATH", "TOKENIZER_SHA256", "VOCAB_SIZE"} & make.plan_settings(options, folder).keys()


@pytest.mark.parametrize("preset, track, division", [
    ("h100_8gpu_16mb", "track_10min_16mb", "fineweb10B"), ("h100_1gpu_16mb", "track_10min_16mb_1gpu", "fineweb10B"),
    ("cpu_1mb", "track_10min_1mb_cpu", "sotu"), ("cpu_1mb_avx2", "track_10min_1mb_cpu", "sotu")])
def test_every_preset_passes_the_checks_of_its_track(preset, track, division):
    """All but those of the data, which are not here; the command that gets them is named, and the settings that they need."""
    text = (REPOSITORY / "records" / "presets" / f"{preset}.env").read_text()
    tokenizer = re.search("^# tokenizer: (.*)", text, re.M)[1]  # which run.sh reads
    limits = verify.load_track(REPOSITORY / "records" / track / "2026-01-31_Any")
    given = [f"@{REPOSITORY}/records/presets/{preset}.env", f"DEVICE={limits['settings']['DEVICE'][0]}"]
    config, overrides = train_gpt.load_config([*given, f"DATA_PATH=none_{tokenizer}"], {})
    planned = {name: getattr(config, name.lower()) for name in [*overrides, "MAX_WALLCLOCK_SECONDS", *limits["settings"]]}
    problems = verify.Findings()
    verify.check_request(limits, division, 3, planned, problems)
    assert not problems
    assert tokenizer in limits["divisions"][division]["scored"]
    shards = {"track_10min_16mb": "--train-shards 42", "track_10min_16mb_1gpu": "--train-shards 10"}.get(track, "--out data/")
    with pytest.raises(ValueError, match=f"no DATA_PATH=none_{tokenizer} with .*\n    .* data/.* {tokenizer} {shards}.*\nand set ") as found:
        verify.read_data({"DATA_PATH": config.data_path}, limits, division, problems)
    request = argparse.Namespace(base="", division=division, settings=given[:1])
    folder = REPOSITORY / "records" / track / "2026-01-31_Any"
    needed = common.pairs_of(str(found.value).partition("\nand set ")[2].split())
    assert needed.keys() >= ({"DATA_PATH", "TOKENIZER_PATH", "VOCAB_SIZE"} if "16mb" in track else {"DATA_PATH"})
    assert needed.items() <= make.plan_settings(request, folder).items()  # which a preset sets itself
