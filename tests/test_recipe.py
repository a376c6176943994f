"""The recipe's switches: what they compute, against definitions written out here, and what they must never change."""

import math
import zlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import train_gpt
from conftest import REPOSITORY, events, make_shards, one_process, run_here, tiny_arguments, tiny_config, write_shard
from test_model import SWITCHES, trained_like

PRESETS = (REPOSITORY / "records" / "presets").glob("*.env")
ALL = [*({name: value} for name, value in SWITCHES.items()), SWITCHES]
RECIPE = {**{name.upper(): int(value) if isinstance(value, bool) else value for name, value in SWITCHES.items()},
          "MUON_ROW_NORM": 1, "WARMDOWN_FRACTION": 0.5, "EMBED_FLOAT32": 1,
          "GPTQ_BATCHES": 1, "EXPORT_BITS": 5, "EMBED_BITS": 6, "EXPORT_CODER": "huffman", "EVAL_STRIDE": 8,
          "INT8_KEEP_FLOAT_MAX_NUMEL": 100, "SIZE_CAP": 50_000}


@pytest.mark.parametrize("changes", ALL, ids=lambda changes: "-".join(changes))
def test_a_row_does_not_depend_on_its_batch_and_probabilities_sum_to_one(changes):
    model = trained_like(tiny_config(num_layers=3, num_heads=4, num_kv_heads=2, **changes))
    tokens = torch.randint(0, 260, (6, 33), generator=torch.Generator().manual_seed(1))
    logits = model.logits(model.hidden(tokens[:, :-1]))
    for rows in ([2], [5, 2, 0]):
        torch.testing.assert_close(model.logits(model.hidden(tokens[rows, :-1])), logits[rows], rtol=1e-5, atol=1e-5)
    shares = logits.double().softmax(-1)
    torch.testing.assert_close(shares.sum(-1), torch.ones(6, 32, dtype=torch.float64))
    nats = -shares.gather(-1, tokens[:, 1:, None]).log().mean()
    assert model(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(nats.item(), rel=1e-5)


@pytest.mark.parametrize("length, stride", [(32, 32), (32, 8), (64, 24), (48, 1), (5000, 7), (32, 50)])
def test_windows_score_every_token_once_with_the_longest_context(tmp_path, length, stride):
    config = tiny_config(grad_accum_steps=1, micro_batch_tokens=160, val_batch_size=8192, eval_seq_len=length,
                         data_path=str(tmp_path))
    model = train_gpt.GPT(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(1))
    tokens = torch.randint(0, 260, (7 * 32 + 1,), generator=torch.Generator().manual_seed(2))
    write_shard(tmp_path / "tiny_val_000000.bin", tokens)
    length_used, total, scored, stop = min(length, 224), 0.0, 0, 0
    while scored < 224:  # one window after another
        stop = min(stop + min(stride, length_used), 224) if stop else length_used
        window = tokens[stop - length_used:stop + 1]
        logits = model.logits(model.hidden(window[None, :-1]))[0]
        new = stop - scored
        total += F.cross_entropy(logits[-new:], window[-new:], reduction="sum").item()
        scored += new
    score = train_gpt.Validation(config, one_process()).score(model, length, stride)
    assert score["val_loss"] == pytest.approx(total / 224, rel=1e-5)
    text_bytes = int((tokens[1:] >= 4).sum())  # special tokens have none
    assert score["val_bpb"] == pytest.approx(total / math.log(2) / text_bytes, rel=1e-5)


def test_warmdown_as_a_fraction_of_the_time_or_of_the_steps():
    config = tiny_config(iterations=100, warmdown_fraction=0.4, warmdown_iters=0, min_lr=0.1)
    for step, wanted in ((0, 1.0), (60, 1.0), (80, 0.55), (100, 0.1)):
        assert train_gpt.rate_factor(config, step, 1e6) == pytest.approx(wanted)
    config = tiny_config(iterations=10_000, warmdown_fraction=0.4, max_wallclock_seconds=10.0)
    for elapsed_ms, wanted in ((0, 1.0), (6000, 1.0), (8000, 0.5), (10_500, 0.0)):
        assert train_gpt.rate_factor(config, 10, elapsed_ms) == pytest.approx(wanted)


def test_updates_begin_with_rows_of_one_norm():
    torch.manual_seed(0)
    p, grad = torch.nn.Parameter(torch.zeros(16, 48)), torch.randn(16, 48) * torch.logspace(-2, 2, 16)[:, None]
    muon = train_gpt.Muon([{"params": [p], "lr": 0.02, "weight_decay": 0.0}], tiny_config(muon_row_norm=True), one_process())
    p.grad = grad.clone()
    muon.step()
    rows = grad / grad.norm(dim=1, keepdim=True)
    update = train_gpt.orthogonalize(rows[None], 5)[0]
    torch.testing.assert_close(p.data, -0.02 * update.float(), rtol=0, atol=5e-4)


def test_the_table_in_float32():
    assert train_gpt.GPT(tiny_config(dtype="bfloat16")).tok_emb.weight.dtype == torch.bfloat16
    assert train_gpt.GPT(tiny_config(dtype="bfloat16", embed_float32=True)).tok_emb.weight.dtype == torch.float32


@pytest.mark.parametrize("bits", [4, 5, 6, 7, 8])
@pytest.mark.parametrize("deviations", [0.0, 2.0])
def test_rounding_to_few_bits(bits, deviations):
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    values, scales = train_gpt.round_rows(weight, bits, deviations, None)
    levels = 2 ** (bits - 1) - 1
    limit = deviations * weight.std(1) if deviations else weight.abs().amax(1)
    assert values.dtype == torch.int8 and scales.dtype == torch.float16 and values.abs().max() == levels
    torch.testing.assert_close(scales.float(), limit / levels, rtol=1e-3, atol=2e-7)
    wanted = torch.minimum(weight.abs(), limit[:, None]) * weight.sign()
    difference = (values.float() * scales.float()[:, None] - wanted).abs()
    assert (difference <= 0.51 * limit[:, None] / levels + 1e-3 * limit[:, None]).all()
    same, _ = train_gpt.round_rows(weight, bits, deviations, torch.eye(64))  # nothing to make good
    assert torch.equal(same, values)


def test_gptq_halves_the_error_of_the_outputs():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(500, 16, generator=generator) @ torch.randn(16, 64, generator=generator)  # correlated
    inputs += 0.1 * torch.randn(500, 64, generator=generator)
    inputs[:, 5] = 0  # a column that is never used
    weight = torch.randn(32, 64, generator=generator)
    errors = []
    for gram in (None, inputs.T @ inputs):
        values, scales = train_gpt.round_rows(weight, 4, 0.0, gram)
        errors.append(((values * scales[:, None].float() - weight) @ inputs.T).norm().item())
    assert errors[1] < 0.5 * errors[0]


def test_gptq_of_a_dead_layer_is_plain_rounding():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    values, _ = train_gpt.round_rows(weight, 5, 0.0, torch.zeros(64, 64))
    assert torch.equal(values, train_gpt.round_rows(weight, 5, 0.0)[0])


@pytest.mark.parametrize("tied", [True, False])
def test_calibration_sums_the_inputs_of_each_matrix(tied):
    model = train_gpt.GPT(tiny_config(tie_embeddings=tied, num_layers=3, **{**SWITCHES, "smear": False}))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(1))
    batches = torch.randint(0, 260, (2, 32, 33), generator=torch.Generator().manual_seed(0))
    grams = train_gpt.calibrate(model, [[(part[:, :-1], part[:, 1:])] for part in batches], one_process())
    head = "tok_emb.weight" if tied else "lm_head.weight"
    matrices = {name for name, p in model.named_parameters() if name.startswith("blocks.") and name.endswith("weight")}
    assert grams.keys() == matrices | {head}
    last = train_gpt.rms_norm(model.hidden(batches[..., :-1].flatten(0, 1))).flatten(0, 1)
    torch.testing.assert_close(grams[head], last.mT @ last, rtol=1e-4, atol=1e-3)
    first = model.blocks[0]
    x = train_gpt.rms_norm(model.tok_emb(batches[..., :-1].flatten(0, 1))) * first.resid_mix.sum(0)
    x = train_gpt.rms_norm(x).flatten(0, 1)
    torch.testing.assert_close(grams["blocks.0.attn.c_k.weight"], x.mT @ x, rtol=1e-4, atol=1e-3)
    for name, gram in grams.items():
        assert gram.shape == (model.get_parameter(name).size(1),) * 2


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_huffmans_file_is_as_small_as_its_entropy_allows_and_is_read_like_the_other(tmp_path, bits):
    config = tiny_config(model_dim=128, export_bits=bits, embed_bits=bits, int8_keep_float_max_numel=1000)
    model = trained_like(config)
    files = {}
    for coder in ("zlib", "huffman"):
        config = train_gpt.replace(config, export_coder=coder)
        data, about = train_gpt.pack(model.state_dict(), config)
        payload, raw_bytes = about["payload_bytes"], about["raw_bytes"]
        assert len(zlib.decompress(data)) == raw_bytes > payload
        files[coder] = data
        (tmp_path / coder).write_bytes(data)
        train_gpt.load_weights(train_gpt.GPT(config), tmp_path / coder)
    values = train_gpt.quantize(model.state_dict(), config)[0]["quantized"].values()
    entropy = sum(-count * math.log2(count / v.numel()) / 8 for v in values
                  for count in np.unique(v.numpy(), return_counts=True)[1])
    rest = raw_bytes - sum(v.numel() for v in values)  # floats, names and headers
    assert len(files["huffman"]) < 1.02 * entropy + rest
    assert bits > 4 or len(files["huffman"]) < len(files["zlib"])


