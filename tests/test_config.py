"""Variables: types, arguments, misspelt names, and what launchers leave in the environment."""

import types

import pytest
import train_gpt
from conftest import run_trainer, split_batch

LAUNCHERS = {
    "torchrun": "LOCAL_RANK RANK GROUP_RANK ROLE_RANK ROLE_NAME LOCAL_WORLD_SIZE WORLD_SIZE GROUP_WORLD_SIZE "
    "ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS "
    "TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_ERROR_FILE TORCH_NCCL_ASYNC_ERROR_HANDLING "
    "OMP_NUM_THREADS PYTORCH_ALLOC_CONF TORCHINDUCTOR_CACHE_DIR TORCH_LOGS NCCL_DEBUG NCCL_SOCKET_IFNAME "
    "CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_HOME",
    "slurm": "SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_NTASKS SLURM_NNODES SLURM_JOB_ID SLURM_JOBID "
    "SLURM_JOB_NUM_NODES SLURM_NPROCS SLURM_TASKS_PER_NODE SLURM_NTASKS_PER_NODE SLURM_GPUS_ON_NODE "
    "SLURM_CPUS_PER_TASK SLURM_STEP_ID SLURM_STEP_TASKS_PER_NODE SLURM_LAUNCH_NODE_IPADDR SLURM_NODELIST "
    "SLURM_JOB_PARTITION SLURM_SUBMIT_DIR SLURM_MEM_PER_NODE SLURMD_NODENAME SRUN_DEBUG SBATCH_EXPORT",
    "pbs": "PBS_NODEFILE PBS_JOBID PBS_JOBNAME PBS_O_WORKDIR PBS_O_HOME PBS_O_PATH PBS_NODENUM PBS_TASKNUM "
    "PBS_MOMPORT PBS_QUEUE PBS_ENVIRONMENT PBS_JOBDIR NCPUS TMPDIR",
    "mpi": "PMI_RANK PMI_SIZE PMI_LOCAL_RANK PMI_LOCAL_SIZE PMIX_RANK PMIX_NAMESPACE PALS_RANKID PALS_LOCAL_RANKID "
    "PALS_APID OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_NODE_RANK "
    "OMPI_MCA_pml MPI_LOCALRANKID MPI_LOCALNRANKS MPICH_LOCALRANKID MPICH_GPU_SUPPORT_ENABLED MV2_COMM_WORLD_RANK "
    "HYDI_CONTROL_FD HYDRA_BOOTSTRAP",
    "others": "HOME PATH USER LOGNAME SHELL TERM LANG PWD OLDPWD HOSTNAME EDITOR PAGER DISPLAY VIRTUAL_ENV PS1 "
    "HF_HOME HF_HUB_OFFLINE TIKTOKEN_CACHE_DIR WANDB_MODE WANDB_PROJECT WANDB_RUN_ID GITHUB_RUN_ID CI COMPILER "
    "MODEL_DIR DATASET_PATH CC CXX CFLAGS LD_LIBRARY_PATH MODULEPATH LOADEDMODULES PYTHONPATH XDG_DATA_DIRS XDG_RUNTIME_DIR DEVICE_TYPE",
}


def test_defaults_are_the_published_ones():
    config, overrides = train_gpt.load_config([], {})
    assert overrides == {}
    assert (config.vocab_size, config.num_layers, config.model_dim, config.num_heads, config.num_kv_heads,
            config.mlp_mult) == (1024, 9, 512, 8, 4, 2)
    assert (config.iterations, config.warmdown_iters, config.warmup_steps, config.train_batch_tokens,
            config.train_seq_len, config.max_wallclock_seconds) == (20000, 3000, 20, 393216, 4096, 600.0)
    assert (config.tied_embed_lr, config.matrix_lr, config.scalar_lr, config.head_lr, config.embed_lr) == (
        0.03, 0.02, 0.02, 0.008, 0.6)
    assert (config.muon_momentum, config.beta1, config.beta2, config.adam_eps, config.seed) == (
        0.99, 0.9, 0.95, 1e-8, 1337)
    assert (config.val_batch_size, config.val_loss_every, config.train_log_every) == (524288, 1000, 200)


