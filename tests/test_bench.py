"""tools/bench.py: what it computes from a log, and the tables of a comparison at a tiny size."""

import gzip
import json
import re

import bench
import pytest
from conftest import REPOSITORY, run_script, run_trainer

TINY = ("NUM_LAYERS=1 MODEL_DIM=32 NUM_HEADS=2 NUM_KV_HEADS=1 TRAIN_SEQ_LEN=32 TRAIN_BATCH_TOKENS=1024 "
        "COMPILE=0 DEVICE=cpu")


def train(step, ms):
    return {"event": "train", "step": step, "train_time_ms": ms}


def test_quantities_are_computed_from_console_and_events():
    """By hand: 3 steps of 1,000 tokens in 1.5 s; 5,000 tokens scored in 2 s; an export of 12 - 9.5 - 2 s. A token takes
    6 x (2 x 8 x 8 + 2 x 8 x 4 + 2 x 2 x 8 x 8 + 10 x 8) + 12 x 8 x 16 = 4,704 operations."""
    settings = {"TRAIN_BATCH_TOKENS": 1000, "ITERATIONS": 4, "DEVICE": "cpu", "NUM_LAYERS": 1, "MODEL_DIM": 8, "NUM_HEADS": 2,
                "NUM_KV_HEADS": 1, "MLP_MULT": 2, "VOCAB_SIZE": 10, "TRAIN_SEQ_LEN": 16}
    events = [{"event": "config", "config": settings}, train(1, 700), train(2, 1200),
              {"event": "val", "step": 0, "train_time_ms": 0},
              {"event": "val", "step": 4, "train_time_ms": 2200},
              {"event": "export", "artifact_bytes": 99}, {"event": "final", "eval_time_ms": 2000}]
    lines = [(1.0, "logs/bench.txt"), (1.1, "train_loader:dataset:data train_shards:1 tokens:7000"),
             (1.1, "val_loader:shards pattern=../data/*_val_*.bin tokens:5000"),
             (4.7, "step:1/4 train_loss:6.9"),
             (9.5, "step:4/4 val_loss:6.9 val_bpb:4.1"),
             (9.8, "peak memory allocated: 12 MiB reserved: 20 MiB"),
             (12.0, "final_int8_zlib_roundtrip val_loss:6.9 val_bpb:4.1 eval_time:2000ms"),
             (12.0, "final_int8_zlib_roundtrip_exact val_loss:6.9 val_bpb:4.1")]
    wanted = {"tokens_per_s": 2000, "tflops": 2000 * 4704 / 1e12, "val_tokens_per_s": 2500, "export_s": 0.5, "start_s": 4.0, "artifact_bytes": 99}
    assert bench.quantities(lines, events, skip=1) == pytest.approx(wanted)
    settings["DEVICE"] = "cuda"
    assert bench.quantities(lines, events, skip=2) == pytest.approx({**wanted, "peak_mib": 12})


def test_a_table_has_medians_ranges_and_the_ratios_of_rounds():
    sides = [("old", [{"export_s": 3.0, "first_start_s": 9.0}, {"export_s": 1.0}, {"export_s": 2.0}]),
             ("new", [{"export_s": 1.5}, {"export_s": 0.9}, {"export_s": 1.6}])]
    assert bench.median_table("cpu-small", sides) == """\
| cpu-small | old | new | ratio of each round |
|---|---|---|---|
| export, s | 2.00 (1.00 to 3.00) | 1.50 (0.90 to 1.60) | 0.800 (0.500 to 0.900) |
| first start to first step, s | 9.0 |  |  |
"""
    assert bench.median_table("cpu-small", sides[1:]) == """\
| cpu-small | new |
|---|---|
| export, s | 1.50 (0.90 to 1.60) |
"""
    third = ("newer", [{"export_s": 6.0}, {"export_s": 2.0}, {"export_s": 4.0}])
    heading, _, row, _ = bench.median_table("cpu-small", [*sides, third]).splitlines()
    assert heading == "| cpu-small | old | new | newer | new, ratio | newer, ratio |"
    assert row.endswith("| 0.800 (0.500 to 0.900) | 2.000 (2.000 to 2.000) |")


@pytest.mark.parametrize("words, message", [
    (["--rounds", "0"], "^2$"), (["--steps", "-1"], "^2$"), (["--ranks", "0"], "^2$"), (["NUM_LAYER=4"], "bench.py: NUM_LAYER=.*did you mean NUM_LAYERS"), (["--with", "ATTN"], "bench.py: 'ATTN' is not VARIABLE=value")])
def test_mistakes_are_named(words, message, monkeypatch):
    with pytest.raises(SystemExit, match=message):
        run_script(monkeypatch, bench, "cpu-small", *words)


def test_every_configuration_is_one_of_the_trainers():
    shapes = {name: bench.variables_of(settings.split()) for name, (settings, _, _) in bench.CONFIGURATIONS.items()}
    assert shapes["cpu-preset"]["NUM_LAYERS"] == "3" and shapes["gpu-preset"]["VOCAB_SIZE"] == "8192"  # of the presets' files
    assert shapes["cpu-preset"]["VOCAB_SIZE"] == "2048"  # as of the speeches, which the preset is for


@pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="not in a git repository")
@pytest.mark.slow
def test_two_commits_are_compared_and_steps_are_timed_in_parts_and_profiled(tmp_path):
    words = ["cpu-small", "--against", "HEAD", "--parts", "--profile", tmp_path / "traces", "--rounds", 1, "--steps", 2]
    done = run_trainer(REPOSITORY, *words, *TINY.split(), script=bench.__file__, environment={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    table = re.search(r"(?:^\|.*\n)+", done.stdout, re.M)[0]
    heading, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    assert heading[0] == "cpu-small" and heading[2].startswith(heading[1])  # a commit, and maybe changes
    assert heading[3] == "ratio of each round"
    numbers = {title: [float(text.replace(",", "")) for text in cells] for title, *cells in rows}
    limits = {"training, tokens/s": (100, 1e7), "training, TFLOP/s": (0, 1), "% of the peak": (0, 100), "validation, tokens/s": (100, 1e8), "export, s": (0, 30),
              "peak memory, MiB": (100, 4000), "artifact, bytes": (10_000, 100_000), "first start to first step, s": (0.5, 60)}
    assert numbers.keys() == limits.keys()
    assert all(low < number < high for title, (low, high) in limits.items() for number in numbers[title][:2]), numbers
    before, after, ratio = numbers["training, tokens/s"]
    assert ratio == pytest.approx(after / before, abs=0.01)
    parts = re.findall(r"^\| (\w+) \| ([\d.]+) \| (\d+)% \|$", done.stdout, re.M)
    assert [part for part, _, _ in parts] == ["forward", "backward", "optimizer"]
    assert all(float(ms) > 0 for _, ms, _ in parts) and sum(int(share) for _, _, share in parts) == pytest.approx(100, abs=1)
    trace = json.loads(gzip.decompress((tmp_path / "traces" / "cpu-small.trace.json.gz").read_bytes()))
    optimizer_steps = [event for event in trace["traceEvents"] if event.get("name", "").startswith("Optimizer.step#Muon.step")]
    assert len(optimizer_steps) == 3
    assert "Self CPU time total" in done.stdout and "cpu-small.trace.json.gz" in done.stdout.splitlines()[-2]
