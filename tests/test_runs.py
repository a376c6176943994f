"""Whole runs of the script: the log's lines, ranks, devices, and what is found before training."""

import hashlib
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import time

import pytest
import torch
import train_gpt
from conftest import (PLAIN_KERNEL, REPOSITORY, events, make_shards, one_process, run_here, run_trainer, tiny_arguments,
                      tiny_config, write_shard)

NUMBER = r"-?\d+(\.\d+)?"
PATTERNS = [
    r"logs/run\.txt",
    r"val_bpb:enabled tokenizer_kind=byte tokenizer_path=byte260.*",
    r"train_loader:dataset:tiny train_shards:2.*",
    r"val_loader:shards pattern=.*/tiny/\*_val_\*\.bin tokens:2976.*",
    r"model_params:\d+",
    r"world_size:1 grad_accum_steps:8.*",
    rf"sdp_backends:cudnn=False flash={PLAIN_KERNEL == 'flash'} mem_efficient=False math={PLAIN_KERNEL == 'math'}.*",
    r"attention_mode:gqa num_heads:2 num_kv_heads:1",
    r"tie_embeddings:True embed_lr:0.03 head_lr:0.0 matrix_lr:0.02 scalar_lr:0.02",
    r"train_batch_tokens:1024 train_seq_len:32 iterations:4 warmup_steps:1 max_wallclock_seconds:0.000",
    r"seed:1337",
    r"warmup_step:1/1",
    rf"step:0/4 val_loss:\d\.\d{{4}} val_bpb:{NUMBER} train_time:\d+ms step_avg:{NUMBER}ms",
    *[rf"step:{n}/4 train_loss:\d\.\d{{4}} train_time:\d+ms step_avg:\d+\.\d\dms lr:\S+ grad_norm:{NUMBER} "
      r"tok_per_sec:\d+ eta:\d+\.\dm epoch:0\.\d{3}" for n in (1, 2)],
    r"step:2/4 val_loss:.*",
    r"step:3/4 train_loss:.*", r"step:4/4 train_loss:.*", r"step:4/4 val_loss:.*",
    r"Serialized model: \d+ bytes", r"Code size: \d+ bytes", r"Total submission size: \d+ bytes",
    r"Serialized model int8\+zlib: \d+ bytes \(payload:\d+ raw_torch:\d+ payload_ratio:\d\.\d\dx\)",
    r"Total submission size int8\+zlib: \d+ bytes",
    r"final_int8_zlib_roundtrip val_loss:\d\.\d{4} val_bpb:\d\.\d{4} eval_time:\d+ms",
    r"final_int8_zlib_roundtrip_exact val_loss:\d\.\d{8} val_bpb:\d\.\d{8}",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One tiny run, with the folder it ran in and the folder of its data."""
    folder = tmp_path_factory.mktemp("finished")
    data = make_shards(folder)
    result = run_trainer(folder, *tiny_arguments(data, RUN_ID="run"))
    assert result.returncode == 0, result.stderr
    return folder, data, result


def test_the_log_has_the_lines_that_parsers_read(finished):
    folder, _, result = finished
    lines = result.stdout.splitlines()
    assert len(lines) == len(PATTERNS), result.stdout
    for line, pattern in zip(lines, PATTERNS):
        assert re.fullmatch(pattern, line), (pattern, line)
    text = (folder / "logs" / "run.txt").read_text()
    source = (train_gpt.Path(train_gpt.__file__)).read_text()
    assert text.startswith(source + "\n" + "=" * 100 + "\nRunning Python ")
    settings = next(line for line in text.splitlines() if line.startswith("config:{"))  # 3,000 characters: not on the console
    assert text.replace(settings + "\n", "").endswith("=" * 100 + "\n" + "\n".join(lines[1:]) + "\n")


def test_events_are_unrounded_and_complete(finished):
    folder, _, result = finished
    seen = events(folder, "run")
    assert [event["event"] for event in seen] == [
        "config", "val", "train", "train", "val", "train", "train", "val", "export", "final"]
    config = seen[0]
    assert config["overrides"]["NUM_LAYERS"] == ["2", "argument"] and "SEED" not in config["overrides"]
    assert config["config"]["DTYPE"] == "float32" and config["config"]["GRAD_ACCUM_STEPS"] == 8
    final = seen[-1]
    exact = re.search(r"roundtrip_exact val_loss:(\S+) val_bpb:(\S+)", result.stdout)
    assert final["step"] == 4
    assert [f"{final[key]:.8f}" for key in ("val_loss", "val_bpb")] == list(exact.groups())
    assert f"step:4/4 train_loss:{seen[6]['train_loss']:.4f}" in result.stdout
    assert seen[6]["grad_norm"] > 0 and seen[6]["tok_per_sec"] > 0
    assert seen[6]["epoch"] == pytest.approx(4128 / 14000)


@pytest.mark.parametrize("loader", ["sequential", "shuffled"])
def test_epochs_are_counted_from_the_first_step(tmp_path, monkeypatch, capsys, loader):
    """The warm-up's steps are not counted; 14,000 tokens are 1.7 steps."""
    run_here(monkeypatch, tmp_path, *tiny_arguments(
        make_shards(tmp_path), LOADER=loader, TRAIN_BATCH_TOKENS=8192, WARMUP_STEPS=3, RUN_ID="run"))
    out = capsys.readouterr().out
    assert [float(epoch) for epoch in re.findall(r" epoch:(\S+)", out)] == pytest.approx([0.585, 1.17, 1.76, 2.34], abs=0.01)
    assert "train_shards:2 tokens:14000" in out and events(tmp_path, "run")[0]["config"]["LOADER"] == loader


def test_the_artifact_can_be_scored_alone(finished, tmp_path, monkeypatch):
    """ITERATIONS=0 needs no training data and gives the score that the run ended with. It is found once, and not compiled."""
    folder, data, _ = finished
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "tiny_val_000000.bin").write_bytes((data / "tiny_val_000000.bin").read_bytes())
    run_here(monkeypatch, tmp_path, *tiny_arguments(
        tmp_path / "only", RUN_ID="score", ITERATIONS=0, COMPILE="auto", INIT_FROM=folder / "final_model.int8.ptz"))
    config, scored = events(tmp_path, "score")
    assert config["config"]["COMPILE"] == "0" and scored["event"] == "final"
    assert scored["val_loss"] == pytest.approx(events(folder, "run")[-1]["val_loss"], abs=1e-6)


