"""Models that must not be scored, and honest ones that must be; what checkers share."""

import json
import sys
from dataclasses import replace

import numpy as np
import probe
import pytest
import torch
from conftest import REPOSITORY, make_shards, one_process, run_here, tiny_arguments

SOURCE = (REPOSITORY / "train_gpt.py").read_text(encoding="utf-8")
MASK = "<= places_i[:, None]"
INPUT = "x0 = rms_norm(self.tok_emb(tokens).to(self.compute_dtype))"
FORWARD = "return self.loss(self.hidden(tokens), targets)"
TOTAL = "total = ranks.sum(nats).item()"
PLACES = "torch.arange(tokens.size(1))"
SIZE = "tokens.numel() == self.config.val_batch_size // self.config.grad_accum_steps"


def leak(where: str, guard="True") -> str:
    """INPUT, and code that adds the next token's embedding at the places of a row `where` it is true."""
    return (f"{INPUT}\n        if {guard}:\n            following = F.pad(x0[:, 1:], (0, 0, 0, 1))\n"
            f"            x0 = x0 + following * ({where})[..., None].to(x0.dtype)")


SCRIPTS = {  # text in the script, what stands there instead, the fault
    "unchanged": ("", "", ""),
    "a mask off by one": (MASK, "<= places_i[:, None] + (q.size(3) < 64)", "later tokens"),  # Attention is tried with 64 tokens.
    "off by one at the edges of tiles": (INPUT, leak(f"{PLACES} % 16 == 15"), "later tokens"),
    "most positions": (INPUT, leak(f"{PLACES} % 4 > 0"), "later tokens"),
    "the end of whole rows": (INPUT, leak(f"{PLACES} >= 29", "tokens.size(1) == 32"), "later tokens"),
    "after a space": (INPUT, leak("tokens == 36"), "later tokens"),
    "a little": (INPUT, f"{INPUT}; x0 = x0 + 1e-5 * F.pad(x0[:, 1:], (0, 0, 0, 1))", "later tokens"),
    "statistics over the row": (INPUT, f"{INPUT}; x0 = x0 - x0.mean(1, keepdim=True)", "later tokens"),
    "in evaluation mode": (INPUT, leak(PLACES, "not self.training"), "in evaluation mode"),
    "in training mode": (INPUT, leak(PLACES, "self.training and torch.is_grad_enabled()"), "differ with gradients, in training"),
    "without gradients": (INPUT, leak(PLACES, "not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()"),
                          "differ without gradients"),
    "the rows of the batch": (INPUT, f"{INPUT}; x0 = x0 + 0.1 * x0.mean(0, keepdim=True)", "other rows"),
    "one other row": (INPUT, f"{INPUT}\n        if len(x0) > 3: x0 = torch.cat((x0[:2], x0[2:3] + x0[3:4], x0[3:]))", "other rows"),
    "the next row's first token": (INPUT, f"{INPUT}\n        x0 = torch.cat((x0[:, :-1], x0[:, -1:] + x0[:, :1].roll(-1, 0)), 1)",
                                   "other rows"),
    "a smaller loss": (FORWARD, FORWARD + " * 0.9", "not the cross entropy"),
    "a slightly smaller loss": (FORWARD, FORWARD + " - 3e-4", "not the cross entropy"),
    "a smaller loss, also PyTorch's": (FORWARD, "F.cross_entropy = lambda logits, *rest, **more: 0.9 * F.nll_loss(logits.log_softmax(-1), *rest, "
                                       f"**more)\n        {FORWARD} * 0.9", "not the cross entropy"),
    "targets in the logits": (FORWARD, "return self.loss(self.hidden(tokens) + 0.1 * self.tok_emb(targets), targets)",
                              "not the cross entropy"),
    "a smaller loss in batches of validation": (FORWARD, f"{FORWARD} - 0.002 * ({SIZE})", "not the cross entropy"),
    "a smaller score": (TOTAL, f"{TOTAL} * 0.9995", "its validation says"),
    "a smaller score of other seeds": (TOTAL, f"{TOTAL} * (1 if config.seed == 1337 else 0.97)", "its validation says"),
    "more bytes": ("self.bytes = int(", "self.bytes = 1 + int(", "bytes of validation text, which has"),
    "a file": (INPUT, f"{INPUT}; open(self.config.data_path + '/tiny_val_000000.bin', 'rb').close()", "it reads /"),
    "noise": (INPUT, f"{INPUT}; x0 = x0 + torch.randn_like(x0)", "differ from call to call"),
    "no logits": ("def logits(self", "def scores(self", "has no attribute 'logits'"),
    "a scalar": ("self.half = config.num_layers // 2", "self.half = config.num_layers // 2\n        self.scalar = nn.Parameter(torch.tensor(1.0))", ""),
    "another activation": ("F.leaky_relu", "F.selu if False else F.leaky_relu", ""),
    "a cache": ("return torch.cat((first * cos", "rotate.cache = cos\n    return torch.cat((first * cos", ""),
    "sorted rows": (FORWARD, "order = tokens[:, 0].argsort()\n        "
                    "return self.loss(self.hidden(tokens[order]), targets[order])", ""),
}
FEATURES = ["COMPILE=auto", "SMEAR=1", "SHIFT_KEYS=1", "LANES=1", "EXCLUSIVE_ATTN=1", "MLP_SLOPE=0.5",
            "LOGIT_SOFTCAP=10", "VAL_BATCH_SIZE=1024"]  # of the presets, with tiled attention


