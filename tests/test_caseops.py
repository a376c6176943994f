"""Capital letters as operators: the text comes back, its bytes are all counted, and samples have capitals."""

import json
import random
import string
from types import SimpleNamespace

import numpy as np
import prepare
import pytest
import sample
import tokenization
import torch
import train_gpt
from conftest import REPOSITORY, run_script, tiny_config

FORMS = {"The quick": "\ue001the quick", "of The": "of\ue001 the", "NASA and I": "\ue002nasa and\ue001 i", "iPhone": "i\ue003phone",
         "a NASAs": "a \ue003n\ue003a\ue003s\ue003as", "3D_Print": "3\ue001d_\ue001print", "(Yes)": "(\ue001yes)",
         "ÉCOLE": "É\ue002cole", "no capitals": "no capitals", "": ""}


@pytest.fixture(scope="module")
def folded(tmp_path_factory):
    """A data set of this repository's text with --tokenizer caseops512."""
    out = tmp_path_factory.mktemp("folded") / "std"
    with pytest.MonkeyPatch.context() as patch:
        run_script(patch, prepare, REPOSITORY / "train_gpt.py", REPOSITORY / "tests", "--tokenizer", "caseops512",
                   "--val-docs", 2, "--out", out)
    return out


@pytest.mark.parametrize("text, wanted", FORMS.items())
def test_operators_stand_before_a_word_and_its_space(text, wanted):
    assert tokenization.fold_case(text) == wanted and tokenization.unfold_case(wanted) == text


def test_every_text_comes_back():
    """Web pages have private characters, too."""
    characters = string.ascii_letters * 2 + "   \n\t0.É_'ßİ\u2581" + 3 * "\ue001\ue002\ue003\ue004"
    chosen = random.Random(0)
    for _ in range(3000):
        text = "".join(chosen.choices(characters, k=chosen.randrange(30)))
        assert tokenization.unfold_case(tokenization.fold_case(text)) == text
    assert tokenization.unfold_case("x\ue001 \ue002\ue003") == "x "  # a model may write them anywhere


def test_all_bytes_of_the_original_text_are_counted(folded):
    """By the manifest, whose proof the trainer has made, and by the trainer's table."""
    val = json.loads((folded / "manifest.json").read_text())["splits"]["val"]
    assert val["bytes"] == val["decoded_bytes"] > 1000 and val["changed_documents"] == 0
    tokenizer = tokenization.load_tokenizer(str(folded / "tokenizer.model"))
    text = (REPOSITORY / "README.md").read_text() + "\ue001 our \ue002\ue003\ue004The"
    ids = tokenizer.encode([text], 1)[0]
    assert tokenizer.decode(ids).decode() == text and len(tokenizer.operators) == 3
    assert np.isin(ids, list(tokenizer.operators)).sum() > 100
    config = train_gpt.Config(tokenizer_path=str(folded / "tokenizer.model"), vocab_size=512)
    table = train_gpt.load_byte_table(config)[1]
    assert table[ids, 0].sum() == len(text.encode())
    assert not any(set(tokenizer.model.id_to_piece(i)) & set(string.ascii_uppercase) for i in range(4 + 3 + 256, 512))


@pytest.mark.parametrize("characters", ["\ue001", "\ue001\ue002\ue003"])
def test_in_another_tokenizer_the_operators_are_characters(tmp_path, monkeypatch, characters):
    """Of somebody's own text: they are not dropped, and no capital is folded."""
    text = f"A Text with Capitals and {characters} icons of a Font, {' '.join(characters)}\n"
    (tmp_path / "own.txt").write_text(text * 400)
    run_script(monkeypatch, prepare, tmp_path / "own.txt", "--tokenizer", "char", "--out", tmp_path / "own")  # has the trainer's check
    tokenizer = tokenization.load_tokenizer(str(tmp_path / "own" / "tokenizer.model"))
    ids = tokenizer.encode([text], 1)[0]
    assert not tokenizer.operators and tokenizer.decode(ids).decode() == text and "C" in tokenizer.model.id_to_piece(ids.tolist())


def test_samples_have_capitals(folded, monkeypatch, capsys):
    tokenizer = tokenization.load_tokenizer(str(folded / "tokenizer.model"))
    written = tokenizer.encode([" of The NASA, once More"], 1)[0].tolist()
    monkeypatch.setattr(sample, "generate", lambda *_: iter(written))
    sample.write_sample(train_gpt.GPT(tiny_config(vocab_size=512)), tokenizer, "The end", SimpleNamespace(), torch.Generator())
    assert capsys.readouterr().out == "The end of The NASA, once More\n\n"