def test_two_ranks_compute_what_one_does(finished, tmp_path):
    folder, data, _ = finished
    result = run_trainer(tmp_path, *tiny_arguments(data, RUN_ID="run", OUT_DIR="out"), ranks=2)
    assert result.returncode == 0, result.stderr
    one, two = events(folder, "run"), events(tmp_path, "run")
    assert "world_size:2 grad_accum_steps:4" in result.stdout
    assert result.stdout.count("\nmodel_params:") == 1
    for a, b in zip(one, two, strict=True):
        assert a["event"] == b["event"]
        for key in ("train_loss", "val_loss", "val_bpb", "grad_norm"):
            if key in a:
                assert a[key] == pytest.approx(b[key], rel=2e-4), (key, a, b)
    assert (tmp_path / "out" / "final_model.int8.ptz").exists()


def test_ranks_share_the_cores_of_their_machine():
    """Launchers other than torchrun do not set OMP_NUM_THREADS."""
    code = f"""
import sys, torch
sys.path.insert(0, {str(train_gpt.Path(train_gpt.__file__).parent)!r})
import train_gpt
torch.set_num_threads(6)
ranks = train_gpt.start_ranks(train_gpt.Config(device="cpu"))
total = ranks.sum(torch.full((2, 3), ranks.rank + 0.5, dtype=torch.bfloat16))
print(torch.get_num_threads(), total[:, 0].tolist(), ranks.max(ranks.rank, -1.0))
sys.stdout.flush()
train_gpt.os._exit(0)"""
    clean = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={
        **clean, "RANK": str(i), "LOCAL_RANK": str(i), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}) for i in range(2)]
    assert [rank.communicate(timeout=120)[0] for rank in ranks] == ["3 [2.0, 2.0] [1.0, -1.0]\n"] * 2


