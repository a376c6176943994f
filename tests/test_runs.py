"""Whole runs of the script: log, ranks, devices, what is found before training; and its file."""

import hashlib
import json
import math
import os
import re
from contextlib import nullcontext
from pathlib import Path
from typing import get_args

import pytest
import torch
import train_gpt
from conftest import REPOSITORY, events, make_shards, run_here, run_trainer, tiny_arguments, tiny_config, write_shard

SOURCE = (REPOSITORY / "train_gpt.py").read_text(encoding="utf-8")
PATTERNS = [  # in this order, others between them; test_recipe.py has the numbers of steps and export
    r"val_bpb:enabled tokenizer_kind=byte tokenizer_path=byte260.*",
    r"train_loader:dataset:tiny train_shards:2.*",
    r"val_loader:shards pattern=.*/tiny/\*_val_\*\.bin tokens:2976.*",
    r"model_params:\d+",
    r"world_size:1 grad_accum_steps:8.*",
    r"sdp_backends:cudnn=False flash=True mem_efficient=False math=False.*",
    r"step:0/4 val_loss:.*", *(rf"step:{n}/4 train_loss:.*" for n in (1, 2, 3, 4)), r"step:4/4 val_loss:.*",
    r"final_int8_zlib_roundtrip val_loss:\d\.\d{4} val_bpb:\d\.\d{4} eval_time:\d+ms",
    r"final_int8_zlib_roundtrip_exact val_loss:\d\.\d{8} val_bpb:\d\.\d{8}",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data):
    """One tiny run, with the folder it ran in."""
    folder = tmp_path_factory.mktemp("finished")
    result = run_trainer(folder, *tiny_arguments(data, RUN_ID="run"))
    assert result.returncode == 0, result.stderr
    return folder, result


def test_the_log_has_the_lines_that_parsers_read(finished):
    folder, result = finished
    lines = result.stdout.splitlines()
    rest = iter(lines)
    for pattern in PATTERNS:
        assert any(re.fullmatch(pattern, line) for line in rest), (pattern, result.stdout)
    text = (folder / "logs" / "run.txt").read_text()
    assert text.startswith(SOURCE + "\n" + "=" * 100 + "\nRunning Python ")
    assert text.endswith("=" * 100 + "\n" + "\n".join(lines[1:]) + "\n")


def test_events_are_unrounded_and_enough_to_compute_the_score_again(finished):
    folder, result = finished
    seen = events(folder, "run")
    assert [event["event"] for event in seen] == [
        "config", "val", "train", "train", "val", "train", "train", "val", "export", "final"]
    config, export, final = seen[0], seen[-2], seen[-1]
    assert config["overrides"]["NUM_LAYERS"] == ["2", "argument"] and "SEED" not in config["overrides"]
    assert config["config"]["DTYPE"] == "float32" and config["config"]["GRAD_ACCUM_STEPS"] == 8
    exact = re.search(r"roundtrip_exact val_loss:(\S+) val_bpb:(\S+)", result.stdout)
    assert [f"{final[key]:.8f}" for key in ("val_loss", "val_bpb")] == list(exact.groups()) and final["step"] == 4
    bits = final["val_loss"] / math.log(2) * config["val_tokens"] / config["val_bytes"]
    assert final["val_bpb"] == pytest.approx(bits, rel=1e-12) and config["world_size"] == 1
    assert export["code_sha256"] == hashlib.sha256(SOURCE.encode()).hexdigest()
    clock = [event["elapsed_s"] for event in seen]
    assert clock == sorted(clock) and 0 < clock[0] < clock[-1]


def test_two_ranks_compute_what_one_does(data, tmp_path, monkeypatch):
    """With three matrices of some shapes, of which one rank gets two."""
    words = tiny_arguments(data, NUM_LAYERS=3, LANES=1)
    run_here(monkeypatch, tmp_path, *words, "RUN_ID=one")
    result = run_trainer(tmp_path, *words, "RUN_ID=two", "OUT_DIR=out", ranks=2)
    assert result.returncode == 0, result.stderr
    one, two = events(tmp_path, "one"), events(tmp_path, "two")
    assert "world_size:2 grad_accum_steps:4" in result.stdout
    assert result.stdout.count("\nmodel_params:") == 1
    for a, b in zip(one, two, strict=True):
        assert a["event"] == b["event"]
        for key in ("train_loss", "val_loss", "val_bpb", "grad_norm"):
            if key in a:
                assert a[key] == pytest.approx(b[key], rel=2e-4), (key, a, b)


