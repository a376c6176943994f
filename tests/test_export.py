"""The artifact: its format, its arithmetic, and the files that are refused."""

import time
import tracemalloc
import zipfile
import zlib
from collections import OrderedDict

import numpy as np
import pytest
import torch
import train_gpt
from conftest import make_shards, run_here, tiny_arguments, tiny_config
from test_model import trained_like


def test_what_is_stored_and_how():
    """Of tensors on both sides of 65,536 elements, in both float types, and an integer one."""
    artifact, payload = train_gpt.quantize({
        "tok_emb.weight": torch.randn(300, 256).bfloat16(), "blocks.0.mlp.fc.weight": torch.randn(512, 256),
        "blocks.0.attn.c_q.weight": torch.randn(256, 256), "blocks.0.attn_scale": torch.randn(256),
        "long_vector": torch.randn(70_000), "flat": torch.zeros(65_537), "steps": torch.arange(5)}, tiny_config())
    assert artifact["__quant_format__"] == "int8_clean_per_row_v1"
    assert set(artifact["quantized"]) == {"tok_emb.weight", "blocks.0.mlp.fc.weight", "long_vector", "flat"}
    assert all(t.dtype == torch.int8 for t in artifact["quantized"].values())
    scales, kept = artifact["scales"], artifact["passthrough"]
    assert scales["tok_emb.weight"].shape == (300,) and scales["tok_emb.weight"].dtype == torch.float16
    assert scales["flat"] == 1.0 and artifact["quantized"]["flat"].eq(0).all()
    assert scales["long_vector"].shape == () and scales["long_vector"].dtype == torch.float32
    assert artifact["dtypes"]["tok_emb.weight"] == "bfloat16"
    assert artifact["qmeta"]["tok_emb.weight"] == {"scheme": "per_row", "axis": 0} and "long_vector" not in artifact["qmeta"]
    assert kept["blocks.0.attn.c_q.weight"].dtype == torch.float16  # exactly 65,536 elements
    assert artifact["passthrough_orig_dtypes"] == {"blocks.0.attn.c_q.weight": "float32"}
    assert kept["blocks.0.attn_scale"].dtype == torch.float32 and kept["steps"].dtype == torch.int64
    assert payload == (300 * 256 + 512 * 256 + 70_000 + 65_537 + 2 * (300 + 512) + 4 * 2
                       + 2 * 65_536 + 4 * 256 + 5 * 8)


@pytest.mark.parametrize("bits", [4, 5, 6, 7, 8])
@pytest.mark.parametrize("deviations", [0.0, 2.0])
def test_rounding_to_few_bits(capsys, bits, deviations):
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    values, scales = train_gpt.quantize_tensor(weight, bits, deviations)
    levels = 2 ** (bits - 1) - 1
    limit = deviations * weight.std(1) if deviations else weight.abs().amax(1)
    assert values.dtype == torch.int8 and scales.dtype == torch.float16 and values.abs().max() == levels
    torch.testing.assert_close(scales.float(), limit / levels, rtol=1e-3, atol=2e-7)
    wanted = torch.minimum(weight.abs(), limit[:, None]) * weight.sign()
    difference = (values.float() * scales.float()[:, None] - wanted).abs()
    assert (difference <= 0.51 * limit[:, None] / levels + 1e-3 * limit[:, None]).all()
    assert not capsys.readouterr().err


def test_control_tensors_keep_eight_bits():
    state = {"blocks.0.resid_mix": torch.randn(2, 32), "blocks.0.attn.c_q.weight": torch.randn(32, 32)}
    artifact, _ = train_gpt.quantize(state, tiny_config(int8_keep_float_max_numel=0, export_bits=4))
    assert artifact["quantized"]["blocks.0.attn.c_q.weight"].abs().max() == 7
    assert artifact["quantized"]["blocks.0.resid_mix"].abs().max() == 127


