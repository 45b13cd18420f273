"""torch.compile leaves a call out of its graphs and runs it between two of them: it can trace neither kernels that are
launched through CuPy nor the NumPy reference.

PyTorch is not imported for this: torch.compile reads two attributes of a function. A call itself has to do something
only while Dynamo, the part of PyTorch that traces, looks at every frame.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

__all__ = ["outside_graphs"]

Function = TypeVar("Function", bound=Callable[..., Any])


def outside_graphs(function: Function) -> Function:
    """``function``, at which torch.compile breaks its graph, and of which it traces nothing."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if "torch._dynamo" in sys.modules and _traced():
            return untraced(*arguments, **options)
        return function(*arguments, **options)

    def untraced(*arguments: Any, **options: Any) -> Any:
        import torch

        return torch.compiler.disable(unseen)(*arguments, **options)

    def unseen(*arguments: Any, **options: Any) -> Any:
        """Dynamo looks away from here on. It has compiled what led here, of which it would else make another empty
        graph for every shape: next time it goes past."""
        import torch

        frames: tuple[Any, ...] = (call, untraced, _traced)
        for frame in frames:
            torch._dynamo.eval_frame.skip_code(frame.__code__)
        return function(*arguments, **options)

    for known in (call, untraced):  # as torch.compiler.disable() marks a function
        known.__dict__["_torchdynamo_disable"] = True
        known.__dict__["_torchdynamo_disable_msg"] = (
            f"a graph cannot hold {function.__name__}; accepted with fullgraph=True: attention and "
            "attention_varlen of s2o_cupy.integrations.torch, which are operators"
        )
    return cast("Function", call)


def _traced() -> bool:
    """Whether Dynamo traces this, or would trace what is called next."""
    torch = sys.modules["torch"]
    return torch.compiler.is_compiling() or torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None