@pytest.mark.slow
def test_three_ranks_round_the_batch_and_stop_together_at_the_cap(finished, tmp_path):
    _, data, _ = finished
    result = run_trainer(tmp_path, *tiny_arguments(
        data, RUN_ID="three", ITERATIONS=100000, MAX_WALLCLOCK_SECONDS=1, VAL_LOSS_EVERY=0), ranks=3)
    assert result.returncode == 0, result.stderr
    assert "world_size:3 grad_accum_steps:3" in result.stdout
    assert "train_batch_tokens:1152 " in result.stdout  # 36 rows: 32 do not divide into 9 equal spans
    assert result.stderr.count("warning: TRAIN_BATCH_TOKENS=1152, a multiple of 288") == 1
    assert "stopping_early: wallclock_cap" in result.stdout and "roundtrip_exact" in result.stdout


def test_the_next_batch_is_read_before_the_ranks_agree(finished, tmp_path, monkeypatch):
    """So that the host reads while the device works."""
    _, data, _ = finished
    order = []
    for owner, name in ((train_gpt.TokenLoader, "batches"), (train_gpt.Clock, "agree")):
        def noted(self, *arguments, plain=getattr(owner, name), name=name):
            order.append((name, *arguments[:1]) if name == "batches" else name)
            return plain(self, *arguments)
        monkeypatch.setattr(owner, name, noted)
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, RUN_ID="order", ITERATIONS=3, VAL_LOSS_EVERY=0, WARMUP_STEPS=0))
    assert order[1:7] == [("batches", 0), ("batches", 1), "agree", ("batches", 2), "agree", "agree"]
    assert set(order[7:]) == {"agree"}  # none is read after the last


def test_the_log_of_an_earlier_run_is_moved_aside(finished, tmp_path, monkeypatch):
    _, data, _ = finished
    (tmp_path / "logs").mkdir()
    for ending in ("txt", "jsonl"):
        (tmp_path / "logs" / f"again.{ending}").write_text(f"old {ending}")
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, RUN_ID="again", ITERATIONS=1, VAL_LOSS_EVERY=0))
    kept = [path for path in (tmp_path / "logs").iterdir() if path.stem != "again"]
    assert sorted(path.read_text() for path in kept) == ["old jsonl", "old txt"]
    assert kept[0].stem == kept[1].stem
    assert all(json.loads(line) for line in (tmp_path / "logs" / "again.jsonl").read_text().splitlines())


@pytest.mark.parametrize("changes, wanted", [
    (dict(DATA_PATH="nowhere"), "python data/prepare.py sotu"),
    (dict(VOCAB_SIZE=261), "VOCAB_SIZE=261, but tokenizer 'byte260' has 260 tokens; set both to what the shards were made with"),
    (dict(TRAIN_SEQ_LEN=4096, TRAIN_BATCH_TOKENS=32768, VAL_BATCH_SIZE=32768, MICRO_BATCH_TOKENS=0), "too few for a row"),
    (dict(MICRO_BATCH_TOKENS=31), "MICRO_BATCH_TOKENS=31 is less than a row"),
    (dict(BETA2=1), "Invalid beta parameter at index 1: 1.0"),
    (dict(DEVICE="mps"), "DEVICE=mps is not available here; use cpu"),
    (dict(INIT_FROM="missing.pt"), "missing.pt"),
    (dict(OUT_DIR="file"), "File exists: 'file'"),
    (dict(ATTN="cudnn"), "ATTN=cudnn does not run"),
])
def test_mistakes_are_found_before_training(finished, tmp_path, monkeypatch, changes, wanted):
    if changes.get("DEVICE") == "mps" and torch.backends.mps.is_available():
        pytest.skip("MPS is there")
    _, data, _ = finished
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SystemExit, match=f"train_gpt.py: .*{wanted}"):
        run_here(monkeypatch, tmp_path, *tiny_arguments(data, **changes))
    assert not (tmp_path / "logs").exists()


def test_shards_of_another_vocabulary_are_found_before_training(tmp_path, monkeypatch):
    data = make_shards(tmp_path)
    write_shard(data / "tiny_train_000000.bin", [1, 300] * 5000)
    with pytest.raises(SystemExit, match="tiny_train_000000.bin holds token 300.*VOCAB_SIZE=260"):
        run_here(monkeypatch, tmp_path, *tiny_arguments(data))
    assert not (tmp_path / "logs").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere CPUs are not compiled for")
