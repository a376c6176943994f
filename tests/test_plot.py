"""logs/plot.py: what it reads from both kinds of logs, and how it compares runs."""

import json
import re

import plot
import pytest
from events import older_logs

SEED_LOG = """print("step:1/9 train_loss:1.0 train_time:1ms")
{line}
Running Python 3.11
{line}
val_bpb:enabled tokenizer_kind=sentencepiece tokenizer_path=m.model
train_batch_tokens:524288 train_seq_len:1024 iterations:20000 warmup_steps:20 max_wallclock_seconds:600.000
seed:{seed}
warmup_step:1/20
step:0/20000 val_loss:6.9357 val_bpb:4.1077 train_time:0ms step_avg:0.02ms
step:1/20000 train_loss:6.9370 train_time:34ms step_avg:33.69ms
step:2/20000 train_loss:16.8366 train_time:64ms step_avg:32.09ms grad_norm:n/a
step:200/20000 train_loss:2.8514 train_time:8641ms step_avg:43.20ms
step:200/20000 val_loss:2.0606 val_bpb:1.2172 train_time:8659ms step_avg:43.3ms
Code size: 47642 bytes
Serialized model int8+zlib: 15815847 bytes (payload:17178912 raw_torch:17224025 payload_ratio:3.91x)
final_int8_zlib_roundtrip val_loss:2.0727 val_bpb:1.2244 eval_time:1401ms
final_int8_zlib_roundtrip_exact val_loss:2.07269931 val_bpb:1.2243657{seed}
"""


SHAPE = {"NUM_LAYERS": 9, "MODEL_DIM": 512, "NUM_HEADS": 8, "NUM_KV_HEADS": 4, "MLP_MULT": 2, "TRAIN_SEQ_LEN": 4096,
         "VOCAB_SIZE": 1024, "VOCAB_PAD": 1}


def write_events(path, seed=1, lr=0.02, steps=(1, 2, 3, 4), resume=None, final=True, shift=0.0, gpu="",
                 dtype="bfloat16", data="a/set"):
    settings = {"SEED": seed, "RUN_ID": path.stem, "MATRIX_LR": lr, "TRAIN_BATCH_TOKENS": 1000,
                "DATA_PATH": data, "DTYPE": dtype, **SHAPE}
    events = [{"event": "config", "config": settings, "overrides": {}, "world_size": 2, "gpu": gpu}]
    if resume is not None:
        events.append({"event": "resume", "step": resume})
    for step in steps:
        events.append({"event": "train", "step": step, "train_loss": 5 - step + shift, "train_time_ms": 1000 * step,
                       "lr": lr, "grad_norm": 0.5, "tok_per_sec": 1000 + step})
        if step % 2 == 0:
            events.append({"event": "val", "step": step, "val_loss": 4 - step / 2 + shift, "val_bpb": 2 - step / 4,
                           "train_time_ms": 1000 * step})
    if final:
        events += [{"event": "export", "artifact_bytes": 900, "code_bytes": 100},
                   {"event": "final", "step": steps[-1], "val_loss": 2.01, "val_bpb": 1.01}]
    path.write_text("\n".join(map(json.dumps, events)) + "\n")
    return path


def seed_log(path, seed):
    path.write_text(SEED_LOG.format(line="=" * 100, seed=seed))
    return path


def test_the_published_trainers_log_is_read_from_its_text(tmp_path):
    run = plot.read_run(str(seed_log(tmp_path / "train_seed7.log", 7)))
    assert run.train["step"] == [1, 2, 200] and run.train["loss"] == [6.9370, 16.8366, 2.8514]  # not the source's
    assert run.train["seconds"] == [0.034, 0.064, 8.641] and all(x != x for x in run.train["lr"])
    assert run.val["val_bpb"] == [4.1077, 1.2172] and run.tokens_per_step() == 524288
    assert run.final == {"val_loss": 2.07269931, "val_bpb": 1.22436577, "artifact_bytes": 15815847, "code_bytes": 47642}
    assert run.settings["SEED"] == "7" and run.name == f"{tmp_path.name} train_seed7"


def test_both_logs_of_a_run_say_the_same(tmp_path, monkeypatch):
    from conftest import make_shards, run_here, tiny_arguments
    run_here(monkeypatch, tmp_path, *tiny_arguments(make_shards(tmp_path), RUN_ID="both"))
    events, text = plot.read_run("both"), plot.read_run("logs/both.txt")
    assert events.settings["TRAIN_BATCH_TOKENS"] == text.settings["TRAIN_BATCH_TOKENS"] == 1024
    for part in ("train", "val"):
        ours, theirs = getattr(events, part), getattr(text, part)
        assert ours.keys() == theirs.keys() and ours["step"] == theirs["step"]
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
        assert ours["seconds"] == pytest.approx(theirs["seconds"], abs=1e-3)
    assert events.train["grad_norm"] == pytest.approx(text.train["grad_norm"], abs=1e-3)
    assert events.final == pytest.approx(text.final, abs=1e-8)


