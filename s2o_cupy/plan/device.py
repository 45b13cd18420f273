"""What a plan depends on of a device. Pure: no GPU is asked."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DeviceLimits"]


@dataclass(frozen=True)
class DeviceLimits:
    """What a plan depends on. Bytes of shared memory for one block and for one multiprocessor."""

    compute_capability: int
    shared_per_block: int
    shared_per_multiprocessor: int
    multiprocessors: int = 132

    @staticmethod
    def of_architecture(compute_capability: int) -> DeviceLimits:
        """The limits NVIDIA documents (CUDA C++ Programming Guide, technical specifications)."""
        kib = {80: 164, 87: 164, 90: 228, 100: 228, 103: 228, 110: 228}.get(compute_capability, 100)
        return DeviceLimits(compute_capability, (kib - 1) * 1024, kib * 1024)
