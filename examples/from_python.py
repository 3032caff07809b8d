"""Train on this machine, lose a worker on the way, and say what that cost, from a program with types:

python examples/from_python.py
"""

import argparse
from pathlib import Path

import outlast


def started(script: Path, epochs: int) -> outlast.Run:
    job = outlast.Job(script=script, args=[f"--epochs={epochs}"], workers=(2, 1, 2), checkpoint={"every": "20 steps"})
    return job.run(fresh=True)


def cost_s(run: outlast.Run) -> float:
    """Training time that all failures have cost, in seconds."""
    return sum(failure.lost.seconds for failure in run.lost if failure.lost)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=40)
    args = parser.parse_args()
    with started(Path(__file__).with_name("exact.py"), args.epochs) as run:
        run.wait(step=50, timeout="5m")
        print(run.chaos("kill-worker"))
        try:
            status = run.wait()
        except outlast.Failed as error:
            raise SystemExit(f"{error.status.state} at step {error.status.step}") from error
    for line in run.logs(tail=1):
        print(f"worker {line.worker}: {line.text}")
    newest: int | None = status.checkpoint.step if status.checkpoint else None
    print(f"{status.state} at step {status.step}, checkpoint {newest}, {cost_s(run):.1f} s lost, goodput {run.goodput}")


if __name__ == "__main__":
    main()
