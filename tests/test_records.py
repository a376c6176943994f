"""Records and tracks: what the tools make is accepted; a claim, log, script or artifact that was changed is not."""

import argparse
import json
import math
import re
import shutil
from hashlib import sha256
from pathlib import Path

import claims as record_claims
import common
import make
import numpy as np
import pytest
import rescore
import rules
import train_gpt
import verify
from conftest import REPOSITORY, make_shards, run_here, run_script, tiny_arguments

pytest.importorskip("matplotlib", reason="records have pictures: pip install -r requirements-dev.txt")
pytest.importorskip("scipy", reason="records are tested for significance: pip install -r requirements-dev.txt")

TRACK = {"title": "Tiny", "max_bytes": 200_000, "max_train_seconds": 600, "max_eval_seconds": 600, "max_threads": 64,
         "max_world_size": 1, "min_seeds": 3, "p": 0.01,
         "settings": {"OVERFIT": [False], "INIT_FROM": [""]},
         "divisions": {"tiny": {"scored": {"byte260": {"original_per_decoded_byte": 1.25,
                                                       "32": {"val_tokens": 2976, "val_bytes": 2976}}}}}}
CAP = {"MAX_WALLCLOCK_SECONDS": "600"}


def run_make(monkeypatch, *arguments: str):
    """The exit status of make.py, or its message."""
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
    for module in (verify, rescore, make):
        patch.setattr(module, "ROOT", root)
    for name, changes in (("Control", {}), ("Slow", {"MATRIX_LR": "0.001", "TIED_EMBED_LR": "0.001"})):
        for seed in ("1", "2", "3"):
            run_id = f"{name}_seed{seed}"
            settings = {"SEED": seed, "RUN_ID": run_id, "OUT_DIR": f"logs/{run_id}", **CAP, **changes}
            run_here(patch, root, *tiny_arguments("tiny", **settings))
        given = ["--track", "track_tiny", "--division", "tiny", "--name", name, "--author", "me", "--blurb", "What is new.",
                 "--seeds", "1,2,3", *tiny_arguments("tiny", **CAP, **changes)]
        if name == "Slow":
            given += ["--base", f"track_tiny/{next((root / 'records' / 'track_tiny').glob('*_Control')).name}"]
        patch.setattr(make, "run_seed", lambda *_: pytest.fail("no test here runs a seed: the six have finished"))
        assert run_make(patch, *given) == 0
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


def change(folder: Path, kind: str, seed: int = 2, **values) -> None:
    """Changes the last event of a kind in a seed's .jsonl."""
    path = folder / f"train_seed{seed}.jsonl"
    lines = path.read_text().splitlines()
    at = max(i for i, line in enumerate(lines) if json.loads(line)["event"] == kind)
    lines[at] = json.dumps({**json.loads(lines[at]), **values})
    path.write_text("\n".join(lines) + "\n")


def claim(folder: Path, **values) -> None:
    path = folder / "submission.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def claims(folder: Path) -> dict:
    return json.loads((folder / "submission.json").read_text())


def track(folder: Path, **values) -> None:
    path = folder.parent / "track.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def better_artifact(folder: Path) -> None:
    """Makes the weights of seed 2 score 0.02 nats worse than its artifact."""
    loss = claims(folder)["seed_results"]["2"]["val_loss"] + 0.02
    change(folder, "val", val_loss=loss, val_bpb=loss / math.log(2))


def pin(folder: Path, **values) -> None:
    """Changes the division's counts, or pins digests of shards."""
    divisions = json.loads((folder.parent / "track.json").read_text())["divisions"]
    divisions["tiny"]["scored"]["byte260"] |= values
    track(folder, divisions=divisions)


