"""A GPU that is not there. train_gpt.py runs on it unchanged, with true values, and what CUDA, MPS and NCCL refuse is refused.

    PRETEND='cuda 9.0 80' python tests/pretended.py NAME=value ...    kind, compute capability, GiB; also under torchrun

Whatever a program does with tensors, also inside autograd, DDP and fused optimizers, PyTorch's dispatcher turns into basic
operations such as aten::mul. A `TorchDispatchMode` is handed each of them, with its arguments, before it happens. Here:
- `OnCard` is a tensor that says it is on cuda:0 or mps. It has no memory; its values are in `content`, a tensor of the CPU.
- `Card` is the mode: it refuses an operation with the GPU's own message, or does it on the contents and wraps the results.
- `Card.patches` answers the questions about hardware that are no operations, such as torch.cuda.is_available().

It counts how often the host waits for the device, the tensors alive, and the graphs that torch.compile would make; nothing is
compiled. Gloo moves what NCCL would. It cannot see kernels and their rounding, memory, time, races between streams, or NCCL itself.
"""
import json
import os
import sys
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock
from weakref import WeakValueDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend  # of PyTorch 2.10

_setup_privateuseone_for_python_backend("pretended")  # tensors without memory may be on a device, in the whole process
COPIES = {"aten::_to_copy", "aten::copy_"}  # the ways between host and device
INDEXED = {"aten::index", "aten::index_put", "aten::index_put_"}
READS = {f"aten::{op}" for op in "_local_scalar_dense nonzero masked_select equal allclose _unique2 unique_dim bincount".split()}
EXPONENTIALS = {f"aten::{op}" for op in "exp expm1 log log1p log2 logsumexp _log_softmax rsqrt reciprocal".split()}
ALIVE = WeakValueDictionary()  # the tensors of the GPU


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
        ALIVE[id(tensor)] = tensor
        Card.current.peak = max(Card.current.peak, len(ALIVE))
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
        self.sent, self.arriving = [], set()  # pinned tensors that the GPU may read, as they were; what collectives may yet write
        self.peak = self.compared = 0  # most tensors alive; calls of `compare`

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
        is_async = name in COPIES and (kwargs.get("non_blocking") or args[2:3] == (True,))
        if device.type == "cpu" and on_card and is_async:  # Stricter than CUDA: a wait may follow.
            raise RuntimeError("a copy to the CPU with non_blocking=True: the host could read it before it has arrived")
        if kwargs.get("generator") and device.type != "cpu":
            raise RuntimeError(f"Expected a '{self.kind}' device type for generator but found 'cpu'")
        if not func.is_view and any(t.content.untyped_storage().data_ptr() in self.arriving for t in on_card):
            raise RuntimeError(f"{name} of what a collective has yet to write: wait for it first")
        if name not in COPIES:
            self.check(name, args, device, on_card, on_host)
        masks = [t for t in args[1] if t is not None and t.dtype == torch.bool] if name in INDEXED else ()  # They use nonzero.
        is_read = name in READS or masks or (name in COPIES and device.type == "cpu")
        pinned = [t for t in on_host if hasattr(t, "pinned")]
        is_sent = name == "aten::_to_copy" and device.type != "cpu" and len(pinned) < len(on_host)
        if is_sent or (is_read and on_card):
            self.wait()
        if device.type != "cpu" and is_async:
            self.sent += [(t, t.clone()) for t in pinned]
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

    def wait(self, device=None):
        """The host waits for the GPU. Raises if memory changed that the GPU was reading."""
        self.waits += 1
        if not all(torch.equal(tensor, held) for tensor, held in self.sent):
            raise RuntimeError("pinned memory was written while a copy to the GPU could be reading it")
        self.sent.clear()

    def compare(self, call):
        """Raises if the ranks do not do the same at the same time: with NCCL, they would hang or mix up tensors."""
        group, self.compared = torch.distributed, self.compared + 1
        store, rank = group.distributed_c10d._get_default_store(), group.get_rank()
        neighbour = f"call {self.compared} of rank {(rank + 1) % group.get_world_size()}"
        store.set(f"call {self.compared} of rank {rank}", call)
        store.wait([neighbour], timedelta(seconds=60))
        other = store.get(neighbour).decode()
        if other != call:
            raise RuntimeError(f"the ranks differ: {call}, but {neighbour} is {other}")

    def check(self, name, args, device, on_card, on_host):
        """Raises if tensors are not where they must be, or not of a type that they should be of."""
        if name.startswith("c10d"):
            if (on_host and name != "c10d::barrier") or any(t.device.index != self.index for t in on_card):
                raise RuntimeError(f"No backend type associated with a device other than {self.kind}:{self.index}")
            if not all(t.is_contiguous() for t in on_card):
                raise ValueError("Tensors must be contiguous")
            self.compare(f"{name} of {[(str(t.dtype), *t.shape) for t in on_card]}")
        if name in EXPONENTIALS and on_card and on_card[0].dtype.itemsize == 2:  # Stricter than CUDA, but as autocast.
            raise RuntimeError(f"{name} of {on_card[0].dtype} overflows or loses digits; use float32")
        if name in INDEXED and isinstance(args[0], OnCard):  # Its indices may be on the CPU.
            on_host = [t for t in on_host if all(t is not index for index in args[1])]
        # Most operations may read a number on the CPU, but not write one.
        needs_all = name.startswith(("aten::_fused", "aten::_amp", "aten::stack", "aten::cat"))
        needs_all |= name.endswith("_") and not isinstance(args[0], OnCard)
        wrong = {str(t.device) for t in on_card if t.device != device}
        wrong |= {str(t.device) for t in on_host if on_card and (t.ndim or needs_all)}
        if wrong:
            raise RuntimeError(f"Expected all tensors to be on the same device, but {name} found {wrong} and {device}")

    def patches(self):
        """What replaces what, as (owner, name, value)."""
        plain_tensor, plain_to, plain_start = torch.tensor, torch.Tensor.to, torch.distributed.init_process_group
        plain_attention, plain_load = torch.nn.functional.scaled_dot_product_attention, torch.load

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

        def note_graph(module, inputs, named):  # Stricter than dynamo, which guards only numbers that the model reads.
            if torch._dynamo.eval_frame._stance.stance == "default":
                held = [vars(part) | {"require_backward_grad_sync": 0} for part in module.modules()]  # train_step's, for DDP
                numbers = [value for its in held for value in its.values() if isinstance(value, (int, float, str))]
                shapes = [value.shape for value in (*inputs, *named.values())]
                self.graphs.add((torch.is_grad_enabled(), torch.get_num_threads(), *numbers, *shapes))

        def load(file, map_location=None, **options):
            if map_location is None:  # Stricter than CUDA: on one rank, it is right.
                raise RuntimeError("torch.load without map_location: all ranks' tensors go to the GPU that wrote them")
            return plain_load(file, map_location=map_location, **options)

        def autocast(context):  # Stricter than CUDA: float16 can be meant.
            raise RuntimeError("autocast is not pretended; autocast without a type computes in float16")

        def arriving(plain):  # what an asynchronous collective writes has arrived when it was waited for
            def collective(output, *args, async_op=False, **options):
                if args[-1:] == (True,):  # given by its place
                    *args, async_op = args
                if not async_op:
                    return plain(output, *args, **options)
                work = plain(output, *args, async_op=True, **options)
                place = output.content.untyped_storage().data_ptr()
                self.arriving.add(place)
                return SimpleNamespace(wait=lambda: (work.wait(), self.arriving.discard(place)))
            return collective

        is_cuda, properties = self.kind == "cuda", SimpleNamespace(major=self.capability[0], total_memory=self.memory)
        answers = {"is_available": is_cuda, "device_count": self.count * is_cuda, "get_device_capability": self.capability,
                   "get_device_properties": properties, "get_device_name": "pretended", "_lazy_init": None,
                   "max_memory_allocated": 700 << 20, "max_memory_reserved": 900 << 20, "is_current_stream_capturing": False}
        return [
            *((torch.cuda, name, Mock(return_value=value)) for name, value in answers.items()),
            (torch.cuda, "current_device", lambda: self.index), (torch.version, "cuda", "13.0" if is_cuda else None),
            (torch.cuda, "set_device", lambda index: setattr(self, "index", index)),
            (torch.backends.mps, "is_available", cache(lambda: not is_cuda)), (torch.backends.cudnn, "version", lambda: 91900),
            (torch.accelerator, "synchronize", self.wait), (torch.cuda, "synchronize", self.wait),
            (torch.Tensor, "pin_memory", pin), (torch.Tensor, "is_pinned", lambda tensor: hasattr(tensor, "pinned")),
            (torch.nn.Module, "compile", lambda module, **_: module.register_forward_pre_hook(note_graph, with_kwargs=True)),
            (torch.nn.functional, "scaled_dot_product_attention", attention),
            (torch.distributed, "init_process_group", start), (torch.Tensor, "to", to), (torch, "load", load),
            (torch.autocast, "__enter__", autocast),
            *((torch.distributed, name, arriving(value)) for name, value in vars(torch.distributed).items()
              if name in ("all_gather_single", "all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor")),
            (torch, "tensor", lambda data, device=None, **options: plain_tensor(data, **options).to(device))]  # for the mode