def test_the_smaller_coding_is_written():
    """Normally distributed levels never repeat: Huffman codes alone need less. A matrix that repeats needs zlib's search."""
    config = tiny_config(int8_keep_float_max_numel=0, export_bits=4)
    normal = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    for weight, smaller in ((normal, 0), (normal[:4].repeat(64, 1), 1)):
        data, _ = train_gpt.pack({"blocks.0.mlp.fc.weight": weight}, config)
        raw, sizes = zlib.decompress(data), []
        for strategy in (zlib.Z_HUFFMAN_ONLY, zlib.Z_DEFAULT_STRATEGY):
            packer = zlib.compressobj(9, strategy=strategy)
            sizes.append(len(packer.compress(raw) + packer.flush()))
        assert len(data) == min(sizes) == sizes[smaller] < max(sizes)


def test_a_size_cap_is_for_code_and_artifact_together(tmp_path, monkeypatch, capsys):
    torch.save(train_gpt.GPT(tiny_config()).state_dict(), tmp_path / "init.pt")
    words = tiny_arguments(make_shards(tmp_path), ITERATIONS=0, INIT_FROM="init.pt")
    run_here(monkeypatch, tmp_path, *words)
    artifact = tmp_path / "final_model.int8.ptz"
    code = train_gpt.Path(train_gpt.__file__).stat().st_size
    size = artifact.stat().st_size + code
    for cap, warns in ((size, False), (size - 1, True)):
        capsys.readouterr()
        run_here(monkeypatch, tmp_path, *words, f"SIZE_CAP={cap}")
        assert (f"WARNING: above SIZE_CAP={cap} with EXPORT_CLIP=0" in capsys.readouterr().out) == warns
    coarse = [*words, "EXPORT_CLIP=4", "INT8_KEEP_FLOAT_MAX_NUMEL=100"]
    run_here(monkeypatch, tmp_path, *coarse)
    cap = artifact.stat().st_size + code - 500
    run_here(monkeypatch, tmp_path, *coarse, f"SIZE_CAP={cap}")  # EXPORT_CLIP rises until it fits
    out = capsys.readouterr().out
    assert artifact.stat().st_size + code <= cap
    assert f"WARNING: above SIZE_CAP={cap} with EXPORT_CLIP=4\n" in out


# ---- Files that are refused --------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [
    b"", b"PK nothing", b"no zlib", zlib.compress(b"no archive"), train_gpt.saved([1, 2]),
    train_gpt.saved(train_gpt.GPT(tiny_config(num_layers=3)).state_dict())],
    ids=["empty", "no zip", "no zlib", "no archive", "a list", "another model"])
def test_files_that_are_no_weights_of_the_model(tmp_path, content):
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(ValueError, match="bad cannot be loaded into this model: "):
        train_gpt.load_weights(train_gpt.GPT(tiny_config()), tmp_path / "bad")


def test_hostile_artifacts_are_refused(tmp_path):
    config = tiny_config(int8_keep_float_max_numel=100)
    model = trained_like(config)
    artifact, _ = train_gpt.quantize(model.state_dict(), config)
    quantized, scales, kept = artifact["quantized"], artifact["scales"], artifact["passthrough"]
    name, key = "blocks.0.mlp.fc.weight", next(iter(kept))
    path = tmp_path / "a.ptz"

    def load(**changes):
        path.write_bytes(zlib.compress(train_gpt.saved({**artifact, **changes})))
        train_gpt.load_weights(model, path)

    def refused(wanted, **changes):
        with pytest.raises(ValueError, match=f"(?s)a.ptz cannot be loaded into this model: {wanted}"):
            load(**changes)

    load()  # as it is, it is accepted
    other = f"{name} has another shape"
    refused(other, scales={**scales, name: scales[name][:-1]})
    # A stride of zero promises more values than any memory holds: nothing may compute with them before it is refused.
    refused(other, scales={**scales, name: torch.ones(1).half().expand(10**12)})
    for values in (quantized[name][:, :-1], torch.zeros(1, dtype=torch.int8).expand(64, 10**11)):
        refused(other, quantized={**quantized, name: values})
    refused(".*Missing key", passthrough={})
    refused(".*Unexpected key", passthrough={**kept, "extra": torch.zeros(1)})
    for value in (torch.zeros(3), "text", [1.0], None):
        refused(f".*{key}", passthrough={**kept, key: value})
    refused("", scales={})
    refused("", quantized=[1])
    types = {key: t.dtype for key, t in model.state_dict().items()}
    state = OrderedDict((key, t.double()) for key, t in model.state_dict().items())
    state._metadata = {key: {"assign_to_params_buffers": True} for key in ("", *dict(model.named_modules()))}
    torch.save(state, tmp_path / "own.pt")
    train_gpt.load_weights(model, tmp_path / "own.pt")  # without the metadata, which would change the types
    assert {key: t.dtype for key, t in model.state_dict().items()} == types
    (tmp_path / "zeros.ptz").write_bytes(zlib.compress(train_gpt.saved({"x": torch.zeros(2_000_000)})))
    assert len(train_gpt.read_saved(tmp_path / "zeros.ptz")["x"]) == 2_000_000  # It shrinks by more than 32 times.


