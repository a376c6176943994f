"""A GPU that is not there. train_gpt.py runs on it unchanged, with true values, and what CUDA, MPS and NCCL refuse is refused.

    PRETEND='cuda 9.0 80' python tests/pretended.py NAME=value ...    kind, compute capability, GiB; also under torchrun

Whatever a program does with tensors, also inside autograd, DDP and fused optimizers, PyTorch's dispatcher turns into basic
operations such as aten::mul. A `TorchDispatchMode` is handed each of them, with its arguments, before it happens. Here:
- `OnCard` is a tensor that says it is on cuda:0 or mps. It has no memory; its values are in `content`, a tensor of the CPU.
- `Card` is the mode: it refuses an operation with the GPU's own message, or does it on the contents and wraps the results.
- `Card.patches` answers the questions about hardware that are no operations, such as torch.cuda.is_available().

It counts how often the host waits for the device, and the graphs that torch.compile would make; nothing is compiled. Gloo moves
what NCCL would. It cannot see kernels and their rounding, memory, time, races between streams, or NCCL itself.
"""
import json
import os
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend  # of PyTorch 2.10

_setup_privateuseone_for_python_backend("pretended")  # tensors without memory may be on a device, in the whole process
COPIES = {"aten::_to_copy", "aten::copy_"}  # the ways between host and device


class OnCard(torch.Tensor):
    """A tensor of the GPU. PyTorch's C++ code takes it for one on a device that a package added."""
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, content, device):
        if device.type == "mps" and content.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, content.size(), strides=content.stride(), storage_offset=content.storage_offset(), dtype=content.dtype,
            device=torch.device("pretended", device.index))
        tensor.content, tensor.place = content, device
        return tensor

    device = property(lambda tensor: tensor.place)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return Card.current.__torch_dispatch__(func, types, args, kwargs)  # an operation that did not pass the mode

    def __reduce_ex__(self, protocol):  # for torch.save
        return self.content.__reduce_ex__(protocol)

    def tolist(self):
        return self.cpu().tolist()


