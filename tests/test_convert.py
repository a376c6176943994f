"""Token files of other projects: each kind becomes shards that the trainer reads and whose bytes it can prove."""

import json
import pickle

import convert
import numpy as np
import pytest
import shards
import tokenization
import train_gpt
from conftest import write_shard
from test_bytes import byte_stream, check

TEXTS = ["the quick brown fox", "", " jumps over ", "the lazy dög\n" * 9, "a"]


def convert_to(monkeypatch, out, *arguments):
    monkeypatch.setattr("sys.argv", ["convert.py", *map(str, arguments), "--out", str(out)])
    convert.main()


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
    ("llm.c", []), ("npy", []), ("uint16", ["--headerless"]), ("BOS at the end", ["--headerless"]),
    ("uint32", ["--headerless", "--dtype", "uint32"]), ("int64", ["--headerless", "--dtype", "int64"])])
def test_tokens_of_every_format_are_kept_and_documents_start_with_bos(tmp_path, monkeypatch, kind, arguments):
    source, out = tmp_path / "source", tmp_path / "set"
    source.mkdir()
    write_tokens(source, kind, "train", TEXTS * 30)
    write_tokens(source, kind, "val", TEXTS)
    if "--dtype" in arguments:  # read as GPT-2's, it would have a "!" after each token, and no error
        with pytest.raises(SystemExit, match="train.bin has a 0 after each id: .* choose another --dtype"):
            convert_to(monkeypatch, out, source, "--tokenizer", "byte260", "--headerless")
    monkeypatch.setattr(shards, "SHARD_TOKENS", 1000)
    convert_to(monkeypatch, out, source, "--tokenizer", "byte260", *arguments)
    validation, splits = check(out), json.loads((out / "manifest.json").read_text())["splits"]
    train, val = splits["train"], splits["val"]
    assert validation.tokens.tolist() == byte_stream(*TEXTS)
    tokens = np.concatenate(list(train_gpt.open_split(validation.config, "train").values()))
    assert tokens.tolist() == byte_stream(*TEXTS * 30)
    assert validation.bytes == val["bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert train["bytes"] == 30 * val["bytes"] and val["original_per_decoded_byte"] == 1.0
    assert (train["documents"], val["documents"]) == (150, 5) and len(train["shards"]) == 5


def test_a_vocabulary_of_nanogpt_with_characters(tmp_path, monkeypatch):
    chars = sorted(set("".join(TEXTS)))
    with (tmp_path / "meta.pkl").open("wb") as file:
        pickle.dump({"vocab_size": len(chars), "itos": dict(enumerate(chars)), "stoi": {}}, file)
    for split, text in (("train", "".join(TEXTS) * 200), ("val", "".join(TEXTS))):
        (tmp_path / f"{split}.bin").write_bytes(np.array([chars.index(c) for c in text], dtype="<u2").tobytes())
    out = tmp_path / "set"
    convert_to(monkeypatch, out, tmp_path / "train.bin", tmp_path / "val.bin", "--tokenizer", tmp_path / "meta.pkl",
               "--headerless")
    validation = check(out)
    assert json.loads((out / "manifest.json").read_text())["splits"]["val"]["bytes"] == len("".join(TEXTS).encode())
    assert tokenization.load_tokenizer(str(out / "tokenizer.json")).decode(validation.tokens).decode() == "".join(TEXTS)


def test_a_pickle_that_would_run_code_is_refused(tmp_path, monkeypatch):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("the pickle ran code",))

    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"itos": Bomb()}))
    (tmp_path / "val.bin").write_bytes(b"tokens" * 9)
    with pytest.raises(SystemExit, match="it asks for .*Fail"):
        convert_to(monkeypatch, tmp_path / "set", tmp_path / "val.bin", "--tokenizer", tmp_path / "meta.pkl", "--headerless")


@pytest.mark.parametrize("name, content, arguments, wanted", [
    ("val.bin", None, [], "val.bin' is neither a .bin or .npy file nor a folder of them"),
    ("interval_train.bin", [1, 5], [], "none of interval_train.bin has val or test in its name"),
    ("val.bin", b"text that is no tokens" * 100, [], "val.bin is not a token shard.*need --headerless"),
    ("val.bin", b"odd", ["--headerless"], "val.bin cannot be read: "),
    ("val.bin", [1, 260], [], "val.bin holds token 260, but"), ("val.bin", [1, 1], [], "decode to no text"),
    ("val.npy", np.array([{}]), [], "val.npy cannot be read: "), ("val.npy", np.zeros(9), [], "val.npy does not hold"),
    ("val.npy", np.array([1, -2, 3]), [], "val.npy holds token -2"),
])
def test_mistakes_are_explained(tmp_path, monkeypatch, name, content, arguments, wanted):
    path = tmp_path / name
    if isinstance(content, list):
        write_shard(path, content)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content, allow_pickle=True)
    with pytest.raises(SystemExit, match=f"^convert.py: .*{wanted}"):
        convert_to(monkeypatch, tmp_path / "set", path, "--tokenizer", "byte260", *arguments)
    assert {each.name for each in tmp_path.iterdir()} <= {name}  # nothing hidden is left behind
