"""`$(NAME)` in `args` and `env`."""

from __future__ import annotations

import pytest

from outlast.job.spec import substitution

ENVIRON = {"HOME": "/root", "A": "of the shell"}


@pytest.mark.parametrize(("text", "shown"), [
    ("$(HOME)/x:$(HOME)", "/root/x:/root"), ("$$(HOME)", "$(HOME)"), ("$(NOWHERE)", "$(NOWHERE)"),
    ("$HOME a$$b $() $(HOME", "$HOME a$$b $() $(HOME"),
])  # fmt: skip
def test_a_reference_becomes_its_value(text: str, shown: str) -> None:
    assert substitution.replaced(text, ENVIRON) == shown


def test_variables_refer_to_each_other_in_any_order_and_to_those_around_them() -> None:
    env = {"C": "$(B)$(B)", "B": "$(A)/b", "A": "$(HOME)", "D": "$$(A)"}
    found = substitution.values(env, ENVIRON)
    assert found == {"C": "/root/b/root/b", "B": "/root/b", "A": "/root", "D": "$(A)"}
    assert substitution.values(env, {**ENVIRON, **found}) == found, "whoever is given the values finds the same again"


def test_variables_that_refer_to_themselves_stay_as_they_are() -> None:
    env = {"PATH": "/opt:$(PATH)", "A": "$(B)", "B": "$(A)", "C": "$(A) $(HOME)"}
    assert substitution.circular(env) == {"PATH", "A", "B"}
    assert substitution.values(env, {**ENVIRON, "PATH": "/bin"}) == {**env, "C": "$(A) /root"}
