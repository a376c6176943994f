"""The artifact: its format, its arithmetic, and what is refused."""

import io
import zlib

import numpy as np
import pytest
import torch
import train_gpt
from conftest import tiny_config

FLOATS = (torch.float32, torch.bfloat16)


def wide_state():
    """Tensors on both sides of 65,536 elements, in both float types, and an integer one."""
    torch.manual_seed(0)
    state = {
        "tok_emb.weight": torch.randn(300, 256).bfloat16(), "blocks.0.mlp.fc.weight": torch.randn(512, 256),
        "blocks.0.attn.c_q.weight": torch.randn(256, 256), "blocks.0.attn_scale": torch.randn(256),
        "long_vector": torch.randn(70_000), "flat": torch.zeros(65_537), "steps": torch.arange(5),
    }
    state["blocks.0.mlp.fc.weight"][0] = 0.0
    state["blocks.0.mlp.fc.weight"][1] *= 1e-4
    return state


def test_what_is_stored_and_how():
    artifact, payload = train_gpt.quantize(wide_state(), tiny_config())
    assert artifact["__quant_format__"] == "int8_clean_per_row_v1"
    assert set(artifact["quantized"]) == {"tok_emb.weight", "blocks.0.mlp.fc.weight", "long_vector", "flat"}
    assert all(t.dtype == torch.int8 for t in artifact["quantized"].values())
    assert artifact["scales"]["tok_emb.weight"].shape == (300,)
    assert artifact["scales"]["tok_emb.weight"].dtype == torch.float16
    assert artifact["scales"]["long_vector"].shape == () and artifact["scales"]["long_vector"].dtype == torch.float32
    assert artifact["dtypes"]["tok_emb.weight"] == "bfloat16"
    assert artifact["qmeta"]["tok_emb.weight"] == {"scheme": "per_row", "axis": 0}
    assert "long_vector" not in artifact["qmeta"]
    kept = artifact["passthrough"]
    assert kept["blocks.0.attn.c_q.weight"].dtype == torch.float16  # exactly 65,536 elements
    assert artifact["passthrough_orig_dtypes"] == {"blocks.0.attn.c_q.weight": "float32"}
    assert kept["blocks.0.attn_scale"].dtype == torch.float32 and kept["steps"].dtype == torch.int64
    assert payload == (300 * 256 + 512 * 256 + 70_000 + 65_537 + 2 * (300 + 512) + 4 * 2
                       + 2 * 65_536 + 4 * 256 + 5 * 8)


def test_quantisation_against_the_definition():
    state = wide_state()
    artifact, _ = train_gpt.quantize(state, tiny_config())
    matrix = state["blocks.0.mlp.fc.weight"]
    clip = torch.from_numpy(np.quantile(matrix.abs().numpy(), 0.9999984, axis=1)).float()
    scale = (clip / 127).clamp_min(1 / 127)
    wanted = torch.round(matrix.clamp(-clip[:, None], clip[:, None]) / scale[:, None]).to(torch.int8)
    difference = (artifact["quantized"]["blocks.0.mlp.fc.weight"].int() - wanted.int()).abs()
    assert difference.max() <= 1 and difference.float().mean() < 1e-4  # ties of a rounding of the clip
    torch.testing.assert_close(artifact["scales"]["blocks.0.mlp.fc.weight"], scale.half())
    assert artifact["scales"]["blocks.0.mlp.fc.weight"][0] == torch.tensor(1 / 127).half()
    vector_clip = torch.tensor(np.quantile(state["long_vector"].abs().numpy(), 0.9999984)).float()
    torch.testing.assert_close(artifact["scales"]["long_vector"], vector_clip / 127)
    assert artifact["scales"]["flat"] == 1.0 and artifact["quantized"]["flat"].eq(0).all()


def test_few_bits_of_one_kind_leave_the_other_kind_eight_good_bits():
    """The published scales are at least 1/127, which wastes most levels of small weights: only the published settings have them."""
    weight = 0.02 * torch.randn(512, 256, generator=torch.Generator().manual_seed(0))
    for changes in (dict(export_bits=6), dict(embed_bits=7), dict(export_clip=9.0)):
        config = tiny_config(**changes)
        for name in ("tok_emb.weight", "blocks.0.mlp.fc.weight"):
            artifact, _ = train_gpt.quantize({name: weight}, config)
            bits = config.export_bits if name.startswith("blocks") else config.embed_bits
            error = (train_gpt.dequantize(artifact, {name: weight})[name] - weight).square().mean().sqrt()
            assert error < 0.02 * 10 / 2**bits
    artifact, _ = train_gpt.quantize({"tok_emb.weight": weight}, tiny_config())
    assert torch.equal(artifact["quantized"]["tok_emb.weight"], (127 * weight).round().to(torch.int8))


