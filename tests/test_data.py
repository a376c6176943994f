"""Shards, the loader and validation: damage is named, ranks share nothing, every token is scored once."""

import math
import types
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import train_gpt
from conftest import one_process, tiny_config, write_shard


@pytest.mark.parametrize("header, size, wanted", [
    *(({}, size, "is not a token shard") for size in (0, 3, 8)),
    *(({}, size, "is damaged") for size in (1023, 1024, 1030, 1043, 1045)),
    (dict(magic=7), 1044, "is not a token shard"), (dict(version=2), 1044, "is not a token shard"),
    *((dict(count=count), 1044, "is damaged") for count in (9, 11, -10)), (dict(count=0), 1024, "is damaged")])
def test_damaged_shards_are_named(tmp_path, header, size, wanted):
    path = write_shard(tmp_path / "x_train_000000.bin", range(10), **header)
    path.write_bytes((path.read_bytes() + b"\0")[:size])
    with pytest.raises(ValueError, match=f"{path} {wanted}"):
        train_gpt.count_tokens(path)


def test_shards_are_found_by_their_names(tmp_path):
    config = tiny_config(data_path=str(tmp_path))
    for name in ("a_val_000000.bin", "a_val_bytes_000000.bin", "a_train_000001.bin", "a_train_000000.bin"):
        write_shard(tmp_path / name, [1, 2] * 40)
    assert [p.name for p in train_gpt.open_split(config, "val")] == ["a_val_000000.bin"]
    assert [p.name for p in train_gpt.open_split(config, "train")] == ["a_train_000000.bin", "a_train_000001.bin"]
    write_shard(tmp_path / "a_val_000000.bin", [1] * 32)
    with pytest.raises(ValueError, match="has 32 tokens in .*_val_.*TRAIN_SEQ_LEN=32"):
        train_gpt.open_split(config, "val")


def stream_config(tmp_path, lengths, **changes):
    """A configuration, and the tokens of its shards of these lengths."""
    config = tiny_config(data_path=str(tmp_path), **changes)
    tokens = 17 * np.arange(sum(lengths)) % config.vocab_size
    for i, part in enumerate(np.split(tokens, np.cumsum(lengths)[:-1])):
        write_shard(tmp_path / f"s_train_{i:06d}.bin", part)
    return config, tokens


def loaders(config, world_size):
    return [train_gpt.TokenLoader(config, train_gpt.Ranks(rank, world_size, torch.device("cpu"))) for rank in range(world_size)]


def whole_batch(loader, step):
    """A rank's inputs and targets of a step, from all its micro-batches."""
    return tuple(torch.cat(parts) for parts in zip(*loader.batches(step)))


@pytest.mark.parametrize("lengths", [[1500, 7, 1700], [30, 10]])
def test_ranks_read_disjoint_spans_of_what_one_rank_would_read(tmp_path, lengths):
    """A step is (tokens + 1) * world consecutive tokens for each accumulation, a span for each rank in turn. They cross the
    ends of shards, of which one is shorter than a span, and begin anew at the end of the last."""
    config, tokens = stream_config(tmp_path, lengths, grad_accum_steps=4, vocab_size=65535)
    assert tokens.max() > 2**15 or len(tokens) < 129  # which a span reads several times
    endless, position = np.resize(tokens, 9000), 0
    ranks = loaders(config, 2)
    for step in range(7):
        batches = [whole_batch(loader, step) for loader in ranks]
        assert all(t.shape == (16, 32) and t.dtype == torch.int64 for batch in batches for t in batch)
        for i in range(4):
            for x, y in batches:
                span = endless[position:position + 129]  # 1024 tokens a step / (2 ranks * 4 accumulations) + 1
                assert x[4 * i:4 * i + 4].flatten().tolist() == span[:-1].tolist()
                assert y[4 * i:4 * i + 4].flatten().tolist() == span[1:].tolist()
                position += 129


