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


def test_images_for_training_have_what_the_recipes_need_and_the_operators_has_no_torch() -> None:
    texts = {stage: " ".join(lines) for stage, lines in stages().items()}
    extras = {stage: set(found[1].split(",")) for stage, text in texts.items() if (found := re.search(r'"\.\[(\S+)\]"', text))}
    for stage in ("build-cpu", "build-cuda", "neuron"):
        assert extras[stage] >= {"store", "kubernetes", "tracking", "data", "llm"}, stage
    assert "train" not in extras["neuron"], "which asks for a torch of its own"
    assert extras["build-operator"] == {"kubernetes", "store"}
