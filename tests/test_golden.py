"""The published script's run: the same losses, counts and artifact from the same weights and text.

tests/golden has a tiny one. The data of a longer one are not part of this repository; GOLDEN_PATH names their folder."""

import json
import re

import pytest
import torch
import train_gpt
from conftest import GOLDEN, MODEL, REPOSITORY, events, run_here, run_trainer

HERE = REPOSITORY / "tests" / "golden"
HAS_LONG = (GOLDEN / "A" / "expected.json").exists() and MODEL.exists()
ROUNDED = 2e-3  # nats, as in the long run below: Muon's bfloat16 rounds sums in another order differently, which adds up over the steps


def long_run(test):
    return pytest.mark.slow(pytest.mark.skipif(not HAS_LONG, reason=f"no data in {GOLDEN} (GOLDEN_PATH)")(test))


def train(monkeypatch, folder, *more):
    """Train or score with the settings of tests/golden; return the events."""
    words = [f"@{HERE}/settings.env", f"DATA_PATH={HERE}/fineweb", "DEVICE=cpu", "DTYPE=float32", "COMPILE=0", "RUN_ID=golden",
             "OUT_DIR=.", *more]
    run_here(monkeypatch, folder, *words)
    return events(folder, "golden")


def test_losses_and_artifact_are_those_of_the_published_script(monkeypatch, tmp_path):
    seen = train(monkeypatch, tmp_path, f"INIT_FROM={HERE}/initial_weights.ptz")
    log = (HERE / "published.log").read_text()
    for kind in ("train", "val"):
        wanted = {int(step): float(loss) for step, loss in re.findall(rf"step:(\d+)/24 {kind}_loss:(\S+)", log)}
        found = {event["step"]: event[f"{kind}_loss"] for event in seen if event["event"] == kind}
        assert len(wanted) >= 3 and found == pytest.approx(wanted, abs=ROUNDED)
        first = [step for step in wanted if step <= 5]  # the log has four digits
        assert [found[step] for step in first] == pytest.approx([wanted[step] for step in first], abs=1.5e-4)
    loss, bpb = map(float, re.search(r"exact val_loss:(\S+) val_bpb:(\S+)", log).groups())
    final = seen[-1]
    assert (final["val_loss"], final["val_bpb"]) == pytest.approx((loss, bpb), abs=ROUNDED)
    artifact, payload = map(int, re.search(r"int8\+zlib: (\d+) bytes \(payload:(\d+)", log).groups())
    assert seen[-2]["payload_bytes"] == payload
    # Ours also describes itself, in at most 1,500 bytes.
    assert artifact - 200 < seen[-2]["artifact_bytes"] < artifact + 1500


def test_the_published_artifact_scores_the_same_here(monkeypatch, tmp_path):
    seen = train(monkeypatch, tmp_path, "ITERATIONS=0", f"INIT_FROM={HERE}/published.int8.ptz")
    assert seen[-1]["val_loss"] == pytest.approx(4.33531509, abs=2e-6)
    assert seen[-1]["val_bpb"] == pytest.approx(3.15350866, abs=2e-6)


def test_the_seed_alone_makes_the_published_weights():
    words = [f"@{HERE}/settings.env", f"DATA_PATH={HERE}/fineweb", "DTYPE=float32"]
    config, _ = train_gpt.load_config(words, {})
    torch.manual_seed(config.seed)
    state, wanted = train_gpt.GPT(config).state_dict(), train_gpt.read_saved(HERE / "initial_weights.ptz")
    assert state.keys() == wanted.keys() and all(torch.equal(state[name], wanted[name]) for name in wanted)


def golden_run(folder, *more):
    """Train with the reference run's settings, and others; return the events."""
    settings = (GOLDEN / "A" / "env").read_text().split()
    result = run_trainer(folder, *settings, f"DATA_PATH={GOLDEN / 'ds'}", f"TOKENIZER_PATH={MODEL}", "TRAIN_LOG_EVERY=1",
                         "RUN_ID=golden", "OUT_DIR=.", "DEVICE=cpu", *more)
    assert result.returncode == 0, result.stderr
    return events(folder, "golden")


@long_run
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


@long_run
def test_the_reference_runs_artifact_scores_the_same_here(tmp_path):
    seen = golden_run(tmp_path, "ITERATIONS=0", f"INIT_FROM={GOLDEN / 'A' / 'final_model.int8.ptz'}")
    assert seen[1]["event"] == "final" and seen[1]["val_loss"] == pytest.approx(4.90365, abs=2e-4)
