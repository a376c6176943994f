"""The tracks: the presets that are meant for them pass their checks, and records are compared by the right test."""

import json

import common
import pytest
import rules
import train_gpt
from conftest import REPOSITORY


@pytest.mark.parametrize("preset, track, division, tokenizer", [
    ("seq4096", "track_10min_16mb", "fineweb10B", "sp1024"), ("baseline", "track_10min_16mb", "fineweb10B", "sp1024"),
    ("h100_8gpu_16mb", "track_10min_16mb", "fineweb10B", "sp8192"), ("h100_1gpu_16mb", "track_10min_16mb_1gpu", "fineweb10B", "sp8192"),
    ("cpu_1mb", "track_10min_1mb_cpu", "sotu", "unigram2048"), ("cpu_1mb_avx2", "track_10min_1mb_cpu", "sotu", "unigram2048")])
def test_every_preset_passes_the_checks_of_its_track(preset, track, division, tokenizer):
    """All but those of the data, which are not here: its rows and its vocabulary must have a table."""
    limits = json.loads((REPOSITORY / "records" / track / "track.json").read_text())
    given = [f"@{REPOSITORY}/records/presets/{preset}.env", f"DEVICE={limits['settings']['DEVICE'][0]}"]
    config, overrides = train_gpt.load_config(given, {})
    planned = {name: getattr(config, name.lower()) for name in [*overrides, "MAX_WALLCLOCK_SECONDS", *limits["settings"]]}
    problems = rules.Findings()
    rules.check_request(limits, division, 3, planned, problems)
    assert not problems
    table = limits["divisions"][division]["scored"][tokenizer]
    row = table[str(config.train_seq_len)]
    counts = {key: value if isinstance(value, int) else sum(value) // 2 for key, value in row.items()}
    seed = {"settings": {"TRAIN_SEQ_LEN": config.train_seq_len}, **counts}
    assert rules.find_table(limits["divisions"][division]["scored"], seed) is table
    assert tokenizer.removeprefix("unigram").removeprefix("sp") == str(config.vocab_size)


def test_the_test_of_significance_is_welchs():
    """By hand: means 1.0 and 1.1, variances 1e-4 and 4e-4 of three each; t = -0.1 / sqrt(5e-4 / 3), 2.94 degrees. A
    margin of 0.01 nats per token is 0.005 bits per byte if the loss in nats is twice the bits per byte."""
    pytest.importorskip("scipy")

    def seeds(scores, nats=1.0):
        return [{"val_bpb": x, "val_loss": nats * x} for x in scores]

    ours, theirs = seeds([0.99, 1.0, 1.01]), seeds([1.08, 1.1, 1.12])
    test = common.compare_scores({}, ours, theirs)
    assert test["difference"] == pytest.approx(-0.1) and test["n"] == [3, 3] and test["margin"] == 0
    assert test["p"] == pytest.approx(0.00245, abs=3e-4)
    other = common.compare_scores({"margin_nats": 0.01}, ours, seeds([1.08, 1.1, 1.12], nats=2.0))
    assert other["margin"] == pytest.approx(0.005) and other["p"] > test["p"]
    assert common.compare_scores({"margin_nats": 0.2}, ours, theirs)["p"] > 0.5
    assert common.compare_scores({}, ours[:1], theirs) is None