@pytest.mark.parametrize("gpus, device, variables, refusal", [
    (1, "auto", {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
     "LOCAL_RANK=1 has no GPU"),
    (0, "cuda", {}, "DEVICE=cuda is not available here; use cpu"), (0, "cpu", {}, "")])
def test_gpus_that_cannot_be_used_are_a_sentence(monkeypatch, gpus, device, variables, refusal):
    monkeypatch.setattr(os, "environ", variables)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    with pytest.raises(ValueError, match=refusal) if refusal else nullcontext():
        assert train_gpt.start_ranks(tiny_config(device=device)).device.type == "cpu"


@pytest.mark.parametrize("changes, wanted", [
    (dict(DATA_PATH="nowhere"), "DATA_PATH='nowhere' has no .*bin; there is no data set yet; prepare a text"),
    (dict(BETA2=1), "Invalid beta parameter at index 1: 1.0"),
    (dict(INIT_FROM="missing.pt"), "missing.pt"),
    (dict(OUT_DIR="a.model"), "File exists: 'a.model'"),
    (dict(TOKENIZER_PATH="a.model"), "TOKENIZER_PATH='a.model' cannot be read: "),
    (dict(TOKENIZER_PATH="a.json"), "TOKENIZER_PATH='a.json' cannot be read: ")])
def test_mistakes_are_found_before_training(data, tmp_path, monkeypatch, changes, wanted):
    for name in ("a.model", "a.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(SystemExit, match=f"train_gpt.py: .*{wanted}"):
        run_here(monkeypatch, tmp_path, *tiny_arguments(data, **changes))
    assert not [*(tmp_path / "logs").glob("*")]  # no log was begun


def test_a_long_warm_up_logs_every_tenth_step(data, tmp_path, monkeypatch, capsys):
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, ITERATIONS=1, WARMUP_STEPS=25))
    assert re.findall(r"^warmup_step:(\d+)/25$", capsys.readouterr().out, re.M) == ["10", "20", "25"]


def test_float16_trains_alike(finished, data, tmp_path, monkeypatch):
    """With loss scaling: the same losses, nearly, and no step that is skipped for good."""
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, RUN_ID="run", DTYPE="float16"))
    losses = [[e["val_loss"] for e in events(f, "run") if e["event"] == "val"] for f in (finished[0], tmp_path)]
    assert losses[0] == pytest.approx(losses[1], abs=0.05) and losses[1][-1] < losses[1][0] - 0.1


def test_each_run_has_a_folder_of_its_own_and_is_found_by_its_name(data, tmp_path, monkeypatch, capsys):
    """No run replaces what another one has left."""
    common = dict(OUT_DIR="", CHECKPOINT_EVERY=2, VAL_LOSS_EVERY=0)
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, **common, RUN_ID="first", MAX_WALLCLOCK_SECONDS=600))
    assert "step:4/4 train_loss" in capsys.readouterr().out
    first = {path: path.read_bytes() for path in Path("logs").rglob("*.*")}
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, **common, SEED=2))
    assert all(path.read_bytes() == content for path, content in first.items())
    other, = (path for path in (tmp_path / "logs").iterdir() if path.is_dir() and path.name != "first")
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{6}", other.name)
    assert {path.name for path in other.iterdir()} == {"checkpoints", "final_model.int8.ptz", "final_model.pt"}
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, OUT_DIR="", RUN_ID="score", ITERATIONS=0, TRAIN_BATCH_TOKENS=4001,
                                                     INIT_FROM=f"logs/first/{train_gpt.MODEL_FILE}"))
    scored, final = (events(tmp_path, name)[-1]["val_loss"] for name in ("score", "first"))
    assert scored == pytest.approx(final, abs=1e-6)
    assert events(tmp_path, "score")[0]["overrides"]["INIT_FROM"] == ["logs/first/final_model.int8.ptz", "argument"]
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, **common, SEED=2, RESUME="auto", ITERATIONS=6))
    assert events(tmp_path, other.name)[-1]["step"] == 6  # of the newest run, whose name was made up
    for changes in (dict(SEED=3), dict(OPTIMIZER="adamw", CONTROL_TENSOR_NAME_PATTERNS="blocks")):
        run_here(monkeypatch, tmp_path, *tiny_arguments(data, **common, RUN_ID="first", ITERATIONS=1, **changes))
    kept = [path.read_bytes() for path in (tmp_path / "logs").rglob("*.*")]  # logs, models and checkpoints are set aside
    assert set(first.values()) < set(kept) and events(tmp_path, "first")[-1]["step"] == 1