FORGERIES = {
    "a better mean": (lambda f: claim(f, val_bpb=claims(f)["val_bpb"] - 0.01), "submission.json: val_bpb is"),
    "two starts": (lambda f: change(f, "train", event="config"), "must have one config event"),
    "a missing claim": (lambda f: edit(f / "submission.json", r'"is_best": false,\s*', ""),
                        "is_best is 'nothing', but the logs give False"),
    "another track": (lambda f: claim(f, track="track_open"), "submission.json names track_open/"),
    "another base": (lambda f: claim(f, base="track_tiny/2020-01-01_Nothing"), "is not another record of this track"),
    "a forged base": (lambda f: change(next(f.parent.glob("*_Control")), "final", val_bpb=9.0), "is refused itself"),
    "a line in a name": (lambda f: claim(f, author="me | 0.1 |"), r"author has '\|'"),
    "another script": (lambda f: edit(f / "train_gpt.py", "self.stop_signal = 0", "self.stop_signal = 1"),
                       "train_seed1.log: its first line must be 'train_gpt.py of SHA-256 "),
    "the digest of another script": (lambda f: change(f, "export", code_sha256="0" * 64),
                                     "code_bytes and code_sha256 are not train_gpt.py's"),
    "a script that is too long": (lambda f: edit(f / "train_gpt.py", r"\Z", "# one more line\n" * 2000), "more than 2,500"),
    "no script": (lambda f: (f / "train_gpt.py").unlink(), "train_gpt.py is missing"),
    "a final score in the .jsonl": (lambda f: change(f, "final", val_bpb=1.0), "is not val_loss . tokens"),
    "a seed with other ranks and data": (
        lambda f: change(f, "config", world_size=8, data_sha256={"tiny_train_000000.bin": "0"}, gpu="T4"),
        "seed 2 differs in world_size, data_sha256, gpu from seed 1"),
    "an evaluation without time": (lambda f: change(f, "final", eval_time_ms=-5.0), "-0.0 s of evaluation, but"),
    "twice the bytes of text": (lambda f: pin(f, **{"32": {"val_tokens": 2976, "val_bytes": 1488}}),
                                "are not those of the division 'tiny'"),
    "a faster clock": (lambda f: change(f, "train", tok_per_sec=1e6), "tok_per_sec does not follow"),
    "a clock that stood still": (lambda f: [change(f, event, elapsed_s=1e6) for event in ("val", "export", "final")],
                                 "the training clock stood still for"),
    "a wall clock that goes backwards": (lambda f: change(f, "final", elapsed_s=0.001), "the wall clock goes backwards"),
    "a training clock that hides time": (lambda f: change(f, "train", elapsed_s=1e6),
                                         "ms of training, but .* ms of the wall clock"),
    "one run as two seeds": (
        lambda f: (f / "train_seed3.jsonl").write_text((f / "train_seed2.jsonl").read_text().replace('"SEED": 2', '"SEED": 3')),
        "two seeds have the same training losses"),
    "a renamed seed": (lambda f: [(f / f"train_seed2{s}").rename(f / f"train_seed7{s}") for s in (".log", ".jsonl")],
                       "train_seed7.log has SEED=2"),
    "best seeds only": (lambda f: [path.unlink() for path in f.glob("*_seed3.*")], "the track asks for 3 seeds"),
    "one seed with other settings": (lambda f: edit(f / "train_seed2.jsonl", '"MATRIX_LR": 0.001', '"MATRIX_LR": 0.1'),
                                     "seed 2 differs in MATRIX_LR"),
    "a part of the validation text": (lambda f: edit(f / "train_seed2.jsonl", '"VAL_TOKENS": 0', '"VAL_TOKENS": 2976'),
                                      "VAL_TOKENS scores a part of the validation text"),
    "too large": (lambda f: track(f, max_bytes=90_000), "bytes is .*, more than 90000"),
    "too long": (lambda f: change(f, "val", train_time_ms=700e3), "700.0 s of training pass the cap by more than"),
    "too high a cap": (lambda f: track(f, max_train_seconds=599), "MAX_WALLCLOCK_SECONDS=600 must be more than 0 and at most"),
    "sparse training steps": (lambda f: change(f, "train", event="other"), r"training steps .4. are not in the log"),
    "another machine": (lambda f: track(f, machine="Z9"), "or the name of the GPU has no Z9"),
    "too long an evaluation": (lambda f: track(f, max_eval_seconds=0), "eval_seconds is .*, more than 0"),
    "an artifact that is better than its weights": (better_artifact, "nats better than the weights that it was made from"),
    "more files": (lambda f: (f / "weights.bin").write_bytes(b"x"), "weights.bin does not belong in a record"),
    "a claim that nothing checks": (lambda f: claim(f, world_record=True), "world_record is True, but the logs give 'nothing'"),
    "another date of submission": (lambda f: claim(f, submitted="2020-01-01T00:00:00Z"), "is not on the date"),
    "other validation shards": (lambda f: pin(f, val_shards_sha256=["0" * 64]), "val shards that"),
    "another PyTorch in the .log": (lambda f: edit(f / "train_seed2.log", "(?m)^Running PyTorch ", "Running PyTorch 9"),
                                    "disagree on PyTorch"),
    "a resumed run": (lambda f: change(f, "train", event="resume"), "a record is one run from its first step to its end"),
    "another headline": (lambda f: edit(f / "README.md", r"\A# .*", "# The best of all"), "README.md: the part above"),
    "an export long after the training": (lambda f: [change(f, event, elapsed_s=1e4) for event in ("export", "final")],
                                          "from the last validation to the export, .* s are more than 120"),
    "another tokenizer": (lambda f: pin(f, tokenizer_sha256="0" * 64), "the tokenizer that the log names is not the division's"),
    "a comment that hides what follows": (lambda f: claim(f, blurb="New. <!--"), "blurb has '<'"),
    "a GPU of HTML": (lambda f: change(f, "config", gpu="<b>"), "GPU or version with . < or >"),
    "data in a setting": (lambda f: edit(f / "train_seed2.jsonl", '"RUN_ID": "', '"RUN_ID": "' + 300 * "x"),
                          "RUN_ID must have at most 200 characters"),
    "data in many settings": (
        lambda f: [edit(path, '"RUN_ID"', "".join(f'"X{i}": "{i:0150}", ' for i in range(60)) + '"RUN_ID"')
                   for path in f.glob("train_seed?.jsonl")],
        "the settings have more than 8000 characters"),
    "a comment in a setting": (lambda f: edit(f / "train_seed2.jsonl", '"OUT_DIR": "', '"OUT_DIR": "<!--'),
                               "OUT_DIR must have .* no . <"),
    "a shard that the table lacks": (lambda f: [pin(f, train_shards_sha256=["0"]), *(change(
        f, "config", seed, data_sha256={"a_train_0.bin": "0", "a_train_1more.bin": "1"}) for seed in (1, 2, 3))],
        "train shards that the log names are not"),
    "a run without end": (lambda f: change(f, "final", step=10**15), r"training steps \[\d+, \d+, \d+\] are not in the log"),
    "no picture": (lambda f: (f / "curve.png").unlink(), "curve.png is missing"),
}