def test_arguments_win_over_the_environment():
    config, overrides = train_gpt.load_config(["NUM_LAYERS=3"], {"NUM_LAYERS": "5", "MATRIX_LR": "1e-3"})
    assert config.num_layers == 3 and config.matrix_lr == 1e-3
    assert overrides == {"NUM_LAYERS": ("3", "argument"), "MATRIX_LR": ("1e-3", "environment")}


def test_a_file_of_settings_gives_way_to_the_environment_and_to_arguments(tmp_path):
    first, second = tmp_path / "a.env", tmp_path / "b.env"
    first.write_text("# a preset\n\nNUM_LAYERS=3\nMODEL_DIM=64\nSEED=1\n")
    second.write_text("MODEL_DIM=128")
    config, given = train_gpt.load_config(["SEED=3", f"@{first}", f"@{second}"], {"NUM_LAYERS": "5", "SEED": "2"})
    assert (config.num_layers, config.model_dim, config.seed) == (5, 128, 3)
    assert given["MODEL_DIM"] == ("128", f"@{second}") and given["NUM_LAYERS"] == ("5", "environment")
    second.write_text("MODEL_DIMS=128")
    with pytest.raises(ValueError, match=r"MODEL_DIMS='128' \(@.*b.env\) is not a variable of this script; did you mean MODEL_DIM"):
        train_gpt.load_config([f"@{second}"], {})
    with pytest.raises(OSError, match="No such file"):
        train_gpt.load_config(["@none.env"], {})