def test_shards_that_are_not_those_of_the_manifest_are_named(tmp_path, monkeypatch):
    data = make_shards(tmp_path)
    shards = {split: {"shards": [{"file": path.name} for path in data.glob(f"*_{split}_*.bin")]} for split in ("train", "val")}
    (data / "manifest.json").write_text(json.dumps({"splits": shards}))
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, ITERATIONS=1))
    for name in ("tiny_train_000000 copy.bin", "tiny_val_000001.bin"):
        write_shard(data / name, [1, 2] * 100)
    (data / "tiny_train_000001.bin").unlink()
    for iterations, lost in ((1, "'tiny_train_000001.bin', "), (0, "")):  # scoring needs no training text
        with pytest.raises(SystemExit, match=rf"differ in \['tiny_train_000000 copy.bin', {lost}'tiny_val_000001.bin'\]; copy missing"):
            run_here(monkeypatch, tmp_path, *tiny_arguments(data, ITERATIONS=iterations))


def test_the_manifest_says_which_tokenizer_the_data_have(tmp_path, monkeypatch):
    data = make_shards(tmp_path)
    words = [word for word in tiny_arguments(data) if not word.startswith(("TOKENIZER_PATH", "VOCAB_SIZE"))]
    manifest = data / "manifest.json"
    manifest.write_text(json.dumps({"tokenizer": {"name": "byte260", "vocab_size": 260}}))
    run_here(monkeypatch, tmp_path, *words, "RUN_ID=run")
    overrides = events(tmp_path, "run")[0]["overrides"]
    assert overrides["TOKENIZER_PATH"] == ["byte260", "manifest"] and overrides["VOCAB_SIZE"] == ["260", "manifest"]
    (data / "tokenizer.model").write_text("{}")
    manifest.write_text(json.dumps({"tokenizer": {"name": "tokenizer.model", "vocab_size": 300}}))
    for more in ("SEED=1", f"INIT_FROM={tmp_path / 'final_model.int8.ptz'}"):  # not the model's: its digest checks the file
        config, _ = train_gpt.load_config([*words, more, "VOCAB_SIZE=260"], {"DATA_PATH": "elsewhere"})  # what is set wins
        assert (config.tokenizer_path, config.vocab_size) == (str(data / "tokenizer.model"), 260)
    for damaged in ("{", "[]", '{"tokenizer": 3}', '{"tokenizer": {}}'):
        manifest.write_text(damaged)
        assert train_gpt.load_config(words, {})[0].vocab_size == 1024


def other_values() -> list[str]:
    """Each on/off switch, and each other choice, that is not of the machine."""
    found = []
    for name, f in train_gpt.FIELDS.items():
        values = [True, False] if f.type is bool else get_args(f.type)
        if name not in train_gpt.OF_RUN and name != "DTYPE":
            found += [f"{name}={value}" for value in values if value != f.default]
    return found


@pytest.mark.parametrize("setting", other_values())
def test_a_switch_trains_from_a_real_start_and_resumes(data, tmp_path, monkeypatch, setting):
    """Outputs start at zero, and so do many gradients: a division by their size must not show."""
    common = dict(ITERATIONS=4, CHECKPOINT_EVERY=2, OUT_DIR="", TRAIN_LOG_EVERY=1)
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, **common, RUN_ID="whole"), setting)
    losses = [event["train_loss"] for event in events(tmp_path, "whole") if event["event"] == "train"]
    assert losses[-1] < losses[0]
    middle = "logs/whole/checkpoints/whole_00000002.pt"
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, **common, RUN_ID="resumed", RESUME=middle), setting)
    whole, resumed = (Path("logs", name, train_gpt.MODEL_FILE).read_bytes() for name in ("whole", "resumed"))
    assert whole == resumed


@pytest.mark.parametrize("preset", sorted(REPOSITORY.glob("records/presets/*.env")), ids=lambda path: path.stem)
def test_presets_train_and_export(data, tmp_path, monkeypatch, preset):
    """Their switches on a small model: the shape, the data and the clock are the tests'."""
    _, settings = train_gpt.load_config([f"@{preset}"], {})
    small = {"NUM_HEADS": 4, "NUM_KV_HEADS": 2, "MODEL_DIM": 64, "NUM_LAYERS": 3, "ITERATIONS": 8, "VAL_LOSS_EVERY": 0,
             "MAX_WALLCLOCK_SECONDS": 0, "INT8_KEEP_FLOAT_MAX_NUMEL": 1000, "RUN_ID": "preset"}
    shorter = {"EVAL_STRIDE": 16, "LANES": 2}
    small |= {name: value for name, value in shorter.items() if name in settings}
    run_here(monkeypatch, tmp_path, f"@{preset}", *tiny_arguments(data, **small))
    log = events(tmp_path, "preset")
    first, final = next(event for event in log if event["event"] == "train"), log[-1]
    assert final["step"] == 8 and final["val_loss"] < first["train_loss"] - 0.1