def test_what_the_tools_make_is_accepted(root, capsys):
    for folder in sorted((root / "records" / "track_tiny").glob("*_*")):
        (folder / ".DS_Store").touch()  # the Finder was there
        found, notes = verify.verify_record(folder)
        (folder / ".DS_Store").unlink()
        assert not found and "bits per byte, 3 seeds" in notes[0], found
        assert claims(folder)["is_best"] == folder.name.endswith("Control")
        original = claims(folder)["val_bpb"] / 1.25
        assert claims(folder)["val_bpb_original"] == pytest.approx(original)
        text = (folder / "README.md").read_text()
        assert f"and {original:.4f} per byte of the original text." in text
    assert "`train_gpt.py`: unchanged." in text and "This is not a new best." in text
    test = r"against track_tiny/.*_Control: \+\d\.\d+ bits per byte; one-sided Welch t-test of 3 against 3"
    assert re.search(test, notes[1])


@pytest.mark.parametrize("name", FORGERIES)
def test_forgeries_are_refused_with_the_reason(records, name):
    spoil, reason = FORGERIES[name]
    spoil(records)
    found, _ = verify.verify_record(records)
    assert any(re.search(reason, finding) for finding in found), found


HIDING = {  # what check_script says of scripts
    "which can hide code": [
        "exec(text)", "eval('1')", "run = eval", "compile('1', '', 'eval')", "__import__('helper')", "from os import *",
        "o = os", "shutil.os.system('x')", "sys.modules['os'].system('x')", "torch.load(path, weights_only=False)",
        "os.system('ls')", "os.execv('ls', [])", "from os import system", "import os as o", "torch.hub.load('a', 'b')",
        "from torch import hub", "f(x, allow_pickle=True)", "from torch.utils.cpp_extension import load",
        "import subprocess as s", "import ctypes as c",
        "o = shutil.os", "from shutil import os as o", "from sys import modules", "random._os.system('x')",
        "print.__self__.exec('x')", "os.__dict__['system']", "torch.serialization.pickle.loads(x)",
        "inspect.importlib.import_module('helper')"],
    "ctypes for more than mallopt": [
        "ctypes.CDLL('./x.so')", "ctypes.CDLL(None).system(b'ls')", "start = ctypes.CDLL(None).mallopt", "import ctypes.util",
        "ctypes.CDLL(None).mallopt(-4, ctypes.CDLL(x))", "torch.ctypes.CDLL('./x.so')", "from ctypes import CDLL",
        "getattr(torch, 'ctypes')"],
    "subprocess for more than nvidia-smi and scontrol": [
        "subprocess.run(['curl', 'x'])", "subprocess.run(program)", "start = subprocess.run", "from subprocess import run",
        "subprocess.getoutput('nvidia-smi; curl x')", "subprocess.getoutput('timeout 30 curl x')",
        "subprocess.getoutput('nvidia-smi' + more)", "subprocess.run(['nvidia-smi'], env=[start := subprocess])",
        "subprocess.Popen(['nvidia-smi', '-c', x], -1, 'python')", "subprocess.run(['scontrol', '-c'], executable='python')",
        "start = subprocess.run(['nvidia-smi']).stdout.join(x)\nstart = subprocess.run"],
    "is not counted or can load code": [
        "from . import helper", "import requests", "import importlib.util", "from importlib import util", "import pickle",
        "import multiprocessing", "import posix"],
    "other characters than printable ASCII, or names a coding": [
        "# coding: raw_unicode_escape", "\n# vim: fileencoding=utf-7", "x = '\u202e'", "x = 1\x0c"],
    "is not Python": ["import"],
    "a line of 130 characters, more than 120": [f"TABLE = '{'x' * 120}'"],
}