def main():
    """Run train_gpt.py after the statements in PLANT; rank 0 writes what the card saw to pretended.json."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import train_gpt
    kind, capability, gib = os.environ["PRETEND"].split()
    card = Card(kind, tuple(map(int, capability.split("."))), int(gib))
    waits, peaks, plain_exit = {}, {}, os._exit

    def counted(name, plain):
        def function(its, *args):
            before, card.peak = card.waits, len(ALIVE)
            result = plain(its, *args)
            waits.setdefault(name, []).append(card.waits - before)
            peaks.setdefault(name, []).append(card.peak)
            if name != "batches" and its.ranks.world_size > 1:
                weights = [p.content.double().sum().item() for p in its.model.parameters()]
                card.compare(f"{name} at {its.clock.time_ms} ms with weights of {weights}")
            return result
        return function

    def end(status):
        card.wait()
        if card.index == 0:
            report = {"waits": waits, "peaks": peaks, "graphs": len(card.graphs), "products": sorted(card.products)}
            Path("pretended.json").write_text(json.dumps(report), encoding="utf-8")
        plain_exit(status)

    for owner, name, value in [*card.patches(), (os, "_exit", end)]:  # a run of several ranks ends with the latter
        setattr(owner, name, value)
    torch.autograd.set_multithreading_enabled(False)  # a CPU build has no thread for a GPU's gradients
    exec(os.environ.get("PLANT", ""), vars(train_gpt))
    for owner, name in ((train_gpt.Trainer, "train_step"), (train_gpt.TokenLoader, "batches"), (train_gpt, "log_final_scores")):
        setattr(owner, name, counted(name, getattr(owner, name)))
    with card:
        end(train_gpt.main())


if __name__ == "__main__":
    main()