class Card(TorchDispatchMode):
    """The GPU of this process, as long as it is entered."""
    def __init__(self, kind, capability, gib):
        super().__init__()
        Card.current = self
        self.kind, self.capability, self.memory, self.count = kind, capability, gib << 30, 8
        self.index = 0  # of the current device
        self.waits = 0  # of the host for the device
        self.graphs = set()  # that torch.compile would make
        self.products = set()  # the types of matrices that were multiplied

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Do one operation. Raises what the GPU, or NCCL, would raise."""
        name, kwargs = func._schema.name, dict(kwargs or {})
        pins = kwargs.pop("pin_memory", False)
        flat = tree_leaves((args, kwargs))
        on_card = [t for t in flat if isinstance(t, OnCard)]
        on_host = [t for t in flat if isinstance(t, torch.Tensor) and not isinstance(t, OnCard)]
        device = kwargs.get("device") or next((t.device for t in on_card), torch.device("cpu"))
        device = args[0].device if name == "aten::copy_" else device
        if device.type in (self.kind, "pretended"):
            device = torch.device(self.kind, self.index if device.index is None else device.index)
        if device.type != "cpu" and device.index >= self.count:
            raise RuntimeError("CUDA error: invalid device ordinal")
        if pins and device.type != "cpu":
            raise RuntimeError("Only dense CPU tensors can be pinned")
        if name not in COPIES:
            self.check(name, args, device, on_card, on_host)
        is_read = name == "aten::_local_scalar_dense" or (name in COPIES and device.type == "cpu")
        is_sent = name == "aten::_to_copy" and device.type != "cpu" and any(not hasattr(t, "pinned") for t in on_host)
        self.waits += is_sent or (is_read and bool(on_card))
        if "mm" in name and on_card:
            self.products.add(str(on_card[0].dtype))
        host_args, host_kwargs = tree_map_only(OnCard, lambda t: t.content, (args, kwargs))
        if host_kwargs.get("device"):
            host_kwargs["device"] = torch.device("cpu")
        out = func(*host_args, **host_kwargs)
        if device.type == "cpu":
            return out
        written = {id(t.content): t for t in on_card}  # an operation in place returns its argument
        out = tree_map_only(torch.Tensor, lambda t: written[id(t)] if id(t) in written else OnCard(t, device), out)
        return out if func.namespace == "c10d" else return_and_correct_aliasing(func, args, kwargs, out)

    def check(self, name, args, device, on_card, on_host):
        """Raises if tensors are not where they must be."""
        if name.startswith("c10d"):
            if on_host or any(t.device.index != self.index for t in on_card):
                raise RuntimeError(f"No backend type associated with a device other than {self.kind}:{self.index}")
            if not all(t.is_contiguous() for t in on_card):
                raise ValueError("Tensors must be contiguous")
        # Most operations may read a number on the CPU, but not write one.
        needs_all = name.startswith(("aten::_fused", "aten::_amp")) or (name.endswith("_") and not isinstance(args[0], OnCard))
        wrong = {str(t.device) for t in on_card if t.device != device}
        wrong |= {str(t.device) for t in on_host if on_card and (t.ndim or needs_all)}
        if wrong:
            raise RuntimeError(f"Expected all tensors to be on the same device, but {name} found {wrong} and {device}")

    def patches(self):
        """What replaces what, as (owner, name, value)."""
        plain_tensor, plain_to, plain_start = torch.tensor, torch.Tensor.to, torch.distributed.init_process_group
        plain_attention = torch.nn.functional.scaled_dot_product_attention

        def attention(q, k, v, **options):  # refuses what no enabled kernel can do, as PyTorch's sdp_utils.cpp
            enabled, width = torch.backends.cuda, q.size(3)
            is_ampere = self.capability >= (8, 0)
            is_half = q.dtype == torch.float16 or (q.dtype == torch.bfloat16 and is_ampere)
            flash = enabled.flash_sdp_enabled() and is_ampere and is_half and width <= 256
            cudnn = enabled.cudnn_sdp_enabled() and is_ampere and is_half and width <= 128 and width % 8 == 0
            efficient = enabled.mem_efficient_sdp_enabled() and (is_half or q.dtype == torch.float32) and width % 8 == 0
            efficient &= not options["enable_gqa"]
            if q.device.type == "cuda" and not (flash or cudnn or efficient or enabled.math_sdp_enabled()):
                raise RuntimeError("No available kernel. Aborting execution.")
            return plain_attention(q, k, v, **options)

        def pin(tensor):
            if isinstance(tensor, OnCard):
                raise RuntimeError("cannot pin 'torch.cuda.LongTensor' only dense CPU tensors can be pinned")
            pinned = tensor.clone()
            pinned.pinned = True
            return pinned

        def start(backend, device_id=None, **options):
            if backend != "nccl" or device_id != torch.device("cuda", self.index):
                raise ValueError(f"{backend} for {device_id} with a GPU")
            return plain_start("gloo", **options)

        def to(tensor, *args, **options):  # without an index, it would ask C++ for the current device
            args = [torch.device(self.kind, self.index) if str(arg) == self.kind else arg for arg in args]
            return plain_to(tensor, *args, **options)

        def note_graph(module, inputs):
            self.graphs.add((torch.is_grad_enabled(), *(t.shape for t in inputs)))

        is_cuda, properties = self.kind == "cuda", SimpleNamespace(major=self.capability[0], total_memory=self.memory)
        answers = {"is_available": is_cuda, "device_count": self.count * is_cuda, "get_device_capability": self.capability,
                   "get_device_properties": properties, "get_device_name": "pretended", "max_memory_allocated": 700 << 20, "max_memory_reserved": 900 << 20, "_lazy_init": None,
                   "is_current_stream_capturing": False}
        return [
            *((torch.cuda, name, Mock(return_value=value)) for name, value in answers.items()),
            (torch.cuda, "current_device", lambda: self.index), (torch.version, "cuda", "13.0" if is_cuda else None),
            (torch.cuda, "set_device", lambda index: setattr(self, "index", index)),
            (torch.backends.mps, "is_available", cache(lambda: not is_cuda)), (torch.backends.cudnn, "version", lambda: 91900),
            (torch.accelerator, "synchronize", lambda: setattr(self, "waits", self.waits + 1)),
            (torch.Tensor, "pin_memory", pin), (torch.Tensor, "is_pinned", lambda tensor: hasattr(tensor, "pinned")),
            (torch.nn.Module, "compile", lambda module, **_: module.register_forward_pre_hook(note_graph)),
            (torch.nn.functional, "scaled_dot_product_attention", attention),
            (torch.distributed, "init_process_group", start), (torch.Tensor, "to", to),
            (torch, "tensor", lambda data, device=None, **options: plain_tensor(data, **options).to(device))]  # for the mode


def main():
    """Run train_gpt.py; rank 0 writes what the card saw to pretended.json."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import train_gpt
    kind, capability, gib = os.environ["PRETEND"].split()
    card = Card(kind, tuple(map(int, capability.split("."))), int(gib))
    waits, plain_exit = {"train_step": [], "batches": []}, os._exit

    def count_waits(plain):
        def counted(*args):
            before = card.waits
            result = plain(*args)
            waits[plain.__name__].append(card.waits - before)
            return result
        return counted

    def end(status):
        if card.index == 0:
            report = {"waits": waits, "graphs": len(card.graphs), "products": sorted(card.products)}
            Path("pretended.json").write_text(json.dumps(report), encoding="utf-8")
        plain_exit(status)

    train_gpt.Trainer.train_step = count_waits(train_gpt.Trainer.train_step)
    train_gpt.TokenLoader.batches = count_waits(train_gpt.TokenLoader.batches)
    for owner, name, value in [*card.patches(), (os, "_exit", end)]:  # a run of several ranks ends with the latter
        setattr(owner, name, value)
    os.sched_getaffinity = lambda process: {0}  # macOS has none
    torch.autograd.set_multithreading_enabled(False)  # a CPU build has no thread for a GPU's gradients
    with card:
        end(train_gpt.main())


if __name__ == "__main__":
    main()