@pytest.mark.parametrize("line, reason", [(line, reason) for reason, lines in HIDING.items() for line in lines])
def test_scripts_that_can_hide_code_are_refused(line, reason):
    found = rules.check_script(line + "\n")
    assert any(reason in finding for finding in found), found


def test_scripts_may_ask_for_the_gpus_and_the_hosts():
    """And call methods that are named like forbidden functions. What the trainer does is allowed in the records above."""
    assert rules.check_script("""import re, subprocess
subprocess.run(["nvidia-smi"], capture_output=True)
subprocess.check_output(["scontrol", "show", "hostnames"])
re.compile("x")
model.eval()
""") == ()


def test_the_best_before_a_record_is_the_best_of_its_division_and_machine_until_then(tmp_path):
    """Ties go to the earlier one; a base of one's own choice does not matter."""
    lines = {name: {"track": "track_tiny", "name": name, "date": f"2026-01-0{time[0]}", "submitted": time, "division": division,
                    "machine": machine, "val_bpb": 9.0, "val_bpb_original": bpb,
                    "seed_results": {"1": {"artifact_sha256": name}}}
             for name, time, division, machine, bpb in (
                 ("First", "1", "a", "CPU", 1.5), ("Better", "2T08", "a", "CPU", 1.4), ("Tie", "2T09", "a", "CPU", 1.4),
                 ("Worse", "3", "a", "CPU", 1.6), ("Other", "1", "b", "CPU", 1.0), ("Faster", "1", "a", "GPU", 1.2),
                 ("Late", "9", "a", "CPU", 1.1))}
    (tmp_path / "history.jsonl").write_text("\n".join(map(json.dumps, lines.values())) + "\n")

    def best_before(name: str):
        kind = ("track_tiny", lines[name]["division"], lines[name]["machine"])
        earlier = rules.earlier_records(tmp_path / "track_tiny" / name, lines[name])
        return next((best["name"] for best in earlier if best["kind"] == kind), None)

    assert [best_before(name) for name in lines] == [None, "First", "Better", "Better", None, None, "Better"]


