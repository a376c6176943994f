"""Variables: types, arguments, misspelt names, what launchers leave in the environment, and what is chosen by the device."""

import os
import re
import sys
import types

import pytest
import shards
import train_gpt
from conftest import one_process, run_here, tiny_config

PUBLISHED = dict(
    vocab_size=1024, num_layers=9, model_dim=512, num_heads=8, num_kv_heads=4, mlp_mult=2, tie_embeddings=True,
    rope_base=10000.0, logit_softcap=30.0, qk_gain_init=1.5, tied_embed_init_std=0.005, seed=1337, iterations=20000,
    warmdown_iters=3000, warmup_steps=20, train_batch_tokens=393216, train_seq_len=4096, max_wallclock_seconds=600.0,
    val_batch_size=524288, val_loss_every=1000, train_log_every=200, tied_embed_lr=0.03, matrix_lr=0.02, scalar_lr=0.02,
    head_lr=0.008, embed_lr=0.6, muon_momentum=0.99, muon_backend_steps=5, muon_momentum_warmup_start=0.92,
    muon_momentum_warmup_steps=1500, beta1=0.9, beta2=0.95, adam_eps=1e-8, grad_clip_norm=0.0, int8_keep_float_max_numel=65536,
    control_tensor_name_patterns="attn_scale,attn_scales,mlp_scale,mlp_scales,resid_mix,resid_mixes,q_gain,skip_weight,skip_weights")

OF_OTHERS = """LOCAL_RANK GROUP_RANK WORLD_SIZE MASTER_ADDR TORCHELASTIC_RUN_ID OMP_NUM_THREADS PYTORCH_ALLOC_CONF CUDA_HOME
CUDA_VISIBLE_DEVICES SLURM_NTASKS SLURM_TASKS_PER_NODE SBATCH_EXPORT PBS_O_PATH PMI_SIZE OMPI_MCA_pml HYDI_CONTROL_FD PATH HOME
DISPLAY TMPDIR HF_HOME WANDB_MODE WANDB_RUN_ID GITHUB_RUN_ID CXX MODULEPATH XDG_DATA_DIRS DEVICE_TYPE
MAX_WALLCLOCK ITERS LAYERS HEADS DEVICE_ID BATCH_TOKENS
MODEL_DIR COMPILER DATASET_PATH DEVICES SEEDS"""  # the last are near to ours, and clusters set them


def test_defaults_are_the_published_ones():
    config, overrides = train_gpt.load_config([], {})
    assert overrides == {} and {name: getattr(config, name) for name in PUBLISHED} == PUBLISHED
    assert sum(p.numel() for p in train_gpt.GPT(config).parameters()) == 17_059_912


def test_arguments_win_over_the_environment_and_both_over_files(tmp_path, monkeypatch):
    first, second = tmp_path / "a.env", tmp_path / "b.env"
    first.write_text("# a preset\n\nNUM_LAYERS=3\nMODEL_DIM=64\nSEED=1\n")
    second.write_text("MODEL_DIM=128")
    config, given = train_gpt.load_config(["SEED=3", f"@{first}", f"@{second}"], {"NUM_LAYERS": "5", "SEED": "2"})
    assert (config.num_layers, config.model_dim, config.seed) == (5, 128, 3)
    assert given == {"NUM_LAYERS": ("5", "environment"), "MODEL_DIM": ("128", f"@{second}"), "SEED": ("3", "argument")}
    second.write_text("MODEL_DIMS=128")
    with pytest.raises(ValueError, match=r"MODEL_DIMS='128' \(@.*b.env\) is not a variable .* did you mean MODEL_DIM"):
        train_gpt.load_config([f"@{second}"], {})
    monkeypatch.setenv("HOME", str(tmp_path))
    assert train_gpt.load_config(["@~/a.env"], {})[0].seed == 1
    with pytest.raises(OSError, match="No such file"):
        train_gpt.load_config(["@none.env"], {})
    second.write_text("NUM_LAYERS=2", encoding="utf-16")
    with pytest.raises(ValueError, match=r"\(@.*b.env\) is not NAME=value|.*N.* \(@.*b.env\)"):
        train_gpt.load_config([f"@{second}"], {})
    assert train_gpt.load_config([], {"MATRIX_LR": "", "DATA_PATH": ""}) == (train_gpt.Config(), {})


@pytest.mark.parametrize("argument, value", [
    ("TIE_EMBEDDINGS=1", True), ("TIE_EMBEDDINGS=False", False), ("DTYPE=BFLOAT16", "bfloat16"), ("EXPORT_BITS=6", 6),
    ("MATRIX_LR=1e-3", 0.001), ("DATA_PATH=~/shards", "/home/ada/shards")])
def test_values(monkeypatch, argument, value):
    monkeypatch.setenv("HOME", "/home/ada")
    config, _ = train_gpt.load_config([argument], {})
    assert getattr(config, argument.split("=")[0].lower()) == value