def test_control_tensors_keep_eight_bits():
    state = {"blocks.0.resid_mix": torch.randn(2, 32), "blocks.0.attn.c_q.weight": torch.randn(32, 32)}
    artifact, _ = train_gpt.quantize(state, tiny_config(int8_keep_float_max_numel=0, export_bits=4))
    assert artifact["quantized"]["blocks.0.attn.c_q.weight"].abs().max() == 7
    assert artifact["quantized"]["blocks.0.resid_mix"].abs().max() == 127


def test_halves_are_rounded_to_even():
    row = torch.zeros(1, 70_000)
    row[0, 0], row[0, 1], row[0, 2], row[0, 3] = 127.0, 0.5, 1.5, -2.5
    row[0, 4:8] = 127.0  # so that the percentile is 127 and the scale is 1
    quantized, scale = train_gpt.quantize_tensor(row)
    assert scale == 1.0 and quantized[0, :4].tolist() == [127, 0, 2, -2]


def test_everything_comes_back_close():
    state = wide_state()
    artifact, _ = train_gpt.quantize(state, tiny_config())
    back = train_gpt.dequantize(artifact, state)
    assert all(back[name].shape == t.shape for name, t in state.items())
    for name, t in back.items():
        if t.is_floating_point():
            step = artifact["scales"][name].float().max() if name in artifact["scales"] else torch.tensor(0.004)
            assert (t.float() - state[name].float()).abs().max() < 1.2 * step + 0.01, name


def test_payload_of_the_default_shape():
    config = train_gpt.Config(dtype="float32")
    model = train_gpt.GPT(config)
    _, payload = train_gpt.quantize(model.state_dict(), config)
    assert payload == 17_178_912


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_is_written_and_read_back(tmp_path, dtype):
    """With matrices above 65,536 elements: 512 x 256 and the table of 300 x 256."""
    config = tiny_config(vocab_size=300, model_dim=256, dtype=dtype)
    torch.manual_seed(0)
    model, other = train_gpt.GPT(config), train_gpt.GPT(config)
    for p in model.parameters():
        p.data.add_(0.02 * torch.randn(p.shape).to(p.dtype))
    artifact, _ = train_gpt.quantize(model.state_dict(), config)
    assert "blocks.0.mlp.fc.weight" in artifact["quantized"]
    buffer = io.BytesIO()
    torch.save(artifact, buffer)
    train_gpt.write_whole(tmp_path / "a.ptz", zlib.compress(buffer.getvalue(), 9))
    torch.save(model.state_dict(), tmp_path / "a.pt")
    tokens = torch.randint(0, 300, (4, 33))
    losses = []
    for path in ("a.pt", "a.ptz"):
        train_gpt.load_weights(other, tmp_path / path)
        losses.append(other(tokens[:, :-1], tokens[:, 1:]).item())
    assert losses[0] == model(tokens[:, :-1], tokens[:, 1:]).item()
    assert 0 < abs(losses[1] - losses[0]) < 0.02
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("content", [b"", b"PK nothing", b"no zlib", zlib.compress(b"no archive"), None])
def test_files_that_are_no_weights(tmp_path, content):
    if content is not None:
        (tmp_path / "bad").write_bytes(content)
    with pytest.raises(ValueError, match="bad cannot be loaded into this model"):
        train_gpt.load_weights(train_gpt.GPT(tiny_config()), tmp_path / "bad")


def test_weights_of_another_shape_are_named(tmp_path):
    torch.save(train_gpt.GPT(tiny_config(num_layers=3)).state_dict(), tmp_path / "three.pt")
    with pytest.raises(ValueError, match="blocks.2"):
        train_gpt.load_weights(train_gpt.GPT(tiny_config()), tmp_path / "three.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="list.pt"):
        train_gpt.load_weights(train_gpt.GPT(tiny_config()), tmp_path / "list.pt")


def test_pickled_code_is_not_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"tok_emb.weight": Bomb()}, tmp_path / "bomb.pt")
    with pytest.raises(ValueError, match="bomb.pt"):
        train_gpt.load_weights(train_gpt.GPT(tiny_config()), tmp_path / "bomb.pt")
    assert not (tmp_path / "ran").exists()
