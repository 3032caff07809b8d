"""Images for tests: ten procedural textures as JPEG and PNG files, which differ in pattern, not in colour."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Grid = NDArray[np.float64]
Draw = np.random.Generator


def _waves(draw: Draw, u: Grid, v: Grid, angle: float) -> Grid:
    turned = u * np.cos(angle) + v * np.sin(angle)
    return np.sin(turned * draw.uniform(0.7, 1.1) + draw.uniform(0, 6.3))


def _bricks(draw: Draw, u: Grid, v: Grid) -> Grid:
    rows = np.floor(v / 6)
    return np.where((v % 6 < 1.5) | ((u + 5 * (rows % 2) + draw.uniform(0, 10)) % 10 < 1.5), -1.0, 1.0)


def _smooth(draw: Draw, u: Grid, _: Grid) -> Grid:
    coarse = draw.normal(size=(6, 6))
    at = np.linspace(0, 5, len(u))
    rows = np.stack([np.interp(at, range(6), column) for column in coarse.T], 1)
    return np.stack([np.interp(at, range(6), row) for row in rows])


TEXTURES: dict[str, Callable[[Draw, Grid, Grid], Grid]] = {
    "across": lambda draw, u, v: _waves(draw, u, v, np.pi / 2 + draw.uniform(-0.2, 0.2)),
    "bricks": _bricks,
    "checks": lambda draw, u, v: np.sign(_waves(draw, u, v, 0.0) * _waves(draw, u, v, np.pi / 2)),
    "diagonal": lambda draw, u, v: _waves(draw, u, v, draw.choice([-1, 1]) * np.pi / 4 + draw.uniform(-0.2, 0.2)),
    "dots": lambda draw, u, v: np.where(_waves(draw, u, v, 0.0) + _waves(draw, u, v, np.pi / 2) > 1, 1.0, -1.0),
    "noise": lambda draw, u, v: draw.normal(size=u.shape),
    "rings": lambda draw, u, v: np.sin(np.hypot(u - draw.uniform(8, 24), v - draw.uniform(8, 24)) * draw.uniform(0.7, 1.1)),
    "smooth": _smooth,
    "spots": lambda draw, u, v: np.where(_smooth(draw, u, v) + 0.7 * _waves(draw, u, v, 0.4) > 0.5, 1.0, -1.0),
    "up": lambda draw, u, v: _waves(draw, u, v, draw.uniform(-0.2, 0.2)),
}


def texture(kind: str, draw: Draw, size: int) -> NDArray[np.uint8]:
    """Return an image of a kind, in a random light and a random dark colour, with noise: (size, size, 3)."""
    u, v = np.meshgrid(np.arange(size, dtype=float), np.arange(size, dtype=float))
    pattern = TEXTURES[kind](draw, u, v)[..., None]
    one, other = draw.uniform(130, 255, 3), draw.uniform(0, 110, 3)
    image = (one + other) / 2 + pattern.clip(-1, 1) * (one - other) / 2 + draw.normal(scale=8, size=(size, size, 1))
    return image.clip(0, 255).astype(np.uint8)


def write(root: Path, counts: dict[str, int], *, kinds: int = 10, size: int = 40, seed: int = 0) -> Path:
    """Write a directory PART/KIND/NUMBER.jpg or .png with `counts` images of each kind per part."""
    draw = np.random.default_rng(seed)
    for part, count in counts.items():
        for kind in list(TEXTURES)[:kinds]:
            (root / part / kind).mkdir(parents=True)
            for number in range(count):
                image = Image.fromarray(texture(kind, draw, size))
                image.save(root / part / kind / f"{number}.{'png' if number % 2 else 'jpg'}")
    return root