def test_a_compiler_that_fails_is_an_error_that_says_what_to_do(finished, tmp_path):
    result = run_trainer(tmp_path, *tiny_arguments(finished[1], COMPILE="auto", ITERATIONS=2), environment={
        "CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")})
    assert result.returncode == 1 and result.stderr.count("train_gpt.py: ") == 1
    assert result.stderr.endswith("or set COMPILE=0\n")


@pytest.mark.parametrize("missing", ["Python.h", "g++"])
def test_nothing_is_compiled_where_a_compiler_or_the_headers_of_python_are_missing(monkeypatch, missing):
    if missing == "g++":
        monkeypatch.setenv("CXX", "no-such-compiler")
    else:
        monkeypatch.setattr(sysconfig, "get_path", lambda name: "nowhere")
    assert train_gpt.resolve(tiny_config(compile="auto"), one_process()).compile == "0"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_types_train_alike(finished, tmp_path, monkeypatch, dtype):
    """float16 with loss scaling: the same losses, nearly, and no step that is skipped for good."""
    folder, data, _ = finished
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, RUN_ID="run", DTYPE=dtype))
    losses = [[e["val_loss"] for e in events(f, "run") if e["event"] == "val"] for f in (folder, tmp_path)]
    assert losses[0] == pytest.approx(losses[1], abs=0.05) and losses[1][-1] < losses[1][0] - 0.1


def test_untied_clipped_and_accumulated_by_hand(finished, tmp_path, monkeypatch, capsys):
    _, data, _ = finished
    run_here(monkeypatch, tmp_path, *tiny_arguments(
        data, RUN_ID="run", TIE_EMBEDDINGS=0, GRAD_CLIP_NORM=0.5, GRAD_ACCUM_STEPS=2, WARMUP_STEPS=0))
    output = capsys.readouterr().out
    assert "world_size:1 grad_accum_steps:2" in output and "embed_lr:0.6 head_lr:0.008" in output
    losses = [e["val_loss"] for e in events(tmp_path, "run") if e["event"] == "val"]
    assert losses[-1] < losses[0] and len(losses) == 3


def test_the_log_names_the_rates_that_adamw_uses(finished, tmp_path, monkeypatch, capsys):
    _, data, _ = finished
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, RUN_ID="run", OPTIMIZER="adamw", ITERATIONS=1, ADAM_LR=0.001))
    output = capsys.readouterr().out
    assert "\ntie_embeddings:True embed_lr:0.001 head_lr:0.0 matrix_lr:0.001 scalar_lr:0.001\n" in output


def test_a_log_has_what_its_numbers_can_be_recomputed_from(finished):
    folder, _, _ = finished
    log = events(folder, "run")
    config, final, export = log[0], log[-1], next(e for e in log if e["event"] == "export")
    bits = final["val_loss"] / math.log(2) * config["val_tokens"] / config["val_bytes"]
    assert final["val_bpb"] == pytest.approx(bits, rel=1e-12) and config["world_size"] == 1
    assert export["code_sha256"] == hashlib.sha256((REPOSITORY / "train_gpt.py").read_bytes()).hexdigest()
    clock = [e["elapsed_s"] for e in log]
    assert clock == sorted(clock) and 0 < clock[0] < clock[-1]


