"""data/download.py against a small hub: a dictionary in place of the client's two functions, called as the client allows."""

import os
from fnmatch import fnmatch
from unittest.mock import create_autospec

import pytest
from conftest import run_script

huggingface_hub = pytest.importorskip("huggingface_hub")
import download  # noqa: E402

CHALLENGE, SHARDS = "willdepueoai/parameter-golf", "datasets/datasets/fineweb10B_sp1024/fineweb_"
MODEL = "datasets/tokenizers/fineweb_1024_bpe.model"
FILES = {CHALLENGE: [*(f"{SHARDS}{name}.bin" for name in ("val_000000", "val_000001", "train_000000", "train_000001",
                                                                   "train_000002")), MODEL, "datasets/manifest.json"],
         "kevclark/parameter-golf": [name.replace("1024", "8192") for name in (f"{SHARDS}val_000000.bin", MODEL)],
         "kjj0/fineweb10B-gpt2": ["fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"]}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the script; returns what it prints, or raises SystemExit with its message."""
    def snapshot_download(repo_id, *, repo_type, allow_patterns):
        for name in FILES[repo_id]:
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                (tmp_path / "cache" / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / "cache" / name).write_text(f"{repo_id} {name}")
        return str(tmp_path / "cache")

    for name, function in (("list_repo_files", lambda repo_id, **_: FILES[repo_id]), ("snapshot_download", snapshot_download)):
        monkeypatch.setattr(huggingface_hub, name, create_autospec(getattr(huggingface_hub, name), side_effect=function))
    monkeypatch.setattr(download, "DATA", tmp_path / "data")

    def run(*arguments, variant="sp1024"):
        run_script(monkeypatch, download, "--variant", variant, *arguments)
        return capsys.readouterr().out
    return run


def contents(folder):
    """All files below a folder, hidden ones too."""
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("has_links", [True, False])
def test_files_are_where_the_trainer_looks_and_a_second_run_adds_to_them(run, tmp_path, monkeypatch, has_links):
    if not has_links:
        monkeypatch.setattr(download.os, "link", lambda *_: os.open("another disk", os.O_RDONLY))
    data = tmp_path / "data"
    names = ["val_000000", "val_000001"]
    for count in (1, 2):
        names.append(f"train_{count - 1:06d}")
        out = run("--train-shards", count)
        wanted = {f"datasets/fineweb10B_sp1024/fineweb_{name}.bin": f"{CHALLENGE} {SHARDS}{name}.bin"
                  for name in names}
        wanted["tokenizers/fineweb_1024_bpe.model"] = f"{CHALLENGE} {MODEL}"
        assert contents(data) == wanted
    folder, model = data / "datasets/fineweb10B_sp1024", data / "tokenizers/fineweb_1024_bpe.model"
    assert f" DATA_PATH={os.path.relpath(folder)} TOKENIZER_PATH={os.path.relpath(model)} VOCAB_SIZE=1024\n" in out
    cached = tmp_path / "cache" / f"{SHARDS}val_000000.bin"
    assert cached.samefile(folder / cached.name) == has_links


def test_files_of_another_data_set_are_an_error_and_stay(run, tmp_path):
    """train_gpt.py would mix them with this one. Other variants have repositories of their own."""
    assert "fineweb_8192_bpe.model VOCAB_SIZE=8192\n" in run("--train-shards", 0, "--out", tmp_path / "larger", variant="sp8192")
    assert all(text.startswith("kevclark/") for text in contents(tmp_path / "larger").values())
    out = tmp_path / "out"
    assert run("--train-shards", 1, "--out", out, variant="gpt2").endswith("=gpt2 VOCAB_SIZE=50257\n")
    before = contents(out)
    assert before.keys() == {"fineweb_val_000000.bin", "fineweb_train_000001.bin"}
    with pytest.raises(SystemExit, match="fineweb_val_000000.bin is not the published file"):
        run("--train-shards", 1, "--out", out)
    assert contents(out) == before


@pytest.mark.parametrize("variant, count", [("sp1024", 4), ("sp4096", 0)])
def test_shards_that_are_not_there_are_an_error(run, variant, count):
    with pytest.raises(SystemExit, match="^download.py: .*has [30] training and [20] validation shards of sp"):
        run("--train-shards", count, variant=variant)


@pytest.mark.parametrize("count", ["-1", "all"])
def test_numbers_of_shards_that_cannot_be_are_refused_before_the_hub_is_asked(run, capsys, count):
    with pytest.raises(SystemExit, match="^2$"):
        run(f"--train-shards={count}")
    assert f"argument --train-shards: '{count}' is not a number of shards" in capsys.readouterr().err
    assert not huggingface_hub.list_repo_files.called


@pytest.mark.parametrize("error, status", [(KeyboardInterrupt(), "^130$"), (OSError("no\nnetwork"), "^download.py: OSError: no net")])
def test_ctrl_c_and_errors_of_the_client(run, error, status):
    huggingface_hub.list_repo_files.side_effect = error
    with pytest.raises(SystemExit, match=status):
        run()
