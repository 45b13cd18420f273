"""Dense attention in float64, and how far from it a result may be."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

UNIT = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}  # half the distance of two numbers around 1
LOGITS = 6e7  # scores that are held at a time


class Exact(NamedTuple):
    o: torch.Tensor  # [B, H, Sq, D], float64
    lse: torch.Tensor  # [B, H, Sq]; -inf for a row without a key
    absolute: torch.Tensor  # [B, H, Sq, D]: the same weights times |v|, what rounding acts on


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None, softcap: float = 0.0,
    is_causal: bool = True,
) -> Exact:  # fmt: skip
    """Of q [B, H, Sq, D], k and v [B, Hk, Sk, D]; the last query sees all keys (aligned bottom-right)."""
    (B, H, Sq, D), (Hk, Sk) = q.shape, k.shape[1:3]
    scale = D**-0.5 if scale is None else scale
    o = torch.zeros(B, H, Sq, D, dtype=torch.float64, device=q.device)
    absolute = o.clone()
    lse = torch.full((B, H, Sq), -math.inf, dtype=torch.float64, device=q.device)
    if 0 in (B, H, Sq, Sk):
        return Exact(o, lse, absolute)
    keys, values = k.double().transpose(-1, -2)[:, :, None], v.double()[:, :, None]  # [B, Hk, 1, D, Sk], ...
    columns = torch.arange(Sk, device=q.device)
    step = max(16, min(512, int(LOGITS / (B * H * Sk))))
    for begin in range(0, Sq, step):
        rows = torch.arange(begin, min(Sq, begin + step), device=q.device)
        part = slice(begin, begin + len(rows))
        x = q[:, :, part].double().reshape(B, Hk, H // Hk, len(rows), D)
        s = x @ keys * scale  # [B, Hk, H / Hk, rows, Sk]
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        if is_causal:
            s.masked_fill_(columns > rows[:, None] + (Sk - Sq), -math.inf)
        top = s.amax(-1, keepdim=True)
        p = torch.exp(s - top)
        total = p.sum(-1, keepdim=True)
        o[:, :, part] = (p @ values / total).reshape(B, H, len(rows), D)
        absolute[:, :, part] = (p @ values.abs() / total).reshape(B, H, len(rows), D)
        lse[:, :, part] = (top + total.log()).reshape(B, H, len(rows))
    return Exact(o, lse, absolute)


def wrong_dense(o: torch.Tensor, lse: Any, exact: Exact, softcap: float = 0.0) -> list[str]:
    """What of a result at tau 0 is further from exact than rounding allows.

    A row may be off by 4 units of its dtype times the weighted sum of |v| (each weight is rounded once, at pass 1 and
    at pass 2, and each may be off by twice its unit where a row's maximum is rounded too), 2e-4 of it for scores of
    float32 up to a thousand (2^-23 of them, through the exponential), and 2 units of itself for the output. tanh.approx
    is off by 2^-11: each score by e = 2^-11 softcap, so the output by expm1(2 e) of the sum.
    """
    if o.numel() == 0:
        return []
    x = o.double()
    if not bool(torch.isfinite(x).all()):
        return [f"{int((~torch.isfinite(x)).sum())} of {x.numel()} elements of o are not finite"]
    found = []
    unit = UNIT[o.dtype]
    capped = math.expm1(2 * 2.0**-11 * softcap)
    bound = (4 * unit + 2e-4 + capped) * exact.absolute.norm(dim=-1) + 2 * unit * exact.o.norm(dim=-1) + 1e-6
    over = (x - exact.o).norm(dim=-1) / bound  # [B, H, Sq]
    if float(over.max()) > 1:
        at = [int(i) for i in torch.unravel_index(over.argmax(), over.shape)]
        found.append(f"o[{at}] is {float(over.max()):.3g} times as far off as rounding allows")
    if lse is not None:
        found += _wrong_lse(lse, exact, 5e-4 + 1.1 * 2.0**-11 * softcap)
    return found


def _wrong_lse(lse: torch.Tensor, exact: Exact, absolute: float) -> list[str]:
    """lse may be off by ``absolute`` and by 2e-5 of itself: the logarithm, and sums in float32."""
    seen = torch.isfinite(exact.lse)
    if not bool((torch.isneginf(lse) == ~seen).all()):
        return ["lse is -inf in the wrong places"]
    off = torch.where(seen, (lse.double() - exact.lse).abs(), 0.0)
    bound = absolute + 2e-5 * torch.where(seen, exact.lse.abs(), 0.0)
    return [f"lse is off by {float(off.max()):.3g}"] if not bool((off <= bound).all()) else []


def wrong_sparse(
    o: torch.Tensor, lse: torch.Tensor, exact: Exact, v: torch.Tensor, tail: str, softcap: float = 0.0
) -> list[str]:
    """What is wrong at any tau: an output is an average of values, and lse that of some of the keys.

    Rounded weights may add up to 1.02 of their sum. With a tail, which goes by a sample of the keys that were not
    visited and by what their values have in common, only numbers that are finite are promised.
    """
    if o.numel() == 0:
        return []
    x = o.double()
    if not bool(torch.isfinite(x).all()):
        return [f"{int((~torch.isfinite(x)).sum())} of {x.numel()} elements of o are not finite"]
    B, H, _, D = x.shape
    if v.shape[2] == 0:
        return [] if bool((x == 0).all()) else ["there is no key, but o is not 0"]
    found = []
    most = v.double().abs().amax(dim=2)[:, :, None]  # [B, Hk, 1, D]
    peak = x.abs().amax(dim=2).reshape(B, v.shape[1], -1, D)
    if tail == "none" and bool((peak > most * 1.02 + 1e-5).any()):
        found.append("o is larger than any value")
    seen = torch.isfinite(exact.lse)
    if bool(torch.isnan(lse).any()) or not bool((torch.isneginf(lse) == ~seen).all()):
        found.append("lse is NaN, or -inf in the wrong places")
    above = float(torch.where(seen, lse.double() - exact.lse, 0.0).max())
    if tail == "none" and above > 2e-3 + 2.0**-10 * softcap:
        found.append(f"lse is {above:.3g} above that of all keys")
    return found
