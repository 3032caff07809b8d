"""Cost of turning text into token files: `outlast data prepare text` and nanoGPT's own scripts, interleaved.

    git clone https://github.com/karpathy/nanoGPT /tmp/nanoGPT
    python bench/tokenizing.py --nanogpt /tmp/nanoGPT                 # 5 repeats, some minutes
    python bench/tokenizing.py --nanogpt /tmp/nanoGPT --quick         # 2 repeats
    python bench/tokenizing.py --nanogpt /tmp/nanoGPT --source DIR    # other text than Python's standard library with its tests

nanoGPT's scripts are copied out of the clone at the time of the run, and run in a Python with tiktoken and datasets (made once in
~/.cache/outlast-bench, or --peer-python). Scenarios:

    bpe       data/openwebtext/prepare.py. What it would download is replaced: `load_dataset` gives our documents from an Arrow
              file, `tiktoken.get_encoding` an encoding of the same merges as ours, trained here before. Three constants are
              fitted to a small machine and corpus, in the script's favour: num_proc (8) is the number of cores, total_batches
              (1024) is 16, test_size (0.0005) is 0.1
    char      data/shakespeare_char/prepare.py, unchanged, with all text in one `input.txt`

Both sides write train.bin and val.bin. Each trial is looked at: in `char` the bytes of both are the same, in `bpe` the number of
tokens is (nanoGPT shuffles the documents). Wall time and CPU seconds are those of the command, its start included, with the
processes that it waited for. Prints the table and appends it to bench/results/<date>-tokenizing.md.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import hashlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import recovery

SCENARIOS = ("bpe", "char")
SCRIPTS = {
    "bpe": "data/openwebtext/prepare.py",
    "char": "data/shakespeare_char/prepare.py",
}
PACKAGES = ("tiktoken", "datasets", "numpy", "tqdm", "requests")

PEER = '''
"""Runs a script of nanoGPT with our documents and our merges. Arguments: script, documents (Arrow), merges (JSON)."""
import json, runpy, sys
import datasets, tiktoken
from tiktoken_ext.openai_public import r50k_pat_str

script, documents, merges = sys.argv[1:]
ranks = {bytes.fromhex(token): rank for token, rank in json.load(open(merges)).items()}
encoding = tiktoken.Encoding("ours", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks)})
tiktoken.get_encoding = lambda name: encoding
datasets.load_dataset = lambda *args, **more: datasets.DatasetDict(train=datasets.load_from_disk(documents))
sys.argv = [script]
runpy.run_path(script, run_name="__main__")
'''
ARROW = """
import json, sys
import datasets
datasets.Dataset.from_dict({"text": json.load(open(sys.argv[1]))}).save_to_disk(sys.argv[2])
"""


@dataclasses.dataclass(frozen=True)
class Trial:
    """Results of one run."""

    wall_s: float
    cpu_s: float
    tokens: int
    digest: str
    """Digest of train.bin and val.bin."""


@dataclasses.dataclass(frozen=True)
class Bench:
    """Paths and programs of the benchmark."""

    directory: Path
    nanogpt: Path
    python: Path
    """Python with the packages of nanoGPT's scripts."""
    cores: int

    def peer(self, scenario: str) -> Trial:
        """Run nanoGPT's script."""
        home = self._fresh("peer")
        script = home / "prepare.py"
        text = (self.nanogpt / SCRIPTS[scenario]).read_text()
        for name, value in (("num_proc", self.cores), ("total_batches", 16), ("test_size", 0.1)) if scenario == "bpe" else ():
            text, count = re.subn(rf"\b({name} ?= ?)[\d.]+", rf"\g<1>{value}", text)
            assert count == 1, f"nanoGPT's script has {count} constants {name}"
        script.write_text(text)
        arguments = [str(script)]
        if scenario == "char":
            shutil.copyfile(self.directory / "input.txt", home / "input.txt")
        else:
            runner = home / "runner.py"
            runner.write_text(PEER)
            arguments = [str(runner), str(script), str(self._documents(home)), str(self.directory / "merges.json")]
        environment = {"HF_HOME": str(home / "hf"), "HF_DATASETS_OFFLINE": "1", "TIKTOKEN_CACHE_DIR": str(home)}
        return self._timed([str(self.python), *arguments], home, environment)

    def _documents(self, home: Path) -> Path:
        """Copy the documents, because `datasets` caches results beside its files, and a trial must not use them."""
        return Path(shutil.copytree(self.directory / "documents.arrow", home / "documents.arrow"))

    def ours(self, scenario: str) -> Trial:
        """Run `outlast data prepare text`."""
        home = self._fresh("ours")
        char = scenario == "char"
        source = self.directory / ("input.txt" if char else "documents")
        tokenizer = "char" if char else str(self.directory / "tokenizer.json")
        outlast = Path(sys.executable).with_name("outlast")
        command = [str(outlast), "data", "prepare", "text", str(source), "--to", str(home / "out"), "--tokenizer", tokenizer]
        return self._timed([*command, "--val", "0.1"], home / "out", {})

    def _fresh(self, name: str) -> Path:
        path = self.directory / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    def _timed(self, command: Sequence[str], out: Path, environment: dict[str, str]) -> Trial:
        with (self.directory / "log").open("w+b") as log:
            began = time.perf_counter()
            process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})
            _, status, used = os.wait4(process.pid, 0)
            wall = time.perf_counter() - began
            cpu = used.ru_utime + used.ru_stime + orphans()
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                log.seek(0)
                raise SystemExit(f"{' '.join(command)} failed:\n{log.read().decode(errors='replace')[-3000:]}")
        bins = [(out / name).read_bytes() for name in ("train.bin", "val.bin")]
        digest = hashlib.sha256(b"".join(bins)).hexdigest()
        return Trial(wall, cpu, sum(map(len, bins)) // 2, digest)


def adopt() -> None:
    """Become the parent of orphans, whose CPU time would be lost, because Outlast's fork server outlives the command briefly.

    PR_SET_CHILD_SUBREAPER: https://man7.org/linux/man-pages/man2/prctl.2.html.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def orphans() -> float:
    """Wait for adopted orphans, and return their CPU seconds."""
    seconds = 0.0
    while True:
        try:
            *_, used = os.wait4(-1, 0)
        except ChildProcessError:
            return seconds
        seconds += used.ru_utime + used.ru_stime


def texts(source: Path | None) -> list[str]:
    """Return the documents: all text below a directory, or the standard library's modules and their tests."""
    library = source or Path(sysconfig.get_path("stdlib"))
    found = []
    for path in sorted(library.rglob("*" if source else "*.py")):
        if path.is_file() and (source or "site-packages" not in path.parts):
            try:
                found.append(path.read_bytes().decode().replace("\r\n", "\n").replace("\r", "\n"))
            except UnicodeDecodeError:
                continue
    return [text for text in found if text]


def prepared(bench: Bench, documents: Sequence[str], vocab_size: int) -> None:
    """Write the documents in the form of each side, and train the merges."""
    (bench.directory / "documents").mkdir()
    for i, text in enumerate(documents):
        (bench.directory / "documents" / f"{i:06d}.txt").write_bytes(text.encode())
    (bench.directory / "input.txt").write_bytes("".join(documents).encode())
    listed = bench.directory / "documents.json"
    listed.write_text(json.dumps(documents))
    arrow = str(bench.directory / "documents.arrow")
    subprocess.run([str(bench.python), "-c", ARROW, str(listed), arrow], check=True, capture_output=True)

    from outlast.data.prepare import tokenizer

    trained = tokenizer.train(documents, vocab_size)
    (bench.directory / "tokenizer.json").write_text(trained)
    vocabulary: dict[str, int] = json.loads(trained)["model"]["vocab"]
    byte = {character: value for value, character in byte_characters().items()}
    merges = {bytes(byte[character] for character in token).hex(): rank for token, rank in vocabulary.items()}
    (bench.directory / "merges.json").write_text(json.dumps(merges))


def byte_characters() -> dict[int, str]:
    """Return the character of each byte in a byte-level vocabulary: itself if printable, otherwise one above 255."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [value for value in range(256) if value not in seen]
    return {value: chr(value) for value in seen} | {value: chr(256 + i) for i, value in enumerate(hidden)}


def peer_python(given: Path | None) -> Path:
    """Return a Python with nanoGPT's packages, and create it if missing."""
    home = Path.home() / ".cache" / "outlast-bench" / "nanogpt"
    python = given or home / "bin" / "python"
    check = ["-c", f"import {', '.join(PACKAGES)}"]
    if not python.exists() and not given:
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *PACKAGES], check=True)
    if subprocess.run([str(python), *check], capture_output=True).returncode:
        raise SystemExit(f"{python} lacks one of {', '.join(PACKAGES)}; install them, or name another with --peer-python")
    return python