def test_a_record_is_compared_with_a_line_of_history_as_with_its_folder(records):
    base = next(records.parent.glob("*_Control"))
    make.write_record(records, {key: claims(records)[key] for key in make.AUTHORED} | {"base": ""})
    assert claims(records)["incumbent"] == f"track_tiny/{base.name}" and claims(records)["against_incumbent"]["p"] > 0.5
    line = {**claims(base), "commit": "0000000"}
    (records.parent.parent / "history.jsonl").write_text(json.dumps(line) + "\n")
    artifact = (base / "artifact_seed1.int8.ptz").read_bytes()
    shutil.rmtree(base)
    assert verify.verify_record(records)[0] == []
    (records / "artifact_seed2.int8.ptz").write_bytes(artifact)
    change(records, "export", artifact_bytes=len(artifact), artifact_sha256=sha256(artifact).hexdigest())
    assert f"the artifacts of seeds [2] are those of track_tiny/{base.name}" in verify.verify_record(records)[0]


def test_the_data_on_this_disk_are_hashed(root, records, monkeypatch):
    monkeypatch.setattr(rescore, "ROOT", records.parents[2])
    data = shutil.copytree(root / "tiny", rescore.ROOT / "tiny")
    (data / "tokenizer.model").write_bytes(b"tokenizer")
    table = {f"{split}_shards_sha256": [sha256(path.read_bytes()).hexdigest() for path in sorted(data.glob(f"*_{split}_*"))]
             for split in ("train", "val")} | {"tokenizer_sha256": sha256(b"tokenizer").hexdigest()}
    settings = {"DATA_PATH": "tiny", "TOKENIZER_PATH": "tiny/tokenizer.model"}

    def found(table: dict) -> list[str]:
        findings = rules.Findings()
        rescore.check_data({"settings": settings, "table": table}, findings)
        return findings

    assert found(table) == found({}) == []  # a division may have no digests
    for path in data.iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert found(table) == ["DATA_PATH=tiny: the train shards on this disk are not the division's",
                            "DATA_PATH=tiny: the val shards on this disk are not the division's",
                            "TOKENIZER_PATH=tiny/tokenizer.model on this disk is not the division's tokenizer"]


@pytest.fixture
def one_seed(root, records, monkeypatch):
    """Scores the artifact of seed 2 again, perhaps with a changed log; returns the line, the findings and the seed."""
    monkeypatch.setenv("MATRIX_LR", "wrong")  # the environment is clean

    def score(**changes):
        found = rules.Findings()
        seed = {**rules.read_folder(records, "tiny", found)[1], **changes}
        line = rescore.rerun(records, seed, records / f"artifact_seed{changes.get('seed', 2)}.int8.ptz", found)
        return line, list(found), seed

    return score


@pytest.mark.slow
def test_an_artifact_is_scored_again(one_seed):
    line, found, seed = one_seed()
    assert re.match(r"seed 2: scored again (\S+), in the log (\S+), ", line) and not found
    assert seed["largest"].size == 260 * 32
    _, found, _ = one_seed(val_bytes=3000)
    assert found == ["seed 2: DATA_PATH or TOKENIZER_PATH on this disk are not those of the log"]
    _, found, _ = one_seed(seed=1)  # with the log of seed 2
    assert len(found) == 1 and "the model's logits score" in found[0]


def test_seeds_with_nearly_the_same_weights_are_refused():
    random = np.random.default_rng(0)
    honest = [{"seed": seed, "largest": random.standard_normal(10_000)} for seed in range(3)]
    moved = honest[0]["largest"] + 0.1 * (random.random(10_000) < 0.05)
    found = rules.Findings()
    rescore.check_weights([*honest, {"seed": 9, "largest": moved}], found)
    assert len(found) == 1 and found[0].startswith("seeds 0 and 9 have nearly the same weights")