def test_a_run_with_everything_on_and_its_resumption(tmp_path, monkeypatch, capsys):
    data = make_shards(tmp_path)
    arguments = tiny_arguments(data, **RECIPE, RUN_ID="whole", CHECKPOINT_EVERY=2, OUT_DIR=tmp_path / "a")
    run_here(monkeypatch, tmp_path, *arguments)
    out = capsys.readouterr().out
    whole = events(tmp_path, "whole")
    assert out.count("\nWARNING: larger than SIZE_CAP=50000; lower EXPORT_BITS\n") == 1
    windows, final = whole[-2:]
    assert (final["event"], windows["event"]) == ("final", "windows") and windows["val_loss"] != final["val_loss"]
    assert f"windows val_loss:{windows['val_loss']:.8f}" in out

    run_here(monkeypatch, tmp_path, *tiny_arguments(
        data, **RECIPE, RUN_ID="again", OUT_DIR=tmp_path / "b", CHECKPOINT_EVERY=2,
        RESUME=tmp_path / "a" / "checkpoints" / "whole_00000002.pt"))
    assert (tmp_path / "a" / "final_model.int8.ptz").read_bytes() == (tmp_path / "b" / "final_model.int8.ptz").read_bytes()

    capsys.readouterr()
    run_here(monkeypatch, tmp_path, *tiny_arguments(
        data, **{**RECIPE, "GPTQ_BATCHES": 0}, RUN_ID="score", ITERATIONS=0, OUT_DIR=tmp_path / "c",
        INIT_FROM=tmp_path / "a" / "final_model.int8.ptz"))
    assert "larger than SIZE_CAP" not in capsys.readouterr().out  # nothing is exported
    scored = [event for event in events(tmp_path, "score") if event["event"] == "final"][0]
    assert scored["val_loss"] == pytest.approx(final["val_loss"], abs=1e-6)


