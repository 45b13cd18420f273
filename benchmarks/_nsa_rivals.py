"""Others' kernels of NSA, for `nsa.py --rivals`, imported from checkouts of their repositories: nothing of theirs is in
this one. Each side is given the same tensors in its own order of axes, outside of what is timed, and allocates its
outputs itself.

fsa: Flash Sparse Attention, github.com/Relaxed-System-Lab/Flash-Sparse-Attention (Apache-2.0). fla:
github.com/fla-org/flash-linear-attention, or github.com/fla-org/native-sparse-attention with its submodule (MIT). Both
need Triton and einops. The functions of attention alone are called, without a module's projections. Their window branch
is flash_attn's; without that package it is the FlashAttention-2 that PyTorch has.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import _common

from s2o_cupy.nsa import (
    NSAConfig,
    nsa_attention,
    nsa_compress,
    nsa_select,
    selected_attention,
    selected_attention_backward,
)

Tensor = Any  # torch.Tensor
Window = Callable[..., Tensor]  # of q, k and v [1, L, heads, D], as flash_attn's


@dataclasses.dataclass(frozen=True)
class Inputs:
    """q, do [1, heads, L, D], k, v [1, KV heads, L, D], gates [1, L, 3], and the blocks of each token [1, KV heads, L,
    top], as `nsa_select` chose them."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    gates: Tensor
    blocks: Tensor
    config: NSAConfig

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, config: NSAConfig, seed: int = 0) -> Inputs:
        """Gates and the gradient of the output are random."""
        import torch

        drawn = torch.Generator(q.device).manual_seed(seed)
        of: dict[str, Any] = {"device": q.device, "generator": drawn}
        do = torch.randn(q.shape, **of).to(q.dtype)
        gates = torch.rand(1, q.shape[2], 3, **of).to(q.dtype)
        blocks = nsa_select(q, nsa_compress(k, config.length, config.stride), config=config)
        return cls(q, k, v, do, gates, blocks, config)

    def only(self, branch: int) -> Inputs:
        """With the gates of one branch alone."""
        import torch

        gates = torch.zeros_like(self.gates)
        gates[..., branch] = 1
        return dataclasses.replace(self, gates=gates)