@pytest.mark.slow
@pytest.mark.parametrize("pattern, new, reason", [
    ("    total = ranks.sum\\(nats\\).item\\(\\)\n", "    total = 0.9 * ranks.sum(nats).item()\n", "the model's logits score"),
    ("        return x if lane is None else lane\n", "        return x + torch.roll(x0, -1, dims=1)\n",
     "logits change by .* with later tokens"),
    ("        return x if lane is None else lane\n", "        return x + torch.roll(x0, 1, dims=0)\n",
     "logits change by .* other rows"),
    ("        return x if lane is None else lane\n", "        return x * Path('curve.png').stat().st_size\n",
     "the model gives no logits: .*No such file")],
    ids=["a script that lowers its score", "a model that sees its targets", "a model that sees the row before", "a table"])
def test_forgeries_that_only_a_rerun_can_find(one_seed, records, pattern, new, reason):
    edit(records / "train_gpt.py", pattern, new)
    line, found, _ = one_seed(val_bpb=0.9 * claims(records)["seed_results"]["2"]["val_bpb"])
    assert any(re.search(f"(?s)seed 2: {reason}", text) for text in found), (line, found)


def test_a_run_without_a_division_and_notes_that_are_kept(root, monkeypatch):
    open_track = root / "records" / "track_open"
    open_track.mkdir()
    (open_track / "track.json").write_text(json.dumps({"title": "Open"}))
    run_here(monkeypatch, root, *tiny_arguments("tiny", RUN_ID="alone", OUT_DIR="logs/alone"))
    assert run_make(monkeypatch, "--track", "track_open/", "--name", "Alone", "--author", "me", "--runs", "alone") == 0
    folder = next(open_track.glob("*_Alone"))
    text = (folder / "README.md").read_text()
    assert re.search("    python train_gpt.py .*DEVICE=cpu .*NUM_LAYERS=2", text)
    assert claims(folder)["val_bpb_original"] is None and "original text" not in text and "This is a new best." in text
    (folder / "README.md").write_text(text + "Written by hand.\n")
    claim(folder, blurb="Another blurb.")
    assert run_make(monkeypatch, "--again", str(folder)) == 0
    text = (folder / "README.md").read_text()
    assert text.endswith("## Notes\nWritten by hand.\n") and "Another blurb." in text
    edit(folder / "README.md", "## Notes", "## My notes")  # to write it again would lose them
    assert "has no line '## Notes'" in run_make(monkeypatch, "--again", str(folder))
    shutil.rmtree(open_track)


def test_the_environment_wins_over_the_base_and_the_command_over_both(root, monkeypatch, tmp_path):
    base = next((root / "records" / "track_tiny").glob("*_Control"))
    given = ["--track", "track_tiny", "--name", "New", "--base", f"track_tiny/{base.name}"]
    monkeypatch.setenv("NUM_LAYERS", "several")
    assert "NUM_LAYERS='several'" in run_make(monkeypatch, *given)
    assert "NUM_LAYERS='many'" in run_make(monkeypatch, *given, "NUM_LAYERS=many")
    (tmp_path / "preset.env").write_text("# a preset\nNUM_LAYERS=9\n")
    options = argparse.Namespace(base="", settings=[f"@{tmp_path}/preset.env", "DEVICE=cpu"])
    assert "division" not in run_make(monkeypatch, *given, "VAL_TOKENS=64")  # it is the base's
    assert make.plan_settings(options, root / "records" / "track_tiny" / "New") == {"NUM_LAYERS": "9", "DEVICE": "cpu"}


def test_every_committed_record_can_be_a_base(monkeypatch):
    """Of scripts whose variables have other names now, or none."""
    monkeypatch.setattr(make, "ROOT", REPOSITORY)
    for path in REPOSITORY.glob("records/track_1*/*/submission.json"):
        options = argparse.Namespace(base=f"{path.parent.parent.name}/{path.parent.name}", settings=[])
        settings = make.plan_settings(options, path.parent)
        config, _ = train_gpt.load_config([f"{name}={text}" for name, text in settings.items()], {})
        assert config.device == "cpu"
        options.settings = ["DATA_PATH=others"]
        assert not {"TOKENIZER_PATH", "TOKENIZER_SHA256", "VOCAB_SIZE"} & make.plan_settings(options, path.parent).keys()