def test_the_table_has_the_settings_that_differ(tmp_path):
    runs = [plot.read_run(str(write_events(tmp_path / f"{name}.jsonl", lr=lr)))
            for name, lr in (("first", 0.02), ("second", 0.04))]
    rows = {row[0]: row[1:] for row in plot.table_of(runs)}
    assert rows["MATRIX_LR"] == ["0.02", "0.04"] and rows["RUN_ID"] == ["first", "second"] and "SEED" not in rows
    assert rows["steps"] == ["4", "4"] and rows["tokens, M"] == ["0.0", "0.0"] and rows["training, s"] == ["4.0", "4.0"]
    assert rows["tokens/s, median"] == ["1,002", "1,002"] and rows["last val_bpb"] == ["1.0000", "1.0000"]
    assert rows["val_bpb of the artifact"] == ["1.0100", "1.0100"] and rows["artifact and code, bytes"] == ["1,000"] * 2
    lines = plot.markdown(plot.table_of(runs)).splitlines()
    assert len({len(line) for line in lines}) == 1 and re.fullmatch(r"(\|-+){3}\|", lines[1])


@pytest.mark.parametrize("gpu, dtype, wanted", [
    ("NVIDIA L4", "bfloat16", "4.1%"), ("NVIDIA L40S", "bfloat16", "1.4%"), ("NVIDIA H100 80GB HBM3", "bfloat16", "0.5%"),
    ("NVIDIA H100 PCIe", "bfloat16", "0.7%"), ("Tesla T4", "float16", "7.7%"), ("NVIDIA L4", "float32", ""),
    ("NVIDIA L400", "bfloat16", ""), ("", "bfloat16", "")])
def test_mfu_is_of_the_gpus_that_the_log_names(tmp_path, monkeypatch, gpu, dtype, wanted):
    """By hand for the L4: 1,002.5 tokens/s of 1e10 FLOP on two GPUs of 121 TFLOP/s."""
    monkeypatch.setattr(plot, "flops_per_token", lambda config: 10 ** 10)
    old = write_events(tmp_path / "old.jsonl")
    events = [json.loads(line) for line in old.read_text().splitlines()]
    old.write_text("".join(json.dumps({key: e[key] for key in e.keys() - {"gpu"}}) + "\n" for e in events))
    new = write_events(tmp_path / "new.jsonl", gpu=gpu, dtype=dtype)
    rows = {row[0]: row[1:] for row in plot.table_of([plot.read_run(str(path)) for path in (old, new)])}
    assert rows["MFU, median"] == ["", wanted]


def test_flops_count_products_and_causal_attention():
    matrices = 9 * (512 * 512 * 2 + 2 * 256 * 512 + 2 * 1024 * 512) + 1024 * 512
    assert plot.flops_per_token(SHAPE) == 6 * matrices + 27_648 * 4096


def test_seeds_are_one_line_in_a_band_and_other_settings_are_not(tmp_path):
    written = [write_events(tmp_path / "a.jsonl", 1), write_events(tmp_path / "b.jsonl", 2, shift=0.5),
               write_events(tmp_path / "c.jsonl", 3, shift=1), write_events(tmp_path / "d.jsonl", 1, lr=0.04),
               write_events(tmp_path / "e.jsonl", 1, data="other/set")]
    groups = plot.groups_of([plot.read_run(str(path)) for path in written])
    names = {label: [run.name for run in members] for label, members in groups.items()}
    first = "DATA_PATH=a/set MATRIX_LR=0.02, 3 runs"
    assert names == {first: ["a", "b", "c"], "DATA_PATH=a/set MATRIX_LR=0.04": ["d"], "DATA_PATH=other/set MATRIX_LR=0.02": ["e"]}
    at, values = plot.band(groups[first], "train", "tokens", "loss")
    assert at.tolist() == pytest.approx([0.001, 0.002, 0.003, 0.004]) and values.shape == (3, 4)
    assert values.mean(axis=0).tolist() == [4.5, 3.5, 2.5, 1.5]


def test_a_band_ends_where_the_first_of_its_runs_does(tmp_path):
    long = plot.read_run(str(write_events(tmp_path / "a.jsonl", 1)))
    short = plot.read_run(str(write_events(tmp_path / "b.jsonl", 2, steps=(1, 3))))
    at, values = plot.band([long, short], "train", "step", "loss")
    assert at.tolist() == [1, 2, 3] and values[1].tolist() == [4, 3, 2]  # the middle one is interpolated
    coarse = plot.read_run(str(write_events(tmp_path / "c.jsonl", 3, steps=(1, 4))))
    assert plot.band([coarse, short], "train", "step", "loss")[0].tolist() == [1, 3]  # which the first does not have
    assert plot.band([long, plot.Run("none")], "train", "step", "loss")[0].size == 0