def test_a_quick_look_scores_the_first_tokens_and_every_line_says_so(tmp_path, monkeypatch, capsys):
    data = make_shards(tmp_path)
    scores = {}
    for tokens in (0, 100, 5000):
        run_here(monkeypatch, tmp_path, *tiny_arguments(data, RUN_ID=f"v{tokens}", VAL_TOKENS=tokens, EVAL_STRIDE=16))
        scores[tokens] = events(tmp_path, f"v{tokens}")
        shown = [line for line in capsys.readouterr().out.splitlines() if "val_bpb:" in line and "enabled" not in line]
        assert len(shown) == 6 and all(line.endswith(f" partial:{tokens}") == bool(tokens) for line in shown), shown
    assert [log[0]["val_tokens"] for log in scores.values()] == [2976, 128, 2976]  # full rows
    whole, part, more = ([e["val_loss"] for e in log if e["event"] in ("val", "final")] for log in scores.values())
    assert whole == more and len(part) == len(whole) and all(a != b for a, b in zip(part, whole))
    manifest = {"splits": {"val": {"tokens": 2999, "shards": []}}}  # the whole text is checked
    (data / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(SystemExit, match=r"manifest.json says \[2999, .*shards and TOKENIZER_PATH='byte260' give"):
        run_here(monkeypatch, tmp_path, *tiny_arguments(data, VAL_TOKENS=100))


def test_each_run_has_a_folder_of_its_own_and_is_found_by_its_name(tmp_path, monkeypatch, capsys):
    """A second run does not overwrite the first one's model; INIT_FROM and RESUME find what they mean."""
    data = make_shards(tmp_path)
    common = dict(OUT_DIR="", CHECKPOINT_EVERY=2, MAX_WALLCLOCK_SECONDS=600)
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, **common, RUN_ID="first"))
    model = (tmp_path / "logs" / "first" / "final_model.int8.ptz").read_bytes()
    assert re.search(r"step:4/4 train_loss.* cap:\d+\.\d% eta:", capsys.readouterr().out)
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, **common, SEED=2))
    names = {path.name for path in (tmp_path / "logs").iterdir() if path.is_dir()}
    other, = names - {"first"}
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{6}", other)
    assert (tmp_path / "logs" / "first" / "final_model.int8.ptz").read_bytes() == model
    assert {path.name for path in (tmp_path / "logs" / other).iterdir()} == {"checkpoints", "final_model.int8.ptz", "final_model.pt"}
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, OUT_DIR="", RUN_ID="score", ITERATIONS=0, INIT_FROM="first"))
    scored, final = (events(tmp_path, name)[-1]["val_loss"] for name in ("score", "first"))
    assert scored == pytest.approx(final, abs=1e-6)
    assert events(tmp_path, "score")[0]["overrides"]["INIT_FROM"] == ["logs/first/final_model.int8.ptz", "argument"]
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, **common, SEED=2, RESUME="auto", ITERATIONS=6))
    assert events(tmp_path, other)[-1]["step"] == 6  # of the newest run, whose name was made up


def test_a_name_that_has_a_model_is_not_used_again(tmp_path, monkeypatch, capsys):
    """Not even by ITERATIONS=0, which would write an untrained model; a checkpoint may go on, a score writes no model."""
    data = make_shards(tmp_path)
    common = dict(OUT_DIR="", RUN_ID="run", CHECKPOINT_EVERY=2)
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, **common))
    files = {path: path.read_bytes() for path in (tmp_path / "logs").rglob("*.*")}
    for changes in (dict(SEED=2), dict(ITERATIONS=0), dict(RESUME="auto", KEEP_CHECKPOINTS=1)):
        if "RESUME" in changes:
            for path in (tmp_path / "logs").rglob("*.pt"):
                path.unlink()
        with pytest.raises(SystemExit, match="logs/run/final_model.int8.ptz exists; set another RUN_ID, or INIT_FROM=run to"):
            run_here(monkeypatch, tmp_path, *tiny_arguments(data, **{**common, **changes}))
        assert all(path.read_bytes() == old for path, old in files.items() if path.exists())
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, **common, ITERATIONS=0, INIT_FROM="run"))
    assert events(tmp_path, "run")[-1]["event"] == "final"
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, OUT_DIR="elsewhere", RUN_ID="run", ITERATIONS=2))
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, OUT_DIR="elsewhere", RUN_ID="run", ITERATIONS=2))


def test_a_model_that_lies_in_logs_is_no_start(tmp_path, monkeypatch):
    data = make_shards(tmp_path)
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, OUT_DIR="logs"))
    monkeypatch.chdir(tmp_path)
    assert train_gpt.load_config(list(tiny_arguments(data)), {})[0].init_from == ""


@pytest.mark.parametrize("name", ["tiny_train_000000 copy.bin", "tiny_train_000001.bin", "tiny_val_000001.bin"])
def test_shards_that_the_manifest_does_not_list_are_named(tmp_path, monkeypatch, name):
    data = make_shards(tmp_path)
    shards = {split: {"shards": [{"file": path.name} for path in data.glob(f"*_{split}_*.bin")]} for split in ("train", "val")}
    (data / "manifest.json").write_text(json.dumps({"splits": shards}))
    run_here(monkeypatch, tmp_path, *tiny_arguments(data, ITERATIONS=1))
    extra = data / name
    shards["train"]["shards"] = [entry for entry in shards["train"]["shards"] if entry["file"] != name]
    (data / "manifest.json").write_text(json.dumps({"splits": shards}))
    if not extra.exists():
        write_shard(extra, [1, 2] * 100)
    with pytest.raises(SystemExit, match=f"manifest.json does not list {name}; move away"):
        run_here(monkeypatch, tmp_path, *tiny_arguments(data, ITERATIONS=1))