def test_seeds_that_have_finished_are_told_from_others(root, monkeypatch):
    run_id = "Control_seed1"
    settings = common.pairs_of(tiny_arguments("tiny", SEED="1", RUN_ID=run_id, OUT_DIR=f"logs/{run_id}", **CAP))
    assert common.has_finished(root, run_id, settings, 1)
    assert not common.has_finished(root, run_id, {**settings, "MATRIX_LR": "1"}, 1)
    assert not common.has_finished(root, run_id, settings, 2)
    assert not common.has_finished(root, "Control_seed9", settings, 1)
    log = root / "logs" / f"{run_id}.jsonl"
    for path, other in ((log, log.read_text()[:-30]), (log, ""), (root / "train_gpt.py", "another script")):
        text = path.read_text()
        path.write_text(other)
        assert not common.has_finished(root, run_id, settings, 1)
        path.write_text(text)


@pytest.mark.parametrize("more, reason", [
    (["DATA_PATH=/home/me/tiny"], "DATA_PATH must be relative to the repository"), (["--blurb", "<!--"], "--blurb < or >"),
    (["DATA_PATH=../tiny"], "DATA_PATH must be relative to the repository"),
    (["OVERFIT=1"], r"OVERFIT=True is not one of \[False\]"), (["NUM_LAYRS=3"], r"did you mean NUM_LAYERS\?"),
    (["--ranks", "2"], "--ranks 2 is more than the track's 1"),
    (["--division", "other"], "division 'other' must be one of tiny"),
    (["--seeds", "1,2,02"], "--seeds 1,2,02 must be different numbers"),
    (["MAX_WALLCLOCK_SECONDS=0"], "MAX_WALLCLOCK_SECONDS=0 must be more than 0 and at most 600"),
    (["--name", "My MLP"], "--name 'My MLP' must be letters"), (["NUM_LAYERS"], "'NUM_LAYERS' is not VARIABLE=value"),
    (["VAL_TOKENS=64"], "VAL_TOKENS scores a part"), (["DATA_PATH=none"], r"DATA_PATH='none' has no \*_val_\*\.bin"),
    (tiny_arguments("tiny", TRAIN_SEQ_LEN="64", **CAP), "2944 validation tokens of 2944 bytes are not those of the division"),
    (["--track", "none"], r"invalid choice: 'none' \(choose from .*track_tiny"),
    (["--base", "none"], r"invalid choice: 'none' \(choose from .*_Control")])
def test_mistakes_are_found_before_the_runs(root, monkeypatch, capsys, more, reason):
    given = ["--track", "track_tiny", "--division", "tiny", "--name", "New", "MAX_WALLCLOCK_SECONDS=10"]
    found = run_make(monkeypatch, *given, *more)
    assert re.search(reason, f"{found} {capsys.readouterr().err}")


def test_one_bad_folder_does_not_hide_the_others(records, monkeypatch, capsys):
    undated = shutil.copytree(records, records.with_name("Slow"))
    (records / "submission.json").write_text("[1]")
    with pytest.raises(SystemExit, match="^1$"):
        run_script(monkeypatch, verify, records, undated, next(records.parent.glob("*_Control")))
    out = capsys.readouterr().out
    assert re.search(r"_Slow: refused\n +REFUSED: ", out) and "_Control: accepted" in out
    assert "REFUSED: Slow must be DATE_Name" in out


def test_a_record_whose_artifacts_are_not_kept_has_their_digests(records):
    for path in records.glob("artifact_seed*"):
        path.unlink()
    assert "artifacts under 2 MB belong in the folder" in verify.verify_record(records)[0][0]
    track(records, without_artifacts=[records.name])
    assert verify.verify_record(records)[0] == []
    found, notes = verify.verify_record(records, again=True)
    assert found == [] and notes[-1] == "not scored again: only the digests of its artifacts are kept"
    (records / "artifact_seed1.int8.ptz").write_bytes(b"x")
    assert "is not the artifact of the log" in verify.verify_record(records)[0][0]


def test_a_reader_is_warned_of_a_validation_loss_that_is_too_near_to_the_training_loss(records):
    seed = {"losses": [9.0] * 18 + [2.0, 4.0], "val_bpb_before_export": 3.5 / 0.6931472, "val_bytes": 8, "val_tokens": 8}
    assert record_claims.loss_gap([seed]) == pytest.approx(0.5, abs=1e-6)
    for here, warns in ((0.33, False), (-0.26, True)):
        text = record_claims.render({**claims(records), "gap": {"here": here, "incumbent": 0.34}})
        assert ("**Warning: a validation loss this near" in text) is warns and f"is {here:+.2f} nats from" in text