@pytest.mark.parametrize("argument, wanted", [
    ("NUM_LAYERS=four", "NUM_LAYERS='four' must be a whole number, like 9"),
    ("MATRIX_LR=", "MATRIX_LR='' must be a number, like 0.02"),
    ("MATRIX_LR=nan", "MATRIX_LR=nan must be from 0 to"), ("ITERATIONS=-1", "ITERATIONS=-1 must be from 0 to"),
    ("SEED=9223372036854775808", r"SEED=9223372036854775808 must be from 0 to 1e\+18"),
    ("LOGIT_SOFTCAP=1e6", "LOGIT_SOFTCAP=1000000.0 must be from 1 to 1000"),  # 2 * sigmoid - 1 would round logits
    ("TIE_EMBEDDINGS=yes", "TIE_EMBEDDINGS='yes' must be one of .'0', '1'"), ("DTYPE=fp16", "DTYPE='fp16' must be one of .*float16"),
    ("NUM_HEADS=7", "MODEL_DIM=512 is no multiple of 2 \\* 7 heads"),
    ("NUM_KV_HEADS=3", "NUM_KV_HEADS=3 must divide NUM_HEADS=8"),
    ("RUN_ID=a/b", "RUN_ID='a/b' must not be a path, contain spaces or begin with . or -"), ("RUN_ID=my run", "contain spaces"), ("RUN_ID=..", "RUN_ID='..' must not be a path"),
    ("--num-layers=4", "did you mean NUM_LAYERS"), ("NUM_LAYERS", "'NUM_LAYERS' .argument. is not NAME=value"),
    ("MAX_WALLCLOCK=40", "did you mean MAX_WALLCLOCK_SECONDS"), ("ITERS=9", "did you mean ITERATIONS"), ("MAX_WALL=9", "did you mean .*MAX_WALLCLOCK_SECONDS"),
    ("LAYERS=2", "did you mean NUM_LAYERS"), ("HEADS=2", "did you mean NUM_HEADS or "), ("MATRX_LR=1", r"did you mean MATRIX_LR\?"),
    ("BATCH_TOKENS=9", "did you mean TRAIN_BATCH_TOKENS or MICRO_BATCH_TOKENS"), ("BETA=1", "did you mean BETA. or BETA"), ("SEQ_LEN=9", "mean TRAIN_SEQ_LEN"),
    ("frobnicate=1", "frobnicate='1' .* is not a variable of this script; --help"),
    ("LANES=10", "LANES=10 must be at most NUM_LAYERS"),
    ("MODEL_DIR=1", "did you mean MODEL_DIM"), ("", "'' .argument. is not NAME=value"), ("#SEED=1", "#SEED='1' .* is not a variable"),
    *((f"{name}=1.5", f"{name}=1.5 must be from 0 to 1") for name in (
        "WARMDOWN_FRACTION", "MIN_LR", "MLP_SLOPE", "DROPOUT", "MUON_MOMENTUM", "MUON_MOMENTUM_WARMUP_START", "BETA1", "BETA2"))])
def test_bad_arguments_name_what_would_work(argument, wanted):
    with pytest.raises(ValueError, match=wanted):
        train_gpt.load_config([argument], {})


@pytest.mark.parametrize("name, meant", [
    ("MATRX_LR", "MATRIX_LR"), ("SEED_", "SEED"), ("MAX_WALL_CLOCK_SECONDS", "MAX_WALLCLOCK_SECONDS"),
    ("OUTDIR", "OUT_DIR")])
