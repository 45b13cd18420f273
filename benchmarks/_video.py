"""Queries, keys and values like those of a video transformer, from a seed: patches of a moving scene, turned by rotary
positions of three axes, behind the tokens of a text."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

CHANNELS = 32  # of the scene
AXES = (44, 42, 42)  # elements of a head of 128 that turn by time, row and column
BASE = 256.0  # of rotary positions


class Grid(NamedTuple):
    """121 frames of 704 x 1,280 pixels, in patches of 16 x 16 pixels and of four frames; and 512 tokens of text."""

    frames: int = 31
    rows: int = 44
    columns: int = 80
    text: int = 512

    @property
    def tokens(self) -> int:
        return self.frames * self.rows * self.columns + self.text


def scene(grid: Grid, random: torch.Generator) -> torch.Tensor:
    """Smooth textures, each moving its own way, [tokens, CHANNELS], each channel with variance 1; text is noise.

    A channel is white noise whose Fourier components are weighted by distance: the longer its scale, the smoother. Its
    frames are one picture moved along, which changes slowly.
    """
    device = random.device
    frames, rows, columns = grid.frames, grid.rows, grid.columns
    fy = torch.fft.fftfreq(rows, device=device)[:, None]
    fx = torch.fft.fftfreq(columns, device=device)[None, :]
    time = torch.arange(frames, device=device)[:, None, None]
    channels = []
    for c in range(CHANNELS):
        reach = 1.5 * 2 ** (4 * c / (CHANNELS - 1))  # 1.5 to 24 patches
        smooth = torch.exp(-2 * (math.pi * reach / 2) ** 2 * (fx**2 + fy**2))
        vy, vx = torch.randn(2, generator=random, device=device).tolist()
        pictures = [torch.fft.fft2(torch.randn(rows, columns, generator=random, device=device)) for _ in range(2)]
        moved = torch.exp(-2j * math.pi * time * (fy * vy / 4 + fx * vx / 4))
        phase = time * (math.pi / 2 / frames)
        mixed = pictures[0] * torch.cos(phase) + pictures[1] * torch.sin(phase)
        found = torch.fft.ifft2(mixed * smooth * moved).real.flatten()
        channels.append((found - found.mean()) / found.std())
    patches = torch.stack(channels, -1)
    return torch.cat([torch.randn(grid.text, CHANNELS, generator=random, device=device), patches])


def turned(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Pairs of elements of x [tokens, 128] turned by the patch's place; text stays."""
    device = x.device
    places = torch.cartesian_prod(*(torch.arange(n, device=device) for n in grid[:3])).float()  # [patches, 3]
    angles = torch.cat(
        [
            places[:, axis, None] * BASE ** (-torch.arange(0, size, 2, device=device) / size)
            for axis, size in enumerate(AXES)
        ],
        1,
    )  # [patches, 64]
    angles = torch.cat([angles.new_zeros(grid.text, angles.shape[1]), angles])
    even, odd = x[:, 0::2], x[:, 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(1)


def qkv(grid: Grid, heads: int, seed: int = 0, device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """bfloat16 [1, heads, tokens, 128]. Heads look for like patches, near patches, or hardly for anything:
    from head to head the scene counts for more beside a constant, which leaves the place alone, and scores are larger.
    """
    random = torch.Generator(device).manual_seed(seed)
    seen = scene(grid, random)
    found: list[list[torch.Tensor]] = [[], [], []]
    for head in range(heads):
        share = head / max(1, heads - 1)
        draw = lambda *shape: torch.randn(*shape, generator=random, device=device)  # noqa: E731
        w, constant = draw(CHANNELS, 128) / CHANNELS**0.5, draw(128)
        of_q, of_k = (seen @ (w + 0.3 * draw(CHANNELS, 128) / CHANNELS**0.5) for _ in range(2))
        amplitude = 1.0 + 1.5 * ((head * 5) % heads) / max(1, heads - 1)
        for into, x in zip(found, (of_q, of_k), strict=False):
            mixed = share**0.5 * x + (1 - share) ** 0.5 * constant + 0.2 * draw(*x.shape)
            into.append((turned(mixed, grid) * amplitude).bfloat16())
        found[2].append((seen @ (draw(CHANNELS, 128) / CHANNELS**0.5) + 0.5 * draw(len(seen), 128)).bfloat16())
    q, k, v = (torch.stack(x)[None] for x in found)
    return q, k, v
