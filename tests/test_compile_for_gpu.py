"""The training step as Inductor writes it for an H100: one graph, with the kernels and bytes that are committed."""

import json

import pytest
from conftest import REPOSITORY, run_trainer
import compile_for_gpu

COMMITTED = json.loads((REPOSITORY / "tests" / "kernels.json").read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.skipif(bool(compile_for_gpu.missing()), reason=compile_for_gpu.missing())
@pytest.mark.parametrize("case", compile_for_gpu.CASES)
def test_kernels_and_bytes_are_those_that_are_committed(case):
    """If a change of the counts is intended: compile_for_gpu.py > tests/kernels.json."""
    done = run_trainer(REPOSITORY, case, script=compile_for_gpu.__file__)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {case: COMMITTED[case]}