def test_a_misspelt_name_in_the_environment_ends_the_script_with_one_line(tmp_path, monkeypatch, name, meant):
    monkeypatch.setenv(name, "0.1")
    with pytest.raises(SystemExit, match=f"^train_gpt.py: {name}='0.1' .environment. .*did you mean {meant}.$"):
        run_here(monkeypatch, tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_other_programs_set_is_no_misspelt_name():
    train_gpt.load_config([], dict.fromkeys(OF_OTHERS.split(), "1"))


def test_help_names_every_variable_with_its_default(tmp_path, monkeypatch, capsys):
    run_here(monkeypatch, tmp_path, "--help")
    text = capsys.readouterr().out
    for name, field in train_gpt.FIELDS.items():
        line = re.search(rf"^    {name}: .+ = (.+)  # .+", text, re.MULTILINE)
        assert line and eval(line[1], vars(train_gpt)) == field.default, name


# ---- What is chosen by the device --------------------------------------------------------------------------


@pytest.mark.parametrize("changes, world_size, wanted", [
    ({}, 1, (8, 393216)), ({}, 2, (4, 393216)), ({}, 8, (1, 393216)),
    ({}, 16, (1, 393216)), (dict(grad_accum_steps=3), 1, (3, 393216)), (dict(train_batch_tokens=5 * 4096, grad_accum_steps=5), 1, (5, 20480)),
    (dict(train_seq_len=32, train_batch_tokens=1152), 3, (3, 1152)),  # one rank can go on with it:
    (dict(train_seq_len=32, train_batch_tokens=1152, grad_accum_steps=9), 1, (9, 1152))])
def test_spans_of_a_rank_and_tokens_of_a_step_for_any_number_of_ranks(changes, world_size, wanted):
    ranks = train_gpt.Ranks(0, world_size, train_gpt.torch.device("cpu"))
    config = train_gpt.resolve(train_gpt.Config(dtype="float32", compile="0", **changes), ranks)
    assert (config.grad_accum_steps, config.train_batch_tokens) == wanted


@pytest.mark.parametrize("changes, world_size, unit, nearest", [
    ({}, 3, 36864, 405504), ({}, 7, 57344, 401408), (dict(train_batch_tokens=4000), 1, 4096, 4096),
    (dict(train_batch_tokens=100), 1, 4096, 4096), (dict(train_batch_tokens=20480), 8, 32768, 32768),
    (dict(train_batch_tokens=5 * 4096), 1, 16384, 16384), (dict(train_batch_tokens=5 * 4096), 2, 16384, 16384)])
def test_a_batch_that_cannot_be_divided_is_refused_with_the_nearest(changes, world_size, unit, nearest):
    ranks = train_gpt.Ranks(0, world_size, train_gpt.torch.device("cpu"))
    with pytest.raises(ValueError, match=rf"TRAIN_BATCH_TOKENS=\d+ is not a multiple of {unit} .* the nearest is {nearest}$"):
        train_gpt.resolve(train_gpt.Config(dtype="float32", compile="0", **changes), ranks)


def resolve_on(monkeypatch, kind, gib, world_size=1, **changes):
    """The settings that are resolved for a device, of which there is none here, with so much memory."""
    monkeypatch.setattr(train_gpt, "choose_attention", lambda config, device: "math")
    monkeypatch.setattr(train_gpt.torch.cuda, "get_device_properties",
                        lambda device: types.SimpleNamespace(total_memory=int(gib * 2**30)))
    return train_gpt.resolve(train_gpt.Config(**changes), train_gpt.Ranks(0, world_size, train_gpt.torch.device(kind)))


@pytest.mark.parametrize("kind, dtype, compiled", [
    ("cuda", "float16", "1"), ("mps", "float32", "0"),
    ("cpu", "float32", "blocks" if sys.platform == "linux" else "0")])
def test_what_each_device_without_bfloat16_gets(monkeypatch, kind, dtype, compiled):
    """Another type, and graphs if there are steps to train; MPS a row at a time."""
    monkeypatch.setattr(train_gpt, "bfloat16_is_native", lambda device: False)
    config = resolve_on(monkeypatch, kind, 16)
    assert (config.dtype, config.compile, config.fused) == (dtype, compiled, True)  # RESUME compares FUSED
    assert config.micro_batch_tokens == 4096 or kind != "mps"
    assert all(resolve_on(monkeypatch, kind, 16, iterations=0, compile=asked).compile == "0" for asked in ("auto", "1", "blocks"))


@pytest.mark.parametrize("gib, ranks, changes, tokens", [
    (79.2, 1, {}, 196608), (23.6, 1, {}, 49152), (79.2, 8, {}, 49152), (79.2, 1, {"compile": "0"}, 65536),
    (79.2, 1, {"micro_batch_tokens": 32768}, 32768), (79.2, 2, {}, 49152)])
def test_micro_batches_take_a_third_of_the_smallest_gpu(monkeypatch, gib, ranks, changes, tokens):
    """By the peaks measured on an H100: 12.5 GiB for 98,304 tokens, 24.7 GiB for 196,608. The second of two ranks has a
    card of 23.6 GiB."""
    other = 23.6 / 79.2 if ranks == 2 else 1.0
    monkeypatch.setattr(train_gpt.Ranks, "max", lambda self, value: [max(value, value * other)])
    config = resolve_on(monkeypatch, "cuda", gib, ranks, **{"dtype": "bfloat16", "compile": "1", **changes})
    assert config.micro_batch_tokens == tokens


def test_micro_batches_divide_a_batch():
    config = tiny_config(train_batch_tokens=32 * 31, grad_accum_steps=1, micro_batch_tokens=32 * 30)
    assert train_gpt.resolve(config, one_process()).micro_batch_tokens == 32
    assert train_gpt.resolve(tiny_config(train_batch_tokens=1024), one_process()).micro_batch_tokens == 512


@pytest.mark.parametrize("quota, ranks, threads", [
    (None, 1, 8), (None, 2, 4), ("max 100000\n", 1, 8), ("150000 100000\n", 1, 1), ("600000 100000\n", 2, 3)])
def test_ranks_share_the_cpus_of_a_container(tmp_path, monkeypatch, quota, ranks, threads):
    """Launchers other than torchrun do not set OMP_NUM_THREADS."""
    chosen, file = [], tmp_path / "cpu.max"
    if quota:
        file.write_text(quota)
    monkeypatch.setattr(train_gpt.count_cores, "__defaults__", (file,))
    monkeypatch.setattr(train_gpt.torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(train_gpt.torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "environ", {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks)})
    train_gpt.start_ranks(tiny_config())
    assert chosen == [threads]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    assert shards.count_cores(file) == int(train_gpt.count_cores(8))  # prepare.py's processes
