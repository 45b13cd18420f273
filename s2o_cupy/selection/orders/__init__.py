"""The ways to score keys, by rank."""

from __future__ import annotations

from .base import Order
from .pooled import PooledOrder
from .query import QueryOrder
from .weight import WeightOrder

__all__ = ["ORDERS", "Order"]

ORDERS: dict[str, type[Order]] = {
    "mean": PooledOrder, "max": PooledOrder, "weight": WeightOrder, "query": QueryOrder,
}  # fmt: skip