class Side:
    """What is timed of one side. Outputs and gradients are in its own order of axes; `bhsd` gives ours."""

    name: str
    includes: str  # the words of a result on what the whole is

    def selected(self) -> Tensor:
        """Attention to given blocks."""
        raise NotImplementedError

    def selected_training(self) -> tuple[Tensor, ...]:
        """o, and the gradients of q, k and v."""
        raise NotImplementedError

    def whole(self) -> Tensor:
        """All three branches, from q, k, v and gates on."""
        raise NotImplementedError

    def whole_training(self) -> tuple[Tensor, ...]:
        """o, and the gradients of q, k, v and the gates."""
        raise NotImplementedError

    def bhsd(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def blocks(self) -> Tensor | None:
        """Those that the side itself selects, [KV heads, L, top], if its compressed keys are ours."""
        return None


class Ours(Side):
    name = "s2o"
    includes = (
        "nsa_compress of k and v, nsa_attention; backward integrations.nsa, whose compressed and window branches are "
        "PyTorch's. Selected: selected_attention with its lse, selected_attention_backward, gradients in q's dtype"
    )

    def __init__(self, x: Inputs) -> None:
        from s2o_cupy.integrations.nsa import nsa_attention as training

        self.x, self.training = x, training
        self.leaves = _leaves(x.q, x.k, x.v, x.gates)

    def selected(self) -> Tensor:
        return self._selected()[0]

    def _selected(self) -> tuple[Tensor, Tensor]:
        x = self.x
        return selected_attention(x.q, x.k, x.v, x.blocks, x.config.block, return_lse=True)

    def selected_training(self) -> tuple[Tensor, ...]:
        x, (o, lse) = self.x, self._selected()
        gradients = selected_attention_backward(x.q, x.k, x.v, x.blocks, o, lse, x.do, x.config.block)
        return (o, *(gradient.to(x.q.dtype) for gradient in gradients))

    def whole(self) -> Tensor:
        x = self.x
        return nsa_attention(x.q, x.k, x.v, *self._compressed(x.k, x.v), x.gates, config=x.config)

    def whole_training(self) -> tuple[Tensor, ...]:
        q, k, v, gates = self.leaves
        return _with_gradients(
            lambda: self.training(q, k, v, *self._compressed(k, v), gates, config=self.x.config),
            self.leaves,
            self.x.do,
        )

    def _compressed(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        c = self.x.config
        return nsa_compress(k, c.length, c.stride), nsa_compress(v, c.length, c.stride)

    def bhsd(self, x: Tensor) -> Tensor:
        return x

    def blocks(self) -> Tensor:
        return self.x.blocks[0]


class Fsa(Side):
    """As fsa.module.fsa calls its functions: tensors are [L, heads, D], sequences packed, here one."""

    name = "fsa"
    files = ("fsa/ops/FSA_topk_sparse_attention.py", "nsa_ref/ops/weighted_pool.py")
    includes = (
        "avgpool_compress of k and v, compressed_attention, FSA_topk_sparse_attention, window, gates by PyTorch, as in "
        "fsa.module; a pointer of its reduce_kernel taken out of a tuple. It selects by the first query head of a KV "
        "head alone"
    )

    @staticmethod
    def load(folder: Path) -> Any:
        sys.path.append(str(folder))
        module = importlib.import_module("fsa.ops.FSA_topk_sparse_attention")
        reference = importlib.import_module("nsa_ref.ops")
        # A pointer in a tuple, which only old Tritons take for the pointer; with newer ones nothing of it would run.
        pointer = "lse_ptr + pid_q_j * stride_lse_n"
        _mend(module.reduce_kernel, f"lse_ptrs = ({pointer},)", f"lse_ptrs = {pointer}")
        names = ("avgpool_compress", "compressed_attention", "topk_sparse_attention")
        kept = {name: getattr(reference, name) for name in names}
        return types.SimpleNamespace(FSA_topk_sparse_attention=module.FSA_topk_sparse_attention, **kept)

    def __init__(self, kernels: Any, x: Inputs, window: Window | None) -> None:
        import torch

        self.kernels, self.x, self.window = kernels, x, window
        self.leaves = _leaves(*(_bshd(t)[0] for t in (x.q, x.k, x.v)), x.gates[0])
        self.do, self.given = _bshd(x.do)[0], x.blocks[0].contiguous()
        self.length, heads = x.q.shape[2], x.q.shape[1]
        self.cu = torch.tensor([0, self.length], dtype=torch.int32, device=x.q.device)
        # Its module takes its older kernel from there on.
        few = heads // x.k.shape[1] <= 8
        self.attend = kernels.FSA_topk_sparse_attention if few else kernels.topk_sparse_attention

    def _selected(self) -> Tensor:
        return self.attend(*self.leaves[:3], self.given, self.x.config.block, self.cu, None)

    def selected(self) -> Tensor:
        return _without_gradients(self._selected)

    def selected_training(self) -> tuple[Tensor, ...]:
        return _with_gradients(self._selected, self.leaves[:3], self.do)

    def _compressed(self) -> tuple[Tensor, Tensor]:
        """Output and blocks."""
        c, (q, k, v) = self.x.config, self.leaves[:3]
        pooled = [self.kernels.avgpool_compress(t, None, self.cu, c.length, c.stride, None) for t in (k, v)]
        (k_cmp, cu), (v_cmp, _) = pooled
        longest = (cu[1:] - cu[:-1]).max().item()
        return self.kernels.compressed_attention(
            q, k_cmp, v_cmp, c.length, c.stride, c.block, c.top, self.cu, cu, self.length, longest, None, c.first,
            c.local, parallel_topk_compute=False,
        )  # fmt: skip

    def _whole(self) -> Tensor:
        q, k, v, gates = self.leaves
        compressed, blocks = self._compressed()
        selected = self.attend(q, k, v, blocks, self.x.config.block, self.cu, None)
        o = gates[:, 0:1, None] * compressed + gates[:, 1:2, None] * selected
        if self.window is None:
            return o
        near = self.window(q[None], k[None], v[None], causal=True, window_size=(self.x.config.window - 1, 0))
        return o + gates[:, 2:3, None] * near[0]

    def whole(self) -> Tensor:
        return _without_gradients(self._whole)

    def whole_training(self) -> tuple[Tensor, ...]:
        return _with_gradients(self._whole, self.leaves, self.do)

    def bhsd(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)[None]

    def blocks(self) -> Tensor:
        return _without_gradients(self._compressed)[1]


class Fla(Side):
    """Tensors are [1, L, heads, D], and 16 or more query heads a KV head: the others are zeros, added outside of what
    is timed."""

    name = "fla"
    files = ("fla/ops/nsa/parallel.py",)
    or_files = (
        "native_sparse_attention/ops/parallel.py",
        "3rdparty/flash-linear-attention/fla/ops/common/utils.py",
    )
    includes = (
        "parallel_nsa: means of k and v by blocks of the selected branch, one a block where ours overlap, compressed "
        "attention, topk, selected, window, gates; 16 query heads a KV head, those beyond the group zeros"
    )
    LEAST = 16  # query heads of a KV head

    @classmethod
    def load(cls, folder: Path) -> Any:
        """Without what their packages import themselves, which are all their models."""
        old = not (folder / cls.files[0]).exists()
        root = folder / "3rdparty" / "flash-linear-attention" if old else folder
        packages = {"fla": root / "fla", "fla.ops": root / "fla" / "ops"}
        if old:
            own = folder / "native_sparse_attention"
            packages |= {"native_sparse_attention": own, "native_sparse_attention.ops": own / "ops"}
        for name, path in packages.items():
            module = types.ModuleType(name)
            vars(module).update(__path__=[str(path)], __version__="0")
            sys.modules[name] = module
        return importlib.import_module("native_sparse_attention.ops.parallel" if old else "fla.ops.nsa.parallel")

    def __init__(self, kernels: Any, x: Inputs, window: Window | None) -> None:
        c, (heads, self.kv_heads) = x.config, (x.q.shape[1], x.k.shape[1])
        if (c.first, c.local) != (1, 2):
            raise ValueError(f"fla: first {c.first} and local {c.local}; accepted: 1 and 2, which it always selects")
        self.kernels, self.x, self.window = kernels, x, window
        self.group = heads // self.kv_heads
        self.padded = max(self.LEAST, 1 << (self.group - 1).bit_length())
        if window is not None:
            kernels.flash_attn_func = window
        gates = (x.gates[..., i, None].expand(-1, -1, self.kv_heads * self.padded).contiguous() for i in range(3))
        self.leaves = _leaves(self._pad(_bshd(x.q)), _bshd(x.k), _bshd(x.v), *gates)
        self.do, self.given = self._pad(_bshd(x.do)), _bshd(x.blocks)

    def _pad(self, x: Tensor) -> Tensor:
        import torch

        by_kv_head = x.unflatten(2, (self.kv_heads, self.group))
        return torch.nn.functional.pad(by_kv_head, (0, 0, 0, self.padded - self.group)).flatten(2, 3).contiguous()

    def _selected(self) -> Tensor:
        q, k, v = self.leaves[:3]
        block, top, scale = self.x.config.block, self.given.shape[-1], q.shape[-1] ** -0.5
        return self.kernels.ParallelNSAFunction.apply(q, k, v, self.given, top, block, scale, None)

    def selected(self) -> Tensor:
        return _without_gradients(self._selected)

    def selected_training(self) -> tuple[Tensor, ...]:
        return _with_gradients(self._selected, self.leaves[:3], self.do)

    def _whole(self) -> Tensor:
        (q, k, v, *gates), c = self.leaves, self.x.config
        window = 0 if self.window is None else c.window
        named = dict(zip(("g_cmp", "g_slc", "g_swa"), gates, strict=True))
        return self.kernels.parallel_nsa(q, k, v, **named, block_counts=c.top, block_size=c.block, window_size=window)

    def whole(self) -> Tensor:
        return _without_gradients(self._whole)

    def whole_training(self) -> tuple[Tensor, ...]:
        leaves = self.leaves if self.window is not None else self.leaves[:5]
        return _with_gradients(self._whole, leaves, self.do)

    def bhsd(self, x: Tensor) -> Tensor:
        if x.shape[2] != self.kv_heads:
            x = x.unflatten(2, (self.kv_heads, self.padded))[:, :, :, : self.group].flatten(2, 3)
        return x.transpose(1, 2)


KNOWN: Mapping[str, Any] = {"fsa": Fsa, "fla": Fla}
ACCEPTED = f"NAME=FOLDER,..., NAME {' or '.join(KNOWN)}, each once, FOLDER a checkout of its repository"


def folders(text: str) -> dict[str, Path]:
    """ "fsa=/a/checkout,fla=/another"."""
    found: dict[str, Path] = {}
    for part in _common.names(text):
        name, _, folder = part.partition("=")
        if name not in KNOWN or not folder or name in found:
            raise argparse.ArgumentTypeError(f"{part}; accepted: {ACCEPTED}")
        choices = [KNOWN[name].files, *filter(None, [getattr(KNOWN[name], "or_files", None)])]
        if not any(all((Path(folder) / file).exists() for file in files) for files in choices):
            missing = ", or ".join(" and ".join(files) for files in choices)
            raise argparse.ArgumentTypeError(f"{part}: it has no {missing}; accepted: {ACCEPTED}")
        found[name] = Path(folder).resolve()
    if not found:
        raise argparse.ArgumentTypeError(f"it names none; accepted: {ACCEPTED}")
    return found


def load(given: Mapping[str, Path], tell: Callable[[str], None]) -> dict[str, Any]:
    """The kernels of each that can be imported; the others are told."""
    found = {}
    for name, folder in given.items():
        try:
            found[name] = KNOWN[name].load(folder)
        except Exception as error:  # whatever another's code raises
            tell(f"{name} left out: its import failed, {short(error)}; it needs Triton and einops")
    return found


def _mend(kernel: Any, old: str, new: str) -> None:
    """Words in the source of a kernel, in memory alone."""
    text = getattr(kernel, "src", "")
    if old in text:
        getattr(kernel, "_unsafe_update_src", functools.partial(setattr, kernel, "src"))(text.replace(old, new))


def commit(folder: Path) -> str:
    """Of a checkout; of a copy without one what its file COMMIT says."""
    if (folder / "COMMIT").exists():
        return (folder / "COMMIT").read_text(encoding="utf-8").strip()
    if not (folder / ".git").exists():
        return "unknown"
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def window(q: Tensor, tell: Callable[[str], None]) -> tuple[Window | None, str]:
    """Attention of the window branch for rivals, tried on q's device, and whose it is."""
    tried: dict[str, Callable[[], Window]] = {
        "flash_attn": lambda: importlib.import_module("flash_attn").flash_attn_func,
        "PyTorch's FlashAttention-2": lambda: _of_pytorch,
    }
    x = _bshd(q[:, :1, :128]).detach().requires_grad_()
    for whose, function in tried.items():
        try:
            found = function()
            found(x, x, x, causal=True, window_size=(31, 0)).sum().backward()
        except Exception as error:  # absent, or built for others
            tell(f"window of the rivals: {whose} cannot be used, {short(error)}")
            continue
        return found, whose
    return None, "none"


def _of_pytorch(q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int]) -> Tensor:
    import torch

    left, right = window_size
    return torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=q.shape[-1] ** -0.5,
        window_size_left=left, window_size_right=right,
    )[0]  # fmt: skip


def short(error: BaseException) -> str:
    """In one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _bshd(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


def _leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.detach().requires_grad_() for x in tensors)


def _without_gradients(function: Callable[[], Any]) -> Any:
    import torch

    with torch.no_grad():
        return function()


def _with_gradients(function: Callable[[], Tensor], leaves: tuple[Tensor, ...], do: Tensor) -> tuple[Tensor, ...]:
    import torch

    o = function()
    return (o.detach(), *torch.autograd.grad(o, leaves, do))