@pytest.mark.slow
def test_bombs_are_refused_at_once_and_in_little_memory(tmp_path):
    """10 GB of zlib in 10 MB, and zip archives whose entries inflate."""
    packer = zlib.compressobj(9)
    start = packer.compress(bytes(1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(bytes(1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH)  # can be repeated
    (tmp_path / "bomb.ptz").write_bytes(start + 600 * block)
    assert (tmp_path / "bomb.ptz").stat().st_size > 9e6
    torch.save({"x": torch.zeros(10_000_000)}, tmp_path / "stored.pt")
    with zipfile.ZipFile(tmp_path / "stored.pt") as stored, \
            zipfile.ZipFile(tmp_path / "deflated.pt", "w", zipfile.ZIP_DEFLATED) as deflated:
        for entry in stored.infolist():
            deflated.writestr(entry.filename, stored.read(entry.filename))
    (tmp_path / "inside.ptz").write_bytes(zlib.compress((tmp_path / "deflated.pt").read_bytes()))
    reasons = {"bomb.ptz": "not a zip file", "deflated.pt": "entries are packed", "inside.ptz": "entries are packed"}
    model = train_gpt.GPT(tiny_config())
    tracemalloc.start()
    for name, reason in reasons.items():
        tracemalloc.reset_peak()
        started = time.process_time()
        with pytest.raises(ValueError, match=f"{name} cannot be loaded .*{reason}"):
            train_gpt.load_weights(model, tmp_path / name)
        assert time.process_time() - started < 5  # for 3 % of the 10 GB
        assert tracemalloc.get_traced_memory()[1] < 700 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("is_artifact", [True, False])
def test_damaged_weights_are_errors_or_what_they_were(tmp_path, is_artifact):
    """Bytes are changed at random; what loads all the same is what it was, or was damaged in the archive's padding."""
    random, config = np.random.default_rng(3), tiny_config(int8_keep_float_max_numel=100)
    model, good, refused = trained_like(config), tmp_path / "good", 0
    state = model.state_dict()
    good.write_bytes(train_gpt.pack(state, config)[0] if is_artifact else train_gpt.saved(state))
    train_gpt.load_weights(model, good)
    wanted = {key: t.clone() for key, t in model.state_dict().items()}
    for _ in range(100):
        damaged = bytearray(good.read_bytes())
        for at in random.integers(0, len(damaged), int(random.integers(1, 4))):
            damaged[at] = int(random.integers(256))
        (tmp_path / "bad").write_bytes(damaged)
        try:
            train_gpt.load_weights(model, tmp_path / "bad")
        except ValueError as error:
            assert "bad cannot be loaded into this model" in str(error)
            refused += 1
        assert all(torch.equal(t, wanted[key]) for key, t in model.state_dict().items())
    assert refused > 70
