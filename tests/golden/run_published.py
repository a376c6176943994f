"""Run the published train_gpt.py on the CPU in float32, and keep what tests/test_golden.py compares.

    python tests/golden/run_published.py FOLDER/parameter-golf/train_gpt.py

Only its surroundings are replaced: torch.device, torch.cuda, torch.compile, autocast, bfloat16() of a
module, nvidia-smi, and the constant below which tensors stay floats, since this model is tiny.
"""

import io
import os
import re
import sys
import tempfile
import zlib
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import torch

HERE = Path(__file__).resolve().parent


class OnTheCPU(ModuleType):
    """PyTorch without a GPU."""
    cuda = Mock(is_available=lambda: True, max_memory_allocated=lambda: 0,
                max_memory_reserved=lambda: 0)

    def __getattr__(self, name: str):
        return getattr(torch, name)

    @staticmethod
    def device(*_):
        return torch.device("cpu")

    @staticmethod
    def compile(function, **_):
        return function

    @staticmethod
    def autocast(**_):
        return nullcontext()


def main():
    script = Path(sys.argv[1]).resolve()
    settings = dict(line.split("=", 1) for line in (HERE / "settings.env").read_text().split())
    keep = int(settings.pop("INT8_KEEP_FLOAT_MAX_NUMEL"))
    os.environ.update(settings, DATA_PATH=str(HERE / "fineweb"), RUN_ID="golden",
                      TOKENIZER_PATH=str(HERE / "fineweb" / "tokenizer.model"))
    torch.nn.Module.bfloat16 = lambda module: module
    published = {"__name__": "published", "__file__": str(script)}
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        exec(compile(script.read_text(encoding="utf-8"), script.name, "exec"), published)
        published["torch"] = OnTheCPU("torch")
        published["INT8_KEEP_FLOAT_MAX_NUMEL"] = keep
        published["subprocess"] = Mock(run=lambda *_, **__: Mock(stdout=""))
        make_model = published["GPT"]

        def make_and_keep(**shape):
            model = make_model(**shape)
            data = io.BytesIO()
            torch.save(dict(model.state_dict()), data)
            (HERE / "initial_weights.ptz").write_bytes(zlib.compress(data.getvalue(), 9))
            return model

        published["GPT"] = make_and_keep
        published["main"]()
        log = Path("logs", "golden.txt").read_text(encoding="utf-8")
        lines = re.findall(r"^(?:model_params|step:\d+/\d+ (?:train|val)_loss|Serialized|final).*", log, re.M)
        (HERE / "published.log").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (HERE / "published.int8.ptz").write_bytes(Path("final_model.int8.ptz").read_bytes())


if __name__ == "__main__":
    main()
