"""Shards and the loader: damage is named, ranks share nothing, the stream is the contract's."""

import numpy as np
import pytest
import torch
import train_gpt
from conftest import one_process, tiny_config, write_shard


@pytest.mark.parametrize("change, wanted", [
    (dict(magic=7), "no token shard"), (dict(version=2), "no token shard"), (dict(count=9), "damaged"),
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
    with pytest.raises(ValueError, match="no token shard|damaged"):
        train_gpt.open_shard(path)


def test_a_shard_without_tokens(tmp_path):
    with pytest.raises(ValueError, match="0 tokens"):
        train_gpt.open_shard(write_shard(tmp_path / "x_train_000000.bin", []))


def test_ids_beyond_the_vocabulary_are_found_when_a_shard_is_opened(tmp_path):
    path = write_shard(tmp_path / "x_train_000000.bin", [1, 2, 259])
    assert train_gpt.open_shard(path, 260).tolist() == [1, 2, 259]
    with pytest.raises(ValueError, match="token 259.*VOCAB_SIZE=259"):
        train_gpt.open_shard(path, 259)


def test_missing_and_mixed_shards(tmp_path):
    config = tiny_config(data_path=str(tmp_path))
    with pytest.raises(ValueError, match="data/prepare.py sotu"):
        train_gpt.find_shards(config, "train")
    for name in ("a_val_000000.bin", "a_val_bytes_000000.bin", "a_train_000001.bin", "a_train_000000.bin"):
        write_shard(tmp_path / name, [1, 2])
    assert [p.name for p in train_gpt.find_shards(config, "val")] == ["a_val_000000.bin"]
    assert [p.name for p in train_gpt.find_shards(config, "train")] == ["a_train_000000.bin", "a_train_000001.bin"]
    write_shard(tmp_path / "b_train_000000.bin", [1, 2])
    with pytest.raises(ValueError, match="mixes shards of a, b"):
        train_gpt.find_shards(config, "train")


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
    """Each micro-step is (tokens + 1) * world consecutive tokens, a span for each rank in turn."""
    config, tokens = stream_config(tmp_path, [1500, 1700])
    endless, position = np.concatenate([tokens] * 3), 0
    config = train_gpt.replace(config, grad_accum_steps=4)
    ranks = [train_gpt.Ranks(rank, 2, torch.device("cpu")) for rank in (0, 1)]
    loaders = [train_gpt.TokenLoader(config, r) for r in ranks]
    for _ in range(9):
        for loader in loaders:
            x, y = loader.next_batch()
            span = endless[position:position + 129]  # 1024 tokens a step / (2 ranks * 4 micro-steps) + 1
            assert x.shape == y.shape == (4, 32) and x.dtype == torch.int64
            assert x.flatten().tolist() == span[:-1].tolist() and y.flatten().tolist() == span[1:].tolist()
            position += 129
    assert loaders[0].position == loaders[1].position == position


def test_a_validation_split_shorter_than_a_row(tmp_path):
    write_shard(tmp_path / "x_val_000000.bin", [1] * 32)
    with pytest.raises(ValueError, match="32 validation tokens.*TRAIN_SEQ_LEN=32"):
        train_gpt.load_validation(tiny_config(data_path=str(tmp_path)))


def test_validation_is_cut_to_whole_rows_but_its_bytes_are_checked_uncut(tmp_path):
    write_shard(tmp_path / "x_val_000000.bin", [1] + [70] * 40 + [1] + [70] * 30)
    kind, tokens, byte_count, raw = train_gpt.load_validation(tiny_config(data_path=str(tmp_path)))
    assert (kind, len(tokens), byte_count, raw) == ("byte", 65, 63, None)  # 64 targets, one of them BOS
