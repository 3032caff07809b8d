"""Images for tests: procedural textures as JPEG and PNG files, which differ in pattern, not in colour."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

ANGLES = {"across": (90,), "checks": (0, 90), "slanted": (45,), "upright": (0,)}
TEXTURES = {f"{shape}-{length:02}": (angles, length) for shape, angles in ANGLES.items() for length in (4, 8, 16)}
"""Directions of the waves of a kind, in degrees, and their length in pixels."""


def texture(kind: str, draw: np.random.Generator, size: int) -> NDArray[np.uint8]:
    """Return an image of a kind, in a random light and a random dark colour, with noise: (size, size, 3)."""
    angles, length = TEXTURES[kind]
    v, u = np.mgrid[:size, :size] * 2 * np.pi / (length * draw.uniform(0.9, 1.1))
    waves = [np.sin(u * np.cos(angle) + v * np.sin(angle) + draw.uniform(0, 6.3)) for angle in np.radians(angles)]
    one, other = draw.uniform(130, 255, 3), draw.uniform(0, 110, 3)
    noise = draw.normal(scale=8, size=(size, size, 1))
    image = (one + other) / 2 + np.prod(waves, axis=0)[..., None] * (one - other) / 2 + noise
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