def test_a_resumed_run_begins_with_its_older_log(tmp_path):
    write_events(tmp_path / "run.1767225600000000000.jsonl", steps=(1, 2, 3, 4, 5), final=False, shift=9)
    run = plot.read_run(str(write_events(tmp_path / "run.jsonl", steps=(4, 5, 6), resume=3)))
    assert run.train["step"] == [1, 2, 3, 4, 5, 6] and run.train["loss"] == [13, 12, 11, 1, 0, -1]
    assert run.val["step"] == [2, 4, 6] and len({len(values) for values in run.train.values()}) == 1
    repeated = write_events(tmp_path / "run.jsonl", steps=(3, 4), resume=2).read_text().splitlines()
    validation = {"event": "val", "step": 2, "val_loss": 7, "val_bpb": 7, "train_time_ms": 2000}  # on resuming
    write_events(tmp_path / "run.05.jsonl", steps=(1, 2, 3, 4, 5), final=False)  # of the run "run.05"
    assert older_logs(tmp_path / "run.jsonl") == [tmp_path / "run.1767225600000000000.jsonl"]
    (tmp_path / "run.jsonl").write_text("\n".join([*repeated[:2], json.dumps(validation), *repeated[2:]]))
    run = plot.read_run(str(tmp_path / "run.jsonl"))
    assert run.val["step"] == [2, 4] and run.val["loss"][0] == 7 and run.train["step"] == [1, 2, 3, 4]
    write_events(tmp_path / "run.jsonl", steps=(1, 2))  # without RESUME the older log is another run's
    assert plot.read_run(str(tmp_path / "run.jsonl")).train["step"] == [1, 2]


def test_a_damaged_text_log_is_named(tmp_path):
    (tmp_path / "x.log").write_text("step:1/2 train_loss:one train_time:5ms\n")
    with pytest.raises(ValueError, match="x.log is not a log of train_gpt.py"):
        plot.read_run(str(tmp_path / "x.log"))


def run_plot(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["plot.py", *map(str, arguments)])
    plot.main()


def test_pictures_have_the_names_of_all_runs_and_the_format_of_their_ending(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    first, second = write_events(tmp_path / "first.jsonl"), write_events(tmp_path / "second.jsonl", lr=1)
    run_plot(monkeypatch, first)
    run_plot(monkeypatch, first, second, seed_log(tmp_path / "train_seed1.log", 1))
    assert (tmp_path / "first.png").exists() and (tmp_path / "first+second+train_seed1.png").read_bytes()[1:4] == b"PNG"
    assert str(tmp_path / "first+second+train_seed1.png") in capsys.readouterr().out
    for ending, start in (("pdf", b"%PDF-"), ("svg", b"<?xml")):
        run_plot(monkeypatch, first, second, "--out", tmp_path / f"both.{ending}")
        assert (tmp_path / f"both.{ending}").read_bytes().startswith(start)
    with pytest.raises(SystemExit, match="plot.py: Format 'gpj' is not supported"):
        run_plot(monkeypatch, first, "--out", tmp_path / "both.gpj")
    many = [write_events(tmp_path / f"a_long_name_{number:02d}.jsonl", lr=number) for number in range(12)]
    run_plot(monkeypatch, *many)
    assert (tmp_path / "a_long_name_00+11_more.png").exists()


@pytest.mark.parametrize("changes, panels", [
    ([{}], [("step", "loss")]), ([{}, {"seed": 2}], [("step", "loss")]),
    ([{}, {"lr": 1}], [("step", "loss"), ("seconds", "loss"), ("step", "val_bpb"), ("seconds", "val_bpb")]),
    ([{}, {"data": "other"}], [("step", "val_bpb"), ("seconds", "val_bpb")])])
def test_one_line_has_one_panel_and_losses_of_other_texts_are_not_compared(tmp_path, changes, panels):
    runs = [plot.read_run(str(write_events(tmp_path / f"{i}.jsonl", **more))) for i, more in enumerate(changes)]
    assert plot.panels_of(plot.groups_of(runs)) == panels


def test_the_moving_mean_is_over_a_twentieth_of_the_values():
    values = plot.np.arange(100.0)
    assert plot.smooth(values)[[0, 4, 99]].tolist() == [0.0, 2.0, 97.0] and plot.smooth(values[:3]).tolist() == [0, 1, 2]


@pytest.mark.parametrize("content, wanted", [
    (None, "neither a file nor a RUN_ID"), ("{}\n", "is not a log of train_gpt.py"), ("", "has no step:... line"),
    ("[1\n{}\n", "is not a log of train_gpt.py"), ("[1\n", "has no step:... line"), ('{"event": "train", "step": 1}\n', "is not a log of train_gpt.py")])
def test_other_files_are_named(tmp_path, monkeypatch, content, wanted):
    if content is not None:
        (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(SystemExit, match=f"plot.py: .*x.jsonl.*{wanted}"):
        run_plot(monkeypatch, tmp_path / "x.jsonl", "--table")
