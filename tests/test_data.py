"""Shards and the loader: damage is named, ranks share nothing, the stream is the contract's."""

import json

import numpy as np
import pytest
import torch
import train_gpt
from conftest import one_process, split_batch, tiny_config, whole_batch, write_shard


@pytest.mark.parametrize("change, wanted", [
    (dict(magic=7), "not a token shard"), (dict(version=2), "not a token shard"), (dict(count=9), "damaged"),
    (dict(count=11), "damaged"), (dict(count=0), "damaged"), (dict(count=-10), "damaged"),
])
def test_wrong_headers(tmp_path, change, wanted):
    path = write_shard(tmp_path / "x_train_000000.bin", range(10), **change)
    with pytest.raises(ValueError, match=wanted) as error:
        train_gpt.open_shard(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("size", [0, 3, 8, 1023, 1024, 1030, 1043, 1045])
def test_truncated_and_over_long_shards(tmp_path, size):
    path = write_shard(tmp_path / "x_train_000000.bin", range(10))
    path.write_bytes((path.read_bytes() + b"\0")[:size])
    with pytest.raises(ValueError, match="not a token shard|damaged"):
        train_gpt.open_shard(path)


def test_a_shard_without_tokens(tmp_path):
    with pytest.raises(ValueError, match="damaged"):
        train_gpt.open_shard(write_shard(tmp_path / "x_train_000000.bin", []))


def test_ids_beyond_the_vocabulary_are_found_in_the_validation_split(tmp_path):
    write_shard(tmp_path / "x_val_000000.bin", [1] * 40 + [259])
    assert len(train_gpt.Validation(tiny_config(data_path=str(tmp_path)), one_process()).tokens) == 33
    write_shard(tmp_path / "x_val_000000.bin", [1] * 40 + [260])
    with pytest.raises(ValueError, match="x_val_000000.bin holds token 260.*VOCAB_SIZE=260"):
        train_gpt.Validation(tiny_config(data_path=str(tmp_path)), one_process())


def test_missing_and_mixed_shards(tmp_path):
    config = tiny_config(data_path=str(tmp_path))
    with pytest.raises(ValueError, match="data/prepare.py sotu"):
        train_gpt.open_split(config, "train")
    for name in ("a_val_000000.bin", "a_val_bytes_000000.bin", "a_train_000001.bin", "a_train_000000.bin"):
        write_shard(tmp_path / name, [1, 2] * 40)
    assert [p.name for p in train_gpt.open_split(config, "val")] == ["a_val_000000.bin"]
    assert [p.name for p in train_gpt.open_split(config, "train")] == ["a_train_000000.bin", "a_train_000001.bin"]
    write_shard(tmp_path / "b_train_000000.bin", [1, 2])
    with pytest.raises(ValueError, match="mixes shards of a, b"):
        train_gpt.open_split(config, "train")


def stream_config(tmp_path, lengths):
    tokens = np.arange(sum(lengths)) % 260
    for i, part in enumerate(np.split(tokens, np.cumsum(lengths)[:-1])):
        write_shard(tmp_path / f"s_train_{i:06d}.bin", part)
    return tiny_config(data_path=str(tmp_path)), tokens


def test_the_stream_crosses_shards_and_wraps_around(tmp_path):
    config, tokens = stream_config(tmp_path, [300, 7, 500])
    loader = train_gpt.TokenLoader(config, one_process())
    endless = np.concatenate([tokens] * 4)
    for start, count in ((0, 5), (299, 2), (290, 600), (806, 3), (800, 1700), (807 * 3, 10)):
        assert (loader.read(start, count) == endless[start % 807:][:count]).all()


def test_ranks_read_disjoint_spans_of_what_one_rank_would_read(tmp_path):
    """A step is (tokens + 1) * world consecutive tokens for each accumulation, a span for each rank in turn."""
    config, tokens = stream_config(tmp_path, [1500, 1700])
    endless, position = np.concatenate([tokens] * 3), 0
    config = train_gpt.replace(config, grad_accum_steps=4)
    ranks = [train_gpt.Ranks(rank, 2, torch.device("cpu")) for rank in (0, 1)]
    loaders = [train_gpt.TokenLoader(config, r) for r in ranks]
    for step in range(3):
        batches = [whole_batch(loader, step) for loader in loaders]
        assert all(t.shape == (16, 32) and t.dtype == torch.int64 for batch in batches for t in batch)
        for i in range(4):
            for x, y in batches:
                span = endless[position:position + 129]  # 1024 tokens a step / (2 ranks * 4 accumulations) + 1
                assert x[4 * i:4 * i + 4].flatten().tolist() == span[:-1].tolist()
                assert y[4 * i:4 * i + 4].flatten().tolist() == span[1:].tolist()
                position += 129


def loaders(config, world_size):
    return [train_gpt.TokenLoader(config, train_gpt.Ranks(rank, world_size, torch.device("cpu")))
            for rank in range(world_size)]


def shuffled_config(tmp_path, world_size=1, **changes):
    config, tokens = stream_config(tmp_path, [1500, 40, 2000, 777])
    accum, _ = split_batch(train_gpt.replace(config, grad_accum_steps=0), world_size)
    return train_gpt.replace(config, loader="shuffled", grad_accum_steps=accum, **changes), tokens


def steps(config, world_size, count):
    """The rows of inputs and targets of `count` steps: for each step the sorted rows of all ranks."""
    ranks = loaders(config, world_size)
    return [sorted(pair for loader in ranks for pair in zip(*(part.tolist() for part in whole_batch(loader, step))))
            for step in range(count)]


def test_an_epoch_of_the_shuffled_stream_has_every_row_once_in_another_order(tmp_path):
    config, tokens = shuffled_config(tmp_path)
    loader, epoch = loaders(config, 1)[0], (len(tokens) - 1) // 32
    wanted = [tokens[32 * i:32 * i + 33].tolist() for i in range(epoch)]
    rows = []
    while len(rows) < 2 * epoch:
        x, y = whole_batch(loader, len(rows) // 32)
        assert x.shape == y.shape == (32, 32) and x.is_contiguous() and y.is_contiguous()
        assert torch.equal(x[:, 1:], y[:, :-1])
        rows += [[*a, b[-1]] for a, b in zip(x.tolist(), y.tolist())]
    first, second = rows[:epoch], rows[epoch:2 * epoch]
    assert sorted(first) == sorted(second) == sorted(wanted)
    assert first != second and first != wanted
    other = whole_batch(loaders(train_gpt.replace(config, seed=7), 1)[0], 0)[0]
    assert other[:, 0].tolist() != [row[0] for row in first[:32]]


def test_the_shuffled_stream_is_the_same_for_any_world_size(tmp_path):
    config, _ = shuffled_config(tmp_path)
    wanted = steps(config, 1, 7)
    assert all(len(step) == 32 for step in wanted)
    for world_size in (2, 4, 8, 16, 32):
        config, _ = shuffled_config(tmp_path, world_size)
        assert steps(config, world_size, 7) == wanted


@pytest.mark.parametrize("loader", ["sequential", "shuffled"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_overfitting_reads_the_first_batch_again_and_again(tmp_path, loader, world_size):
    config, _ = shuffled_config(tmp_path, world_size)
    config = train_gpt.replace(config, loader=loader)
    ordinary = steps(config, world_size, 2)
    config = train_gpt.replace(config, overfit=True)
    again = steps(config, world_size, 4)
    assert again == [ordinary[0]] * 4 and ordinary[0] != ordinary[1]


@pytest.mark.parametrize("loader", ["sequential", "shuffled"])
def test_a_batch_follows_from_the_number_of_its_step(tmp_path, loader):
    """In any order, after more than an epoch, from a loader that has read nothing before."""
    config, _ = shuffled_config(tmp_path)
    config = train_gpt.replace(config, loader=loader)
    in_order = loaders(config, 1)[0]
    batches = [whole_batch(in_order, step) for step in range(60)]
    other = loaders(config, 1)[0]
    for step in (40, 3, 59, 4):
        x, y = whole_batch(other, step)
        assert torch.equal(x, batches[step][0]) and torch.equal(y, batches[step][1])


@pytest.mark.parametrize("loader", ["sequential", "shuffled"])
def test_the_start_of_a_piece_is_where_its_first_token_lies(tmp_path, loader):
    config, tokens = shuffled_config(tmp_path)
    stream = loaders(train_gpt.replace(config, loader=loader), 1)[0]
    for step in range(12):
        assert tokens[stream.start(step * stream.pieces)] == whole_batch(stream, step)[0][0, 0].item()


@pytest.mark.parametrize("loader, wanted", [("sequential", 8 * 129), ("shuffled", 32 * 32)])
def test_tokens_of_a_step(tmp_path, loader, wanted):
    config, tokens = shuffled_config(tmp_path)
    stream = loaders(train_gpt.replace(config, loader=loader), 1)[0]
    assert stream.pieces * stream.stride == wanted and stream.tokens == len(tokens) == 4317


def test_ids_beyond_the_vocabulary_are_found_where_they_are_read(tmp_path):
    config, tokens = stream_config(tmp_path, [3000, 3000])
    write_shard(tmp_path / "s_train_000001.bin", [*tokens[:2999], 65535])
    loader = loaders(config, 1)[0]
    with pytest.raises(ValueError, match="s_train_000001.bin holds token 65535.*VOCAB_SIZE=260"):
        for step in range(60):
            loader.batches(step)
    write_shard(tmp_path / "s_train_000000.bin", [*tokens[:50], 260])
    with pytest.raises(ValueError, match="s_train_000000.bin holds token 260"):  # before training
        loaders(config, 1)


def test_large_ids_reach_the_device_as_they_are(tmp_path):
    write_shard(tmp_path / "x_train_000000.bin", [0, 1, 32767, 32768, 65534] * 300)
    config = tiny_config(data_path=str(tmp_path), vocab_size=65535)
    x, y = whole_batch(train_gpt.TokenLoader(config, one_process()), 0)
    assert x.dtype == torch.int64 and x.flatten()[:5].tolist() == [0, 1, 32767, 32768, 65534]
    assert y.flatten()[:4].tolist() == [1, 32767, 32768, 65534]


def test_a_validation_split_shorter_than_a_row(tmp_path):
    write_shard(tmp_path / "x_val_000000.bin", [1] * 32)
    with pytest.raises(ValueError, match="32 tokens in .*_val_.*TRAIN_SEQ_LEN=32"):
        train_gpt.Validation(tiny_config(data_path=str(tmp_path)), one_process())


def test_validation_is_cut_to_whole_rows_but_its_bytes_are_checked_uncut(tmp_path):
    write_shard(tmp_path / "x_val_000000.bin", [1] + [70] * 40 + [1] + [70] * 30)
    validation = train_gpt.Validation(tiny_config(data_path=str(tmp_path)), one_process())
    assert (validation.tokenizer_kind, len(validation.tokens), validation.bytes) == ("byte", 65, 63)  # a target is BOS
    assert validation.data_sha256 == {}  # there is no manifest


def mutate(random, content: bytes) -> bytes:
    """One random change of a shard: in its header, its length, its body, or anywhere."""
    data, kind = bytearray(content), random.integers(6)
    if kind == 0:  # a field of the header
        at = 4 * int(random.integers(4))
        data[at:at + 4] = int(random.choice([0, 1, -1, 2**31 - 1, -2**31, 512, int(random.integers(-2**31, 2**31))])
                              ).to_bytes(4, "little", signed=True)
    elif kind == 1:  # cut
        del data[int(random.integers(len(data))):]
    elif kind == 2:  # longer
        data += random.bytes(int(random.integers(1, 3000)))
    elif kind == 3:  # bits of the body
        for at in random.integers(1024, len(data), int(random.integers(1, 20))):
            data[at] ^= 1 << int(random.integers(8))
    elif kind == 4:  # a part in another place
        start, stop = sorted(random.integers(0, len(data), 2).tolist())
        data = data[stop:] + data[start:stop] + data[:start]
    else:  # anything anywhere
        for at in random.integers(0, len(data), 3):
            data[at] = int(random.integers(256))
    return bytes(data)


def test_a_thousand_damaged_shards_are_errors_or_read_as_they_are(tmp_path):
    """Each ends in an error that names the file, or in the tokens and the byte count that the file really has."""
    random, outcomes = np.random.default_rng(11), {"error": 0, "read": 0, "same": 0}
    config = tiny_config(data_path=str(tmp_path), train_seq_len=8, train_batch_tokens=64)
    tokens = np.concatenate([[1, *(4 + random.integers(0, 256, int(random.integers(1, 60))))] for _ in range(40)])
    paths = {split: write_shard(tmp_path / f"f_{split}_000000.bin", tokens) for split in ("train", "val")}
    good = paths["val"].read_bytes()
    manifest = {"made_by": "data/prepare.py", "tokenizer": {"sha256": None, "changes_text": False}, "splits": {
        "val": {"tokens": len(tokens), "bytes": int((tokens >= 4).sum()), "decoded_bytes": int((tokens >= 4).sum())}}}
    for i in range(1000):
        damaged, split = mutate(random, good), ("train", "val")[i % 2]
        proven = bool(i % 4 < 2)  # with a manifest, or with nothing to compare the shard with
        if proven:
            (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        else:
            (tmp_path / "manifest.json").unlink(missing_ok=True)
        path = paths[split]
        path.unlink()  # the old file stays as it is where it is mapped
        path.write_bytes(damaged)
        held = np.frombuffer(damaged[1024:len(damaged) // 2 * 2], dtype="<u2")
        try:
            if split == "train":
                read = train_gpt.TokenLoader(config, one_process()).read(0, len(held))
            else:
                validation = train_gpt.Validation(config, one_process())
                read, charged = validation.tokens, validation.bytes
        except ValueError as error:
            assert str(path) in str(error) or proven and "manifest.json says" in str(error) or "too few" in str(error)
            outcomes["error"] += 1
        else:
            assert np.frombuffer(damaged[:12], "<i4").tolist() == [20240520, 1, len(held)]
            assert len(damaged) == 1024 + 2 * len(held) and held.max() < 260
            assert (read == held[:len(read)]).all()
            if split == "val":
                assert charged == (held[1:len(read)] >= 4).sum() and len(read) == (len(held) - 1) // 8 * 8 + 1
                assert not proven or (len(held), (held >= 4).sum()) == (len(tokens), (tokens >= 4).sum())
            outcomes["read" if damaged != good else "same"] += 1
        path.unlink()
        path.write_bytes(good)
    assert outcomes["error"] > 600 and outcomes["read"] > 50 and sum(outcomes.values()) == 1000, outcomes