def test_all_committed_records_are_as_they_say():
    """The best of each kind of machine has its artifacts, so that it can be scored again."""
    records = REPOSITORY / "records"
    assert f"{make.BEGIN}\n{make.leaderboard(records)}\n{make.END}" in (records / "README.md").read_text()
    best = {}
    for path in records.glob("track_*/*/submission.json"):
        found, _ = verify.verify_record(path.parent)
        assert not found, (path, found)
        submission = json.loads(path.read_text())
        key = path.parent.parent.name, submission["division"], submission["machine"]
        small = sum(seed["artifact_bytes"] < verify.SMALL_ARTIFACT for seed in submission["seed_results"].values())
        best[key] = min(best.get(key, (9.0, None, 0)), (common.score(submission), path.parent, small))
    assert len(best) >= 2
    for _, folder, small in best.values():
        assert len(list(folder.glob("artifact_seed*.int8.ptz"))) == small, folder


# ---- The tracks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset, track, division", [
    ("h100_8gpu_16mb", "track_10min_16mb", "fineweb10B"), ("h100_1gpu_16mb", "track_10min_16mb_1gpu", "fineweb10B"),
    ("cpu_1mb", "track_10min_1mb_cpu", "sotu"), ("cpu_1mb_avx2", "track_10min_1mb_cpu", "sotu")])
def test_every_preset_passes_the_checks_of_its_track(preset, track, division):
    """All but those of the data, which are not here: its rows and its vocabulary must have a table."""
    text = (REPOSITORY / "records" / "presets" / f"{preset}.env").read_text()
    tokenizer = re.search("^# tokenizer: (.*)", text, re.M)[1]  # which run.sh reads
    limits = rules.load_track(REPOSITORY / "records" / track / "2026-01-31_Any")
    given = [f"@{REPOSITORY}/records/presets/{preset}.env", f"DEVICE={limits['settings']['DEVICE'][0]}"]
    config, overrides = train_gpt.load_config(given, {})
    planned = {name: getattr(config, name.lower()) for name in [*overrides, "MAX_WALLCLOCK_SECONDS", *limits["settings"]]}
    problems = rules.Findings()
    rules.check_request(limits, division, 3, planned, problems)
    assert not problems
    table = limits["divisions"][division]["scored"][tokenizer]
    row = table[str(config.train_seq_len)]
    counts = {key: value if isinstance(value, int) else sum(value) // 2 for key, value in row.items()}
    seed = {"settings": {"TRAIN_SEQ_LEN": config.train_seq_len}, **counts}
    assert rules.find_table(limits["divisions"][division]["scored"], seed) is table
    assert re.sub("[a-z]", "", tokenizer) == str(config.vocab_size)


def test_the_test_of_significance_is_welchs():
    """By hand: means 1.0 and 1.1, variances 1e-4 and 4e-4 of three each; t = -0.1 / sqrt(5e-4 / 3), 2.94 degrees. A
    margin of 0.01 nats per token is 0.005 bits per byte if the loss in nats is twice the bits per byte."""

    def seeds(scores, nats=1.0):
        return [{"val_bpb": x, "val_loss": nats * x} for x in scores]

    ours, theirs = seeds([0.99, 1.0, 1.01]), seeds([1.08, 1.1, 1.12])
    test = common.compare_scores({}, ours, theirs)
    assert test["difference"] == pytest.approx(-0.1) and test["n"] == [3, 3] and test["margin"] == 0
    assert test["p"] == pytest.approx(0.00245, abs=3e-4)
    other = common.compare_scores({"margin_nats": 0.01}, ours, seeds([1.08, 1.1, 1.12], nats=2.0))
    assert other["margin"] == pytest.approx(0.005) and other["p"] > test["p"]
    assert common.compare_scores({"margin_nats": 0.2}, ours, theirs)["p"] > 0.5
    assert common.compare_scores({}, ours[:1], theirs) is None