def test_a_size_cap_is_for_code_and_artifact_together_and_changes_neither(tmp_path, monkeypatch, capsys):
    data, size, artifacts = make_shards(tmp_path), 0, set()
    for less, warns in ((0, False), (0, False), (1, True)):  # no cap, the size itself, a byte less
        cap = size - less
        run_here(monkeypatch, tmp_path, *tiny_arguments(data, RUN_ID="capped", EXPORT_BITS=5, SIZE_CAP=cap))
        about = next(event for event in events(tmp_path, "capped") if event["event"] == "export")
        artifact = (tmp_path / "final_model.int8.ptz").read_bytes()
        size = len(artifact) + train_gpt.Path(train_gpt.__file__).stat().st_size
        artifacts.add(artifact)
        assert size == about["artifact_bytes"] + about["code_bytes"] and len(artifacts) == 1
        assert (f"WARNING: larger than SIZE_CAP={cap}; lower EXPORT_BITS" in capsys.readouterr().out) == warns


@pytest.mark.parametrize("preset", sorted(PRESETS), ids=lambda path: path.stem)
def test_presets_train_and_export(tmp_path, monkeypatch, preset):
    """Their switches on a small model: the shape, the data and the clock are the tests'."""
    _, settings = train_gpt.load_config([f"@{preset}"], {})
    small = {"MODEL_DIM": 128, "NUM_HEADS": 4, "NUM_KV_HEADS": 2, "NUM_LAYERS": 3, "ITERATIONS": 20, "VAL_LOSS_EVERY": 0,
             "MAX_WALLCLOCK_SECONDS": 0, "INT8_KEEP_FLOAT_MAX_NUMEL": 1000, "RUN_ID": "preset"}
    shorter = {"ROPE_DIMS": 16, "EVAL_STRIDE": 16, "EVAL_SEQ_LEN": 48}
    small |= {name: value for name, value in shorter.items() if name in settings}
    run_here(monkeypatch, tmp_path, f"@{preset}", *tiny_arguments(make_shards(tmp_path), **small))
    log = events(tmp_path, "preset")
    first, final = next(event for event in log if event["event"] == "train"), log[-1]
    assert final["step"] == 20 and final["val_loss"] < first["train_loss"] - 0.1


@pytest.mark.parametrize("wrong, message", [
    ("EXPORT_BITS=3", r"EXPORT_BITS='3' must be one of 4\|5\|6\|7\|8"),
    ("ROPE_DIMS=64", "ROPE_DIMS=64 must be even, below 64"),
    ("ROPE_DIMS=15", "ROPE_DIMS=15 must be even")])
def test_settings_that_cannot_be(wrong, message):
    with pytest.raises(ValueError, match=message):
        train_gpt.load_config([wrong], {})
