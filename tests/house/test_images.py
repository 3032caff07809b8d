"""images/Dockerfile: a stage for each variant of the image, and what is in it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
VARIANTS = ("cpu", "cuda", "neuron", "spark", "notebook", "operator")
"""The stages that docs/guide/images.md lists."""


def stages() -> dict[str, list[str]]:
    """The instructions of images/Dockerfile by its stages, continued lines joined."""
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", (ROOT / "images" / "Dockerfile").read_text(), flags=re.M))
    found: dict[str, list[str]] = {"": []}
    for line in filter(None, map(str.strip, text.split("\n"))):
        if named := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            found[named[2]] = [*found.get(named[1], []), line]
        else:
            found[list(found)[-1]].append(line)
    return found


def test_every_variant_is_a_stage_and_runs_as_nobody_with_rights() -> None:
    known = stages()
    for variant in VARIANTS:
        lines = known[variant]
        assert [line for line in lines if line.startswith("USER")][-1] == "USER 1000:1000"
        assert any(line.startswith("ENV PATH=/opt/outlast/bin:") for line in lines)
        installs = [word for line in lines for word in re.findall(r"apt-get install (.*?)\s+&&", line)]
        assert installs in ([], ["--yes --no-install-recommends openjdk-17-jre-headless"]), "no compiler"
    assert list(known)[-1] == "cpu", "who names no stage gets the last"


def test_nothing_is_compiled_when_a_worker_starts() -> None:
    """pip compiles what it installs; the library of Python comes without bytecode, and the root may be read-only."""
    known = stages()
    for variant in VARIANTS:
        compiles = [place for place, line in enumerate(known[variant]) if "compileall" in line and '"stdlib"' in line]
        users = [place for place, line in enumerate(known[variant]) if line == "USER 1000:1000"]
        assert compiles, variant
        assert compiles[0] < users[-1], "who runs the worker may not write there"
    assert not any("no-compile" in line or "DONTWRITEBYTECODE" in line for lines in known.values() for line in lines)


def test_images_for_training_have_what_the_recipes_need() -> None:
    known = stages()
    for stage in ("build-cpu", "build-cuda", "neuron"):
        extras = re.search(r'"\.\[(\S+)\]"', " ".join(known[stage]))
        assert extras, stage
        assert {"store", "kubernetes", "tracking", "data", "llm"} <= set(extras[1].split(",")), stage
    [install] = (line for line in known["neuron"] if "pip install" in line)
    theirs = r"torch\.__version__.* > torch\.txt .*pip install \S* ?--constraint torch\.txt"
    assert re.search(theirs, install), "AWS's torch stays"
    assert "train" not in re.split(r"[\[\],]", install), "which asks for a torch of its own"


def test_the_operators_image_has_no_torch() -> None:
    lines = stages()["build-operator"]
    assert not any("torch" in line or "[train" in line for line in lines)
    assert any('".[kubernetes,store]"' in line for line in lines)


def test_what_the_dockerfile_copies_is_what_it_is_given() -> None:
    given = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {word for lines in stages().values() for line in lines if line.startswith("COPY ") and "--from" not in line
              for word in line.split()[1:-1]}  # fmt: skip
    assert copied == given
    assert all((ROOT / name).exists() for name in given)