def agree(scenario: str, ours: Trial, peer: Trial) -> None:
    """Raise if the two sides did not produce the same tokens."""
    if scenario == "char" and ours.digest != peer.digest:
        raise SystemExit("char: train.bin and val.bin differ")
    if ours.tokens != peer.tokens:
        raise SystemExit(f"{scenario}: ours made {ours.tokens} tokens, nanoGPT {peer.tokens}")


def machine(python: Path) -> str:
    """Describe the machine and the versions, in a line."""
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    asked = "from importlib.metadata import version as v; print('tiktoken', v('tiktoken') + ', datasets', v('datasets'))"
    peers = subprocess.run([str(python), "-c", asked], capture_output=True, text=True, check=True).stdout.strip()
    from importlib.metadata import version

    ours = f"outlast {version('outlast')}, tokenizers {version('tokenizers')}, Python {sys.version.split()[0]}"
    return f"{len(os.sched_getaffinity(0))} cores of {model[1] if model else 'an unknown processor'}; {ours}; {peers}"


def table(results: dict[str, dict[str, list[Trial]]], size: int) -> list[str]:
    """Return a table with medians and ratios."""
    lines = [
        "| scenario | tokens | nanoGPT wall | CPU | ours wall | CPU | ours MB/s | wall, nanoGPT / ours | CPU, nanoGPT / ours |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for scenario, sides in results.items():
        peer, ours = ([(t.wall_s, t.cpu_s) for t in sides[side]] for side in ("nanoGPT", "ours"))
        (pw, pc), (ow, oc) = ([statistics.median(column) for column in zip(*side, strict=True)] for side in (peer, ours))
        ratios = sorted(p / o for (p, _), (o, _) in zip(peer, ours, strict=True))
        spread = f"{pw / ow:.2f} ({ratios[0]:.2f} ... {ratios[-1]:.2f})"
        tokens = f"{sides['ours'][0].tokens:,}"
        walls, cpus = f"{pw:.2f} s | {pc:.2f} s | {ow:.2f} s | {oc:.2f} s", f"{pc / oc:.2f}"
        lines.append(f"| {scenario} | {tokens} | {walls} | {size / ow / 1e6:.1f} | {spread} | {cpus} |")
    return lines


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, required=True, metavar="DIR", help="a clone of nanoGPT")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="2 repeats")
    parser.add_argument("--scenario", choices=SCENARIOS, action="append", help="only these (may be repeated)")
    parser.add_argument("--source", type=Path, metavar="DIR", help="text to prepare; default: the standard library and its tests")
    parser.add_argument("--vocab-size", type=int, default=16_384)
    parser.add_argument("--peer-python", type=Path, metavar="PATH", help=f"a Python with {', '.join(PACKAGES)}")
    parser.add_argument("--directory", type=Path, help="where to work; default: a temporary one")
    args = parser.parse_args()
    repeats = 2 if args.quick else args.repeats
    adopt()

    load = os.getloadavg()[0]
    documents = texts(args.source)
    size = sum(len(text.encode()) for text in documents)
    print(f"{len(documents):,} documents, {size / 1e6:.1f} MB", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="outlast-bench-tokenize-", dir=args.directory))
    results: dict[str, dict[str, list[Trial]]] = {}
    try:
        bench = Bench(directory, args.nanogpt, peer_python(args.peer_python), len(os.sched_getaffinity(0)))
        prepared(bench, documents, args.vocab_size)
        for scenario in args.scenario or SCENARIOS:
            runs = {"nanoGPT": bench.peer, "ours": bench.ours}
            results[scenario] = {side: [] for side in runs}
            for repeat in range(repeats + 1):
                done = {}
                for side in runs if repeat % 2 == 0 else reversed(runs):  # AB BA: a drift falls on both
                    done[side] = runs[side](scenario)
                    print(f"{repeat}/{repeats} {scenario:<8} {side:<8} {done[side].wall_s:.2f} s", flush=True)
                agree(scenario, done["ours"], done["nanoGPT"])
                if repeat:  # the first is not counted: files and memory that are used for the first time
                    for side, trial in done.items():
                        results[scenario][side].append(trial)
        about = machine(bench.python)
    finally:
        shutil.rmtree(directory, ignore_errors=True)

    head = f"{about}. Load before: {load:.2f}. {len(documents):,} documents, {size / 1e6:.1f} MB; {args.vocab_size:,} tokens."
    report = [f"## {time.strftime('%Y-%m-%d %H:%M')}", "", f"{head} Medians of {repeats}.", "", *table(results, size)]
    recovery.publish("tokenizing", "Tokenizing", report)


if __name__ == "__main__":
    main()
