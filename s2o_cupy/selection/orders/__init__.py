"""The ways to score keys, by rank."""

from __future__ import annotations

from importlib import import_module

from ...spec import ORDER_OF_RANK
from .base import Order

__all__ = ["ORDERS", "Order"]

ORDERS: dict[str, type[Order]] = {
    rank: import_module(f".{name}", __name__).ORDER for rank, name in ORDER_OF_RANK.items()
}
