"""Token files of other projects: each kind becomes shards that the trainer reads and whose bytes it can prove."""

import json
import os
import resource

import convert
import numpy as np
import pytest
import shards
import train_gpt
from conftest import run_script, write_shard
from test_bytes import byte_stream, check

TEXTS = ["the quick brown fox", "", " jumps over ", "the lazy dög\n" * 9, "a"]


def write_tokens(folder, kind, split, texts):
    """A split's file, or two of them, in another project's format."""
    tokens = np.array(byte_stream(*texts))
    if kind == "llm.c":  # the last split in a name counts
        write_shard(folder / f"my_val_set_{split}_000000.bin", tokens[:33])
        write_shard(folder / f"my_val_set_{split}_000001.bin", tokens[33:])
    elif kind == "npy":
        np.save(folder / f"edu_{split}_000000.npy", tokens)
    elif kind == "BOS at the end":
        for number, part in enumerate(np.split(np.roll(tokens, -1), [20])):
            (folder / f"{split}_{number}.bin").write_bytes(part.astype("<u2").tobytes())
    else:
        (folder / f"{split}.bin").write_bytes(tokens.astype(kind).tobytes())


@pytest.mark.parametrize("kind, arguments", [
    ("llm.c", []), ("npy", []), ("uint16", ["--dtype", "uint16"]), ("BOS at the end", ["--dtype", "uint16"]),
    ("uint32", ["--dtype", "uint32"]), ("int64", ["--dtype", "int64"])])
def test_tokens_of_every_format_are_kept_and_documents_start_with_bos(tmp_path, monkeypatch, kind, arguments):
    source, out = tmp_path / "source", tmp_path / "set"
    source.mkdir()
    write_tokens(source, kind, "train", TEXTS * 30)
    write_tokens(source, kind, "val", TEXTS)
    if kind in ("uint32", "int64"):  # read as GPT-2's, it would have a "!" after each token, and no error
        with pytest.raises(SystemExit, match="train.bin has a 0 after each id: .* choose another --dtype"):
            run_script(monkeypatch, convert, source, "--tokenizer", "byte260", "--dtype", "uint16", "--out", out)
    monkeypatch.setattr(shards, "SHARD_TOKENS", 1000)
    run_script(monkeypatch, convert, source, "--tokenizer", "byte260", *arguments, "--out", out)
    validation, splits = check(out), json.loads((out / "manifest.json").read_text())["splits"]
    train, val = splits["train"], splits["val"]
    assert validation.tokens.tolist() == byte_stream(*TEXTS)
    tokens = np.concatenate([train_gpt.read_shard(path, 1 << 16) for path in train_gpt.open_split(validation.config, "train")])
    assert tokens.tolist() == byte_stream(*TEXTS * 30)
    assert validation.bytes == val["bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert train["bytes"] == 30 * val["bytes"] and val["original_per_decoded_byte"] == 1.0
    assert (train["documents"], val["documents"]) == (150, 5) and len(train["shards"]) == 5


def test_more_files_than_can_be_open(tmp_path, monkeypatch):
    for number in range(60):
        write_shard(tmp_path / f"x_{'train' if number else 'val'}_{number:06d}.bin", byte_stream("text"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 30, limits[1]))
    try:
        run_script(monkeypatch, convert, tmp_path, "--tokenizer", "byte260", "--out", tmp_path / "set")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert json.loads((tmp_path / "set" / "manifest.json").read_text())["splits"]["train"]["documents"] == 59


@pytest.mark.parametrize("train, val", [
    (["train_0.npy", "interval.bin", "my_val_train.npy"], ["val.npy", "val1.npy", "x_VAL_0.NPY", "dev-2.bin", "valset.npy", "my validation(3).bin"]),
    (["train/0.npy", "other/1.npy"], ["val/0.npy", "Test/0.npy"]), (["test/a.npy"], ["test/val.npy"])])
def test_names_say_which_files_are_for_validation(tmp_path, monkeypatch, train, val):
    monkeypatch.chdir(tmp_path)
    for name in train + val:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        (tmp_path / name).with_name("._val.bin").touch()  # Macs put such files on other disks
    splits = convert.find_files([*sorted({name.rpartition("/")[0] or "." for name in train + val}), train[0], val[0]])
    assert [sorted(map(str, splits[split])) for split in ("train", "val")] == [sorted(train), sorted(val)]


def test_training_on_a_copy_of_the_validation_file_is_warned_of(tmp_path, monkeypatch, capsys):
    for text, wanted in (("text", 1), ("test", 0)):
        for name in ("val.bin", "train_1.bin", "train_2.bin"):
            write_shard(tmp_path / name, byte_stream("text" if name == "val.bin" else text))
        run_script(monkeypatch, convert, tmp_path, "--tokenizer", "byte260", "--out", tmp_path / f"set{wanted}")
        assert capsys.readouterr().out.count("train_1.bin and ") == wanted


@pytest.mark.parametrize("name, content, arguments, wanted", [
    ("val.bin", None, [], "val.bin' is neither a .bin or .npy file nor a folder of them"),
    ("interval_train.bin", [1, 5], [], "none of interval_train.bin has val or test in its name"),
    ("val.bin", b"text that is no tokens" * 100, [], "val.bin is not a token shard.*need --dtype"),
    ("val.bin", b"odd", ["--dtype", "uint16"], "val.bin cannot be read: "),
    ("val.bin", [1, 5], ["--dtype", "uint16"], "val.bin has a header: leave out"),
    ("val.bin", b"version https://git-lfs.github.com/spec/v1\n", ["--dtype", "uint16"], "val.bin is a placeholder of Git LFS .*: fetch"),
    ("val.bin", [1, 260], [], "val.bin holds tokens 1 to 260, but"), ("val.bin", [1, 1], [], "decode to no text"),
    ("val.npy", np.array([{}]), [], "val.npy cannot be read: "), ("val.npy", np.zeros(9), [], "val.npy does not hold"),
    ("val.npy", np.array([1, -2, 3]), [], "val.npy holds tokens -2 to 3")])
def test_mistakes_are_explained(tmp_path, monkeypatch, name, content, arguments, wanted):
    path = tmp_path / name
    if isinstance(content, list):
        write_shard(path, content)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content, allow_pickle=True)
    with pytest.raises(SystemExit, match=f"^convert.py: .*{wanted}"):
        run_script(monkeypatch, convert, path, "--tokenizer", "byte260", *arguments, "--out", tmp_path / "set")
    assert {each.name for each in tmp_path.iterdir()} <= {name}  # nothing hidden is left behind