def test_a_damaged_manifest_is_named_before_the_tokens_that_it_would_explain(tmp_path, monkeypatch):
    data = make_shards(tmp_path)
    (data / "manifest.json").write_text("{")
    with pytest.raises(SystemExit, match="manifest.json is damaged: .*make the data again"):
        run_here(monkeypatch, tmp_path, *tiny_arguments(data, VOCAB_SIZE=7, TOKENIZER_PATH="elsewhere.model"))


def test_the_manifest_says_which_tokenizer_the_data_have(tmp_path, monkeypatch):
    data = make_shards(tmp_path)
    words = [word for word in tiny_arguments(data) if not word.startswith(("TOKENIZER_PATH", "VOCAB_SIZE"))]
    manifest = data / "manifest.json"
    manifest.write_text(json.dumps({"tokenizer": {"name": "byte260", "vocab_size": 260}}))
    config, given = train_gpt.load_config(words, {})
    assert (config.tokenizer_path, config.vocab_size) == ("byte260", 260)
    assert given["VOCAB_SIZE"] == ("260", "manifest")
    run_here(monkeypatch, tmp_path, *words, "RUN_ID=run")
    assert events(tmp_path, "run")[0]["overrides"]["TOKENIZER_PATH"] == ["byte260", "manifest"]
    (data / "tokenizer.json").write_text("{}")
    manifest.write_text(json.dumps({"tokenizer": {"name": "tokenizer.json", "vocab_size": 300}}))
    config, _ = train_gpt.load_config([*words, "VOCAB_SIZE=7"], {"DATA_PATH": "elsewhere"})  # what is set wins
    assert (config.tokenizer_path, config.vocab_size) == (str(data / "tokenizer.json"), 7)
    config, _ = train_gpt.load_config([*words, f"INIT_FROM={tmp_path / 'final_model.int8.ptz'}"], {})
    assert config.tokenizer_path == str(data / "tokenizer.json")  # the data's, which the model's digest checks
    for damaged in ("{", "[]", '{"tokenizer": 3}', '{"tokenizer": {}}'):
        manifest.write_text(damaged)
        assert train_gpt.load_config(words, {})[0].vocab_size == 1024


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("timeout"), reason="the program `timeout` is not here")
def test_an_nvidia_smi_that_hangs_holds_up_a_run_for_half_a_minute(tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho H100\nexec sleep 200\n")
    program.chmod(0o755)
    started = time.monotonic()
    result = run_trainer(tmp_path, *tiny_arguments(make_shards(tmp_path), ITERATIONS=1),
                         environment={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert result.returncode == 0 and time.monotonic() - started < 120, result.stderr
    assert "\nH100\n" in next((tmp_path / "logs").glob("*.txt")).read_text()


def test_a_process_says_what_it_waits_for(tmp_path):
    data = make_shards(tmp_path)
    result = run_trainer(tmp_path, *tiny_arguments(data, ITERATIONS=1), ranks=2)
    assert re.search(r"^joining 2 ranks at \S+:\d+$", result.stderr, re.M), result.stderr
    result = run_trainer(tmp_path, *tiny_arguments(data, ITERATIONS=1), environment={"SLURM_NTASKS": "2"})
    assert result.returncode == 0 and "warning: one process of SLURM_NTASKS: start it by srun" in result.stderr
    assert result.stdout.startswith("logs/")


def test_help_shows_every_default_as_one_writes_it(capsys):
    train_gpt.print_help()
    lines = [line for line in capsys.readouterr().out.splitlines() if re.match(r"  [A-Z0-9_]+=", line)]
    assert len(lines) == len(train_gpt.FIELDS) and any(line.startswith("  TIE_EMBEDDINGS=1  ") for line in lines)
    shorter = [line for line in lines if not re.match(r"  (DATA|TOKENIZER|CONTROL|INT8)_", line)]
    assert all(line[37] == " " and line[38] != " " for line in shorter)
