"""The reference run: the same losses, counts and artifact from the same weights and text.

Its data are not part of this repository; GOLDEN_PATH names their folder."""

import json

import pytest
import torch
import train_gpt
from conftest import GOLDEN, MODEL, events, run_trainer

pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    not (GOLDEN / "A" / "expected.json").exists() or not MODEL.exists(),
    reason=f"the reference run's data are not in {GOLDEN} (GOLDEN_PATH)")]


def golden_run(folder, *more):
    """Train with the reference run's settings, and others; return the events."""
    settings = (GOLDEN / "A" / "env").read_text().split()
    result = run_trainer(folder, *settings, f"DATA_PATH={GOLDEN / 'ds'}", f"TOKENIZER_PATH={MODEL}", "TRAIN_LOG_EVERY=1",
                         "RUN_ID=golden", "OUT_DIR=.", "DEVICE=cpu", *more)
    assert result.returncode == 0, result.stderr
    return events(folder, "golden")


def test_losses_and_artifact_of_the_reference_run(tmp_path):
    expected = json.loads((GOLDEN / "A" / "expected.json").read_text())
    seen = golden_run(tmp_path, f"INIT_FROM={GOLDEN / 'A' / 'init.pt'}")
    losses = [event["train_loss"] for event in seen if event["event"] == "train"]
    assert losses[:5] == pytest.approx(expected["train_loss"][:5], abs=3e-4)
    assert losses == pytest.approx(expected["train_loss"], abs=2e-3)
    validations = [(e["step"], e["val_loss"], e["val_bpb"]) for e in seen if e["event"] == "val"]
    for found, wanted in zip(validations, expected["val"], strict=True):
        assert found == pytest.approx(wanted, abs=2e-3)
    export, final = seen[-2], seen[-1]
    assert (final["val_loss"], final["val_bpb"]) == pytest.approx(expected["roundtrip_exact"], abs=2e-3)
    assert export["payload_bytes"] == expected["int8_payload_bytes"]
    assert export["artifact_bytes"] == pytest.approx(expected["artifact_bytes"], rel=0.005)
    state = torch.load(tmp_path / "final_model.pt", weights_only=True)
    assert sum(t.numel() for t in state.values()) == expected["model_params"]


def test_the_reference_runs_artifact_scores_the_same_here(tmp_path):
    seen = golden_run(tmp_path, "ITERATIONS=0", f"INIT_FROM={GOLDEN / 'A' / 'final_model.int8.ptz'}")
    assert seen[1]["event"] == "final" and seen[1]["val_loss"] == pytest.approx(4.90365, abs=2e-4)


def test_the_seed_alone_makes_the_initial_weights():
    config = train_gpt.Config(num_layers=4, model_dim=128, num_heads=4, num_kv_heads=2, dtype="float32")
    torch.manual_seed(1337)
    state, wanted = train_gpt.GPT(config).state_dict(), torch.load(GOLDEN / "A" / "init.pt", weights_only=True)
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