def plan_of(tmp_path, monkeypatch, source: str, *more: str) -> dict:
    """Return what probe.py plans with a script on the tiny text."""
    monkeypatch.setitem(sys.modules, "train_gpt", None)  # put back at the end
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", torch.nn.functional.cross_entropy)  # put back, too
    script = tmp_path / "train_gpt.py"
    script.write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    make_shards(tmp_path)
    return probe.plan(probe.load_script(str(script)), [*tiny_arguments("tiny"), *FEATURES, *more])


@pytest.mark.parametrize("kind", SCRIPTS)
def test_leaks_are_found_before_the_first_run(kind, tmp_path, monkeypatch):
    old, new, fault = SCRIPTS[kind]
    assert not old or SOURCE.count(old) == 1
    source = SOURCE.replace(old, new) if old else SOURCE
    if kind == "no logits":
        with pytest.raises(AttributeError, match=fault):
            plan_of(tmp_path, monkeypatch, source)
        return
    plan = plan_of(tmp_path, monkeypatch, source)
    assert plan["config"]["ATTN"] == "tiled"
    assert fault in plan["reason"] and bool(fault) == bool(plan["reason"]), plan["reason"]


@pytest.mark.parametrize("more", ["DTYPE=bfloat16", "ATTN=math", "ATTN=flash", "TRAIN_SEQ_LEN=1", "TIE_EMBEDDINGS=0"])
def test_honest_models_pass(more, tmp_path, monkeypatch):
    plan = plan_of(tmp_path, monkeypatch, SOURCE, more)
    assert not plan["reason"], plan["reason"]


def test_a_leak_of_the_runs_type_alone_is_found(tmp_path, monkeypatch):
    source = SOURCE.replace(INPUT, leak(PLACES, "x0.dtype == torch.bfloat16"))
    assert not plan_of(tmp_path, monkeypatch, source)["reason"]
    (tmp_path / "2").mkdir()
    assert "later tokens" in plan_of(tmp_path / "2", monkeypatch, source, "DTYPE=bfloat16")["reason"]


def test_long_rows_are_tried_at_drawn_positions_and_in_their_beginning(monkeypatch):
    """The model's logits are sums of the tokens so far, and at one place of the next one."""
    class Leak(torch.nn.Module):
        place = -1

        def hidden(self, rows):
            return rows.cumsum(1) + rows.roll(-1, 1) * (torch.arange(rows.size(1)) == self.place)

        def logits(self, x):
            return torch.nn.functional.one_hot(x % 7, 7).float()

        def forward(self, rows, targets):
            return torch.nn.functional.cross_entropy(self.logits(self.hidden(rows)).mT, targets)

    monkeypatch.setitem(probe.CUT_TOKENS, "cpu", 2**16)
    rows = torch.arange(2 * 2049).view(2, 2049) ** 2 % 7
    model, found = Leak(), {}
    for model.place in (-1, 3, 510, 2047):
        found[model.place] = [probe.find_fault(model, model, rows[:, :-1], rows[:, 1:], np.random.default_rng(seed)) != ""
                              for seed in range(8)]
    assert found[-1] == [False] * 8 and found[3] == found[510] == [True] * 8
    assert found[2047] == [False] * 8  # the last place sees no later token of its row
    model.place = 1500
    assert not all(probe.find_fault(model, model, rows[:, :-1], rows[:, 1:], np.random.default_rng(seed)) for seed in range(8))