def test_a_home_folder_is_found_by_its_sign_in_an_argument(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    assert train_gpt.load_config(["DATA_PATH=~/shards"], {})[0].data_path == "/home/ada/shards"


def test_choices_may_be_written_in_capitals():
    assert train_gpt.load_config(["DTYPE=BFLOAT16", "ATTN=Math"], {})[0].dtype == "bfloat16"


@pytest.mark.parametrize("text, value", [("1", True), ("true", True), ("0", False), ("False", False)])
def test_booleans(text, value):
    assert train_gpt.load_config([f"TIE_EMBEDDINGS={text}"], {})[0].tie_embeddings is value


@pytest.mark.parametrize("argument, wanted", [
    ("NUM_LAYERS=four", ["NUM_LAYERS", "'four'", "not a whole number", "NUM_LAYERS=9"]),
    ("NUM_LAYERS=4.5", ["NUM_LAYERS", "'4.5'", "not a whole number"]),
    ("MATRIX_LR=", ["MATRIX_LR", "not a number", "MATRIX_LR=0.02"]),
    ("MATRIX_LR=nan", ["MATRIX_LR=nan", "0 or larger"]),
    ("MATRIX_LR=inf", ["MATRIX_LR=inf", "less than 2**63"]),
    ("SEED=9223372036854775808", ["SEED=9223372036854775808", "less than 2**63"]),
    ("ITERATIONS=-1", ["ITERATIONS=-1", "0 or larger"]),
    ("VOCAB_SIZE=0", ["VOCAB_SIZE=0", "1 or larger"]),
    ("TIE_EMBEDDINGS=yes", ["TIE_EMBEDDINGS", "'yes'", "must be one of 0|1"]),
    ("DTYPE=fp16", ["DTYPE", "'fp16'", "float16"]),
    ("NUM_HEADS=7", ["MODEL_DIM=512", "14"]),
    ("NUM_KV_HEADS=3", ["NUM_KV_HEADS=3", "NUM_HEADS=8"]),
    ("RUN_ID=a/b", ["RUN_ID", "'a/b'"]),
    ("RUN_ID=../../etc/x", ["RUN_ID", "'../../etc/x'"]),
    ("RUN_ID=..", ["RUN_ID='..' must be no path and not begin with . or -"]),
    ("RUN_ID=-x", ["RUN_ID='-x' must be no path"]),
    ("CHECKPOINT_EVERY=300s", ["CHECKPOINT_EVERY", "'300s'"]),
    ("CHECKPOINT_EVERY=-3", ["CHECKPOINT_EVERY=-3", "0 or larger"]),
    ("OPTIMIZER=lion", ["OPTIMIZER", "'lion'", "adamw"]),
    ("LOADER=random", ["LOADER", "'random'", "shuffled"]),
    ("NUM_LAYER=4", ["NUM_LAYER='4'", "did you mean NUM_LAYERS"]),
    ("num_layers=4", ["did you mean NUM_LAYERS"]),
    ("--num-layers=4", ["--num-layers", "did you mean NUM_LAYERS"]),
    ("NUM_LAYERS", ["'NUM_LAYERS' is not NAME=value", "NUM_LAYERS=9"]),
    ("frobnicate", ["frobnicate", "--help"]),
    ("BATCH_SIZE=32", ["BATCH_SIZE='32'", "did you mean TRAIN_BATCH_TOKENS"]),
    ("--learning-rate=1", ["did you mean MATRIX_LR"]), ("lr=1", ["did you mean MATRIX_LR"]),
    ("EPOCH=1", ["did you mean ITERATIONS"]), ("n_layer=2", ["did you mean NUM_LAYERS"]),
])
def test_bad_arguments_name_what_would_work(argument, wanted):
    with pytest.raises(ValueError) as error:
        train_gpt.load_config([argument], {})
    assert all(text in str(error.value) for text in wanted), str(error.value)


@pytest.mark.parametrize("name, meant", [
    ("MATRX_LR", "MATRIX_LR"), ("NUM_LAYER", "NUM_LAYERS"), ("TRAIN_SEQLEN", "TRAIN_SEQ_LEN"), ("SEED_", "SEED"),
    ("WARMUP_STEP", "WARMUP_STEPS"), ("ITERATION", "ITERATIONS"), ("MAX_WALL_CLOCK_SECONDS", "MAX_WALLCLOCK_SECONDS"),
    ("BATCH_SIZE", "TRAIN_BATCH_TOKENS"), ("OUTDIR", "OUT_DIR"), ("DATAPATH", "DATA_PATH"), ("RUNID", "RUN_ID"),
])
def test_a_misspelt_name_in_the_environment_stops_the_run(name, meant):
    with pytest.raises(ValueError, match=f"{name}='1'.*did you mean {meant}"):
        train_gpt.load_config([], {name: "1"})


@pytest.mark.parametrize("name, meant", [
    ("MODEL_DIR", "MODEL_DIM"), ("COMPILER", "COMPILE"), ("DATASET_PATH", "DATA_PATH"), ("DEVICES", "DEVICE"), ("SEEDS", "SEED")])
def test_names_that_clusters_export_are_errors_as_arguments(name, meant):
    assert train_gpt.load_config([], {name: "1"})[1] == {}
    with pytest.raises(ValueError, match=f"{name}='1' .argument. is not a variable of this script; did you mean {meant}"):
        train_gpt.load_config([f"{name}=1"], {})


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_variables_are_no_misspelt_names(launcher):
    train_gpt.load_config([], dict.fromkeys(LAUNCHERS[launcher].split(), "1"))


def test_every_other_set_of_patterns_follows_the_control_tensors():
    config, _ = train_gpt.load_config([], {"CONTROL_TENSOR_NAME_PATTERNS": "q_gain"})
    assert config.int8_keep_float_fp32_name_patterns == "q_gain"
    config, _ = train_gpt.load_config(["INT8_KEEP_FLOAT_FP32_NAME_PATTERNS="], {})
    assert config.int8_keep_float_fp32_name_patterns == ""


@pytest.mark.parametrize("world, wanted", [
    (1, (8, 393216)), (2, (4, 393216)), (4, (2, 393216)), (8, (1, 393216)),
    (3, (3, 405504)), (6, (2, 393216)), (5, (2, 409600)), (7, (2, 401408)), (12, (1, 393216)), (16, (1, 393216)),
])
def test_accumulation_and_tokens_per_step_for_every_world_size(world, wanted):
    assert split_batch(train_gpt.Config(), world) == wanted
    accum, tokens = wanted
    assert tokens % (4096 * world * accum) == 0


@pytest.mark.parametrize("rows, wanted", [(1, 1), (2, 2), (3, 4), (5, 4), (6, 8), (8, 8), (12, 16), (96, 96)])
def test_small_batches_are_the_same_on_every_number_of_ranks_that_divides_their_spans(rows, wanted):
    config = train_gpt.Config(train_batch_tokens=rows * 4096)
    for world in (1, 2, 4, 8):
        if world <= rows:
            accum, tokens = split_batch(config, world)
            assert tokens == wanted * 4096 and accum * world == min(8, 2 ** (rows.bit_length() - 1))


def test_devices_without_bfloat16_or_with_little_memory_get_what_suits_them(monkeypatch):
    monkeypatch.setattr(train_gpt, "choose_attention", lambda config, device: "math")
    monkeypatch.setattr(train_gpt, "bfloat16_is_native", lambda device: False)
    monkeypatch.setattr(train_gpt.torch.cuda, "get_device_properties",
                        lambda device: types.SimpleNamespace(total_memory=16 << 30))
    for kind, dtype in (("cuda", "float16"), ("mps", "float32"), ("cpu", "float32")):
        ranks = train_gpt.Ranks(0, 1, train_gpt.torch.device(kind))
        assert train_gpt.resolve(train_gpt.Config(), ranks).dtype == dtype
    mps = train_gpt.Ranks(0, 1, train_gpt.torch.device("mps"))
    assert train_gpt.resolve(train_gpt.Config(), mps).micro_batch_tokens == 4096  # a row
    assert train_gpt.resolve(train_gpt.Config(micro_batch_tokens=8192), mps).micro_batch_tokens == 8192


@pytest.mark.parametrize("gib, ranks, changes, tokens", [
    (79.2, 1, {}, 196608), (23.6, 1, {}, 49152), (79.2, 8, {}, 49152), (79.2, 1, {"dtype": "float32"}, 98304),
    (79.2, 1, {"compile": "0"}, 65536), (79.2, 1, {"micro_batch_tokens": 32768}, 32768), (79.2, 2, {}, 49152)])
def test_micro_batches_take_a_third_of_the_smallest_gpu(monkeypatch, gib, ranks, changes, tokens):
    """By the peaks measured on an H100: 12.5 GiB for 98,304 tokens, 24.7 GiB for 196,608. The second of two ranks has a
    card of 23.6 GiB."""
    other = 23.6 / 79.2 if ranks == 2 else 1.0
    monkeypatch.setattr(train_gpt.Ranks, "max", lambda self, value: [max(value, value * other)])
    monkeypatch.setattr(train_gpt, "choose_attention", lambda config, device: "math")
    monkeypatch.setattr(train_gpt.torch.cuda, "get_device_properties",
                        lambda device: types.SimpleNamespace(total_memory=int(gib * 2**30)))
    config = train_gpt.Config(**{"dtype": "bfloat16", "compile": "1", **changes})
    group = train_gpt.Ranks(0, ranks, train_gpt.torch.device("cuda"))
    assert train_gpt.resolve(config, group).micro_batch_tokens == tokens


def test_accumulation_by_hand_and_batches_that_are_too_small():
    assert split_batch(train_gpt.Config(grad_accum_steps=3), 1) == (3, 393216)
    rounded = train_gpt.Config(train_seq_len=32, train_batch_tokens=1024)
    assert split_batch(rounded, 3) == (3, 1152)  # and one rank can continue such a run
    assert split_batch(train_gpt.replace(rounded, train_batch_tokens=1152, grad_accum_steps=9), 1) == (9, 1152)
    with pytest.raises(ValueError, match="MICRO_BATCH_TOKENS=5 is less than a row of TRAIN_SEQ_LEN"):
        train_gpt.Config(micro_batch_tokens=5)
    assert split_batch(train_gpt.Config(train_batch_tokens=4000), 1) == (1, 4096)
    assert split_batch(train_gpt.Config(train_batch_tokens=4096), 8) == (1, 8 * 4096)


def test_help_names_every_variable(tmp_path):
    result = run_trainer(tmp_path, "--help")
    assert result.returncode == 0
    for f in train_gpt.fields(train_gpt.Config):
        default = int(f.default) if f.type is bool else f.default
        assert f"\n  {f.name.upper()}={default} " in result.stdout and f.metadata["help"] in result.stdout


def test_a_typo_ends_the_script_with_one_line(tmp_path):
    result = run_trainer(tmp_path, environment={"MATRX_LR": "0.1"})
    assert result.returncode == 1 and result.stdout == ""
    assert "MATRX_LR='0.1'" in result.stderr and "MATRIX_LR" in result.stderr
    assert "Traceback" not in result.stderr and not list(tmp_path.iterdir())
