"""PyTorch tensors that stand for more than their numbers: gradients, tangents, the batches of torch.vmap."""

from __future__ import annotations

from typing import Any

from ..errors import ArgumentTypeError, ArgumentValueError

__all__ = ["check_derivatives", "no_address"]


def check_derivatives(name: str, x: Any) -> None:
    """Raise ValueError if a derivative by ``x`` is asked for, which S2O would lose."""
    import torch  # torch.compile, which traces this of an operator, would have to look at all of sys.modules

    if x.requires_grad and torch.is_grad_enabled():
        raise ArgumentValueError(
            f"{name} requires grad, and S2O is for inference only (it has no backward); "
            f"call it under torch.no_grad(), or pass {name}.detach()"
        )
    # Outside of forward-mode AD, where nearly all calls are, one comparison.
    if torch.autograd.forward_ad._current_level >= 0:
        primal, tangent = torch.autograd.forward_ad.unpack_dual(x)
        if tangent is not None:
            raise ArgumentValueError(
                f"{name} has a tangent (forward-mode AD, as of torch.func.jvp), and S2O is for "
                f"inference only (it has no derivative); accepted: a tensor without, such as {name}.detach()"
            )


def no_address(x: Any) -> TypeError:
    """Why a tensor has none: torch.func's transforms pass wrappers of tensors, tracing passes tensors without data."""
    import torch

    wrappers = torch._C._functorch
    if wrappers.is_batchedtensor(x):
        came, accepted = "a tensor of torch.vmap", "the operator s2o_cupy.integrations.torch.attention there"
    elif wrappers.is_functorch_wrapped_tensor(x):
        came, accepted = "a tensor of a torch.func transform", "a call outside of it"
    else:
        came, accepted = f"a {type(x).__name__} without data", "tensors in memory"
    return ArgumentTypeError(f"one of the arrays is {came}; accepted: {accepted}")
