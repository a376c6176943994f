"""tools/lesson.ipynb: as it is committed, with its pictures, and every cell executed on a tiny text."""

import json
import random
import re

import pytest
from conftest import REPOSITORY, run_script

import prepare

LESSON = REPOSITORY / "tools" / "lesson.ipynb"
PICTURES = 6  # beside the diagram


def pictures(notebook) -> list[str]:
    """The kinds of pictures in the outputs of a notebook, in order."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    return [kind for output in outputs for kind in output.get("data", {}) if kind.startswith("image/")]


def test_the_lesson_is_committed_with_its_pictures_and_without_errors():
    assert LESSON.stat().st_size <= 400_000
    notebook = json.loads(LESSON.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "it was not executed from the top"
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert not re.search(r'"/(home|root|tmp|work)/', json.dumps(outputs)), "a path of a machine"
    assert pictures(notebook) == ["image/svg+xml", *["image/png"] * PICTURES]


@pytest.mark.slow
def test_every_cell_of_the_lesson_runs_on_another_text(tmp_path, monkeypatch):
    """In a folder of its own, with links to the scripts, so that the run leaves nothing in the checkout."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    for name in ("train_gpt.py", "data", "tools", "records"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    words = random.Random(0).choices("the senate of our union met in a house and spoke".split(), k=30_000)
    (tmp_path / "text.txt").write_text(" ".join(words), encoding="utf-8")
    run_script(monkeypatch, prepare, tmp_path / "text.txt", "--tokenizer", "byte260", "--out", tmp_path / "words")
    budget = {"ITERATIONS": 8, "MAX_WALLCLOCK_SECONDS": 0, "COMPILE": 0, "OMP_NUM_THREADS": 1}  # steps, however slow they are
    for name, text in {"DATA_PATH": tmp_path / "words", **budget}.items():
        monkeypatch.setenv(name, str(text))
    notebook = nbformat.read(LESSON, 4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, coalesce_streams=True, resources=resources).execute()
    assert pictures(notebook) == ["image/svg+xml", *["image/png"] * PICTURES]
    said = "".join(output.get("text", "") for cell in notebook["cells"] for output in cell.get("outputs", []))
    by_hand, by_log = map(float, re.search(r"by the formula: (\S+), by the log: (\S+)", said).groups())
    assert by_hand == pytest.approx(by_log, abs=2e-4) and by_log < 5
    largest = float(re.search(r"after 5 rounds, singular values from (\S+)", said)[1])
    assert 0.7 < largest < 1.3
    assert (tmp_path / "logs" / "lesson" / "final_model.pt").is_file()