def test_an_epoch_of_the_shuffled_stream_has_every_row_once_in_another_order(tmp_path):
    config, tokens = stream_config(tmp_path, [1500, 40, 2000, 777], loader="shuffled")
    (loader,), epoch = loaders(config, 1), (len(tokens) - 1) // 32
    wanted = [tokens[32 * i:32 * i + 33].tolist() for i in range(epoch)]
    rows = []
    while len(rows) < 2 * epoch:
        x, y = whole_batch(loader, len(rows) // 32)
        assert x.shape == y.shape == (32, 32) and torch.equal(x[:, 1:], y[:, :-1])
        rows += [[*a, b[-1]] for a, b in zip(x.tolist(), y.tolist())]
    first, second = rows[:epoch], rows[epoch:2 * epoch]
    assert sorted(first) == sorted(second) == sorted(wanted)
    assert first != second and first != wanted
    other = whole_batch(loaders(train_gpt.replace(config, seed=7), 1)[0], 0)[0]
    assert other[:, 0].tolist() != [row[0] for row in first[:32]]


def test_the_shuffled_stream_is_the_same_for_any_number_of_ranks(tmp_path):
    config, _ = stream_config(tmp_path, [1500, 40, 2000, 777], loader="shuffled")
    found = []  # for each number of ranks: the sorted rows of inputs and targets of all ranks, step by step
    for world_size in (1, 2, 8, 32):
        ranks = loaders(train_gpt.replace(config, grad_accum_steps=max(1, 8 // world_size)), world_size)
        found.append([sorted(row for loader in ranks for row in torch.stack(whole_batch(loader, step), 1).tolist())
                      for step in range(7)])
    assert all(len(step) == 32 for step in found[0]) and all(steps == found[0] for steps in found)


def test_ids_beyond_the_vocabulary_are_found_where_they_are_read(tmp_path):
    config, tokens = stream_config(tmp_path, [3000, 3000])
    write_shard(tmp_path / "s_train_000001.bin", [*tokens[:2999], 65535])
    loader, = loaders(config, 1)
    with pytest.raises(ValueError, match="s_train_000001.bin holds token 65535.*VOCAB_SIZE=260"):
        for step in range(60):
            loader.batches(step)
    for tokens, message in (([260], "x_val_000000.bin holds token 260.*VOCAB_SIZE=260"), ([70], f"{tmp_path}: no validation row has text; prepare more")):
        write_shard(tmp_path / "x_val_000000.bin", [1] * 40 + tokens)  # in all of the validation text, but not in its row of 32
        with pytest.raises(ValueError, match=message):
            train_gpt.Validation(config, one_process())


@pytest.mark.parametrize("length, stride, world_size, micro", [
    (32, 32, 1, 160), (32, 0, 3, 32), (32, 0, 3, 4096), (32, 8, 1, 160), (64, 24, 2, 160), (48, 1, 1, 160), (200, 7, 1, 400),
    (32, 50, 1, 160)])
def test_every_token_is_scored_once_with_the_longest_context(tmp_path, length, stride, world_size, micro):
    """In forward passes of one shape, whose parts the ranks share."""
    config = tiny_config(grad_accum_steps=1, micro_batch_tokens=micro, val_batch_size=8192, train_seq_len=length,
                         data_path=str(tmp_path))
    model = train_gpt.GPT(config)
    for p in model.parameters():  # as drawn, all tokens are as likely
        torch.nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(1))
    tokens = torch.randint(0, 260, (256,), generator=torch.Generator().manual_seed(2))
    write_shard(tmp_path / "tiny_val_000000.bin", tokens)
    count = 255 // length * length  # whole rows
    total, scored = 0.0, 0
    for stop in (*range(length, count, min(stride or length, length)), count):  # ends of windows
        window = tokens[stop - length:stop + 1]
        logits = model.logits(model.hidden(window[None, :-1]))[0]
        new = stop - scored
        total += F.cross_entropy(logits[-new:], window[-new:], reduction="sum").item()
        scored = stop
    called, parts = Mock(wraps=model), []
    for rank in range(world_size):
        ranks = types.SimpleNamespace(rank=rank, world_size=world_size, device=torch.device("cpu"), now_ms=iter([0.0, 250.0]).__next__, to_device=torch.from_numpy,
                                      sum=lambda nats: parts.append(nats.item()) or nats)
        validation = train_gpt.Validation(config, ranks)
        score = validation.score(called, stride)
    assert sum(parts) == pytest.approx(total, rel=1e-5) and score["eval_time_ms"] == 250
    assert len({call.args[0].shape for call in called.call_args_list}) == 1
    if world_size == 1:
        text_bytes = int((tokens[1:count + 1] >= 4).sum())  # special tokens have none
        assert score["val_loss"] == pytest.approx(total / count, rel=1e-5)
        assert score["val_bpb"] == pytest.approx(total / math.log(2) / text_bytes, rel=1e-5)
