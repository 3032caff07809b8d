"""Commands that are no more say what to do now."""

import pytest
import typer

from outlast.cli import commands, gone, main


@pytest.mark.parametrize(("args", "gone_is_said"), [
    ("cluster create workshop", True), ("cluster create", True), ("cluster", False), ("cluster delete x", False),
    ("install --etcd", True), ("install --etcd=3 -n x", True), ("install -n x", False),
])  # fmt: skip
def test_a_command_or_an_option_that_is_gone_is_known_by_its_words(args, gone_is_said, monkeypatch):
    monkeypatch.setattr(gone, "GONE", {"cluster create": "eksctl create cluster -f FILE makes it", "install --etcd": "x"})
    assert bool(gone.sentence(args.split())) is gone_is_said


def test_it_ends_with_one_sentence_and_the_exit_code_of_wrong_use(monkeypatch, capsys):
    monkeypatch.setattr(gone, "GONE", {"cluster create": "eksctl create cluster -f FILE makes it"})
    with pytest.raises(SystemExit) as end:
        main(["cluster", "create", "workshop"])
    assert end.value.code == 2
    assert capsys.readouterr().err == "Error: outlast cluster create has been removed: eksctl create cluster -f FILE makes it\n"


def test_of_two_entries_the_one_that_says_more_is_taken():
    assert gone.sentence(["cluster", "create", "x"]).startswith("outlast cluster create has been removed")
    assert gone.sentence(["cluster", "--help"]).startswith("outlast cluster has been removed")


def test_nothing_that_is_there_is_called_gone():
    program = typer.main.get_command(commands.app)
    for entry in gone.GONE:
        there, options = program, set()
        for word in entry.split():
            if word.startswith("-"):
                options.add(word)
            elif there is not None:
                there = getattr(there, "commands", {}).get(word)
        if there is not None:
            known = {option for parameter in there.params for option in parameter.opts}
            assert options - known, entry