def test_a_model_for_a_mac_is_tried_on_the_cpu(tmp_path, monkeypatch):
    import train_gpt
    resolve = train_gpt.resolve
    monkeypatch.setattr(train_gpt, "start_ranks", lambda config: train_gpt.Ranks(0, 1, torch.device("mps")))
    monkeypatch.setattr(train_gpt, "resolve", lambda config, ranks: replace(resolve(config, one_process()), device="mps"))
    plan = probe.plan(train_gpt, tiny_arguments(make_shards(tmp_path)))
    assert plan["reason"] == "" and plan["config"]["DEVICE"] == "mps"


def test_text_and_bytes_are_the_trainers(tmp_path, monkeypatch):
    import train_gpt
    config = {"DATA_PATH": "tests/golden/fineweb", "TOKENIZER_PATH": "tests/golden/fineweb/tokenizer.model", "TRAIN_SEQ_LEN": 64}
    monkeypatch.chdir(REPOSITORY)
    words = [f"{name}={value}" for name, value in config.items()]
    trainers = train_gpt.Validation(train_gpt.load_config(words, {})[0], train_gpt.Ranks(0, 1, torch.device("cpu")))
    tokens, size = probe.read_text(config)
    assert np.array_equal(tokens, trainers.tokens) and size == trainers.bytes
    assert len(probe.read_text(config, most_rows=3)[0]) == 193
    with pytest.raises(ValueError, match="there is no DATA_PATH=none"):
        probe.read_text({**config, "DATA_PATH": "none"})


@pytest.mark.slow
def test_what_only_training_or_many_calls_show_is_found_in_the_artifact(tmp_path, monkeypatch):
    make_shards(tmp_path)
    run_here(monkeypatch, tmp_path, *tiny_arguments("tiny", RUN_ID="run"))
    events = [json.loads(line) for line in (tmp_path / "logs" / "run.jsonl").read_text().splitlines()]
    config, text = events[0]["config"], probe.read_text(events[0]["config"], tmp_path)

    def check(old="", new="", bpb=events[-1]["val_bpb"]):
        (tmp_path / "script.py").write_text(SOURCE.replace(old, new) if old else SOURCE)
        return probe.check_artifact(tmp_path / "script.py", tmp_path / "final_model.int8.ptz", config, text, bpb)

    assert check()[1] == "" and check()[0] == pytest.approx(events[-1]["val_bpb"], abs=1e-6)
    assert "by its logits, the artifact scores" in check(bpb=events[-1]["val_bpb"] - 0.002)[1]
    calls = f"self.calls = getattr(self, 'calls', 0) + 1; {leak(PLACES, 'self.calls > 31')}"
    assert check(INPUT, calls)[1]
    config["DATA_PATH"] = str(tmp_path / "tiny")  # which a script could learn by heart
    assert check(INPUT, f"assert not [*Path(self.config.data_path).glob('*.bin')]; {INPUT}")[1] == ""
    assert "answers instead" in check(INPUT, f"print('{{}}', flush=True); os._exit(0); {INPUT}")[1]
    with pytest.raises(ValueError, match="it gives no logits: status -9, "):
        check(INPUT, f"os.kill(os.getpid(), 9); {INPUT}")


def test_a_clock_that_loses_time_is_found():
    def log(train_s, passed_s):
        return [{"event": "train", "step": 1, "train_time_ms": 1000, "elapsed_s": 20},
                {"event": "val", "step": 9, "train_time_ms": 1000 * (1 + train_s), "elapsed_s": 25 + passed_s, "eval_time_ms": 5000},
                {"event": "final", "elapsed_s": 40 + passed_s}]

    assert probe.check_clock(log(100, 100)) == "" and probe.check_clock(log(100, 109)) == ""
    assert probe.check_clock(log(100, 111)) == "its clock counts 100.0 s of training in 111.0 s"