@pytest.fixture
def rows_of_steps(monkeypatch):
    """The rows that each step of the last run read; it learns nothing. The clock is uneven: about a second a step."""
    found, rows, trained = {}, [], []
    read, batches = train_gpt.TokenLoader.read, train_gpt.TokenLoader.batches

    def read_row(loader, start, count):
        rows.append(start // 32)
        return read(loader, start, count)

    def read_step(loader, number, *steps):
        rows.clear()
        result = batches(loader, number, *steps)
        found[number] = list(rows)
        return result

    def train_step(*rest):
        trained.append(1)
        return torch.ones(()), torch.ones(())

    monkeypatch.setattr(train_gpt.TokenLoader, "read", read_row)
    monkeypatch.setattr(train_gpt.TokenLoader, "batches", read_step)
    monkeypatch.setattr(train_gpt.Trainer, "train_step", train_step)
    monkeypatch.setattr(train_gpt.Ranks, "now_ms", lambda ranks: 1000 * len(trained) + 400 * (len(trained) % 3))
    return found


@pytest.mark.parametrize("steps, limit", [
    (10, {"ITERATIONS": 10}), (13, {"ITERATIONS": 13}), (20, {"ITERATIONS": 20}), (31, {"ITERATIONS": 31}), (39, {"ITERATIONS": 39}),
    (31, {"ITERATIONS": 900, "MAX_WALLCLOCK_SECONDS": 31.2}), (12, {"ITERATIONS": 900, "MAX_WALLCLOCK_SECONDS": 12})])
def test_a_shuffled_run_ends_with_a_whole_epoch_also_after_a_resume(tmp_path, monkeypatch, rows_of_steps, steps, limit):
    """An epoch has 437 rows: 13 steps, and 21 rows left over. From two epochs on, the last one is whole."""
    words = tiny_arguments(make_shards(tmp_path), LOADER="shuffled", CHECKPOINT_EVERY=1, **limit)
    monkeypatch.setattr(train_gpt, "KEPT_CHECKPOINTS", 40)
    run_here(monkeypatch, tmp_path, *words, "RUN_ID=run")
    whole = [rows_of_steps[number] for number in range(steps)]
    counted = steps == limit["ITERATIONS"]
    first, last = sum(whole[:13], []), sum(whole[-13 if counted else -11:], [])  # a clock may be wrong by two steps
    assert len(set(first)) == len(first) == 32 * min(13, steps)
    if steps >= 26:
        assert len(set(last)) == len(last) and sorted(map(sorted, whole[:13])) != sorted(map(sorted, whole[-13:]))
    starts = {steps - 14, steps - 13, steps - 12, steps - 1} & set(range(1, steps))
    for start in starts if counted else ():  # a clock does not repeat itself
        run_here(monkeypatch, tmp_path, *words, "RUN_ID=other", f"RESUME=checkpoints/run_{start:08d}.pt")
        assert [rows_of_steps[number] for number in range(start, steps)] == whole[start:], start


def test_a_run_that_is_extended_does_not_read_its_last_rows_again(tmp_path, monkeypatch, rows_of_steps):
    words = tiny_arguments(make_shards(tmp_path), LOADER="shuffled", CHECKPOINT_EVERY=31)
    run_here(monkeypatch, tmp_path, *words, "RUN_ID=run", "ITERATIONS=31")
    before = [rows_of_steps[number] for number in range(22, 31)]
    run_here(monkeypatch, tmp_path, *words, "RUN_ID=more", "ITERATIONS=35", "RESUME=checkpoints/run_00000031.pt")
    again = set(sum(before, [])) & set(sum((rows_of_steps[number] for number in range(31, 35)), []))
    assert not again


def test_the_file_stays_under_its_cap():
    lines = SOURCE.splitlines()
    assert len(lines) < 1500, "more than a pull request may have; in a clone of your own, it does not matter"
    assert max(map(len, lines)) <= 100


def test_importing_the_file_touches_no_gpu_and_prints_nothing():
    code = ("import torch, torch.cuda\n"
            "def fail(*a, **k): raise AssertionError('CUDA was touched')\n"
            "torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = fail\n"
            "import train_gpt")
    result = run_trainer(REPOSITORY, code, script="-c")
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
