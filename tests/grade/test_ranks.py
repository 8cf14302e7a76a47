"""What is read of that which ranks send."""

import io
import pickle

import pytest
from _grade import ranks

from labs.workers.outcomes import Kind


class ByGetattr:
    """Pickled as Python 3.11.2 pickles a member of an enum."""

    def __init__(self, *asked):
        self._asked = asked

    def __reduce__(self):
        return getattr, self._asked


def read(value):
    return ranks._Unpickler(io.BytesIO(pickle.dumps(value))).load()


def test_a_member_of_an_enum_is_read():
    member = next(iter(Kind))
    assert read(member) is member
    assert read(ByGetattr(Kind, member.name)) is member


@pytest.mark.parametrize("asked", [(Kind, "mro"), (Kind, "__class__"), ("text", "format")])
def test_whatever_else_getattr_would_reach_is_refused(asked, monkeypatch):
    said = []
    monkeypatch.setattr(ranks.sys, "audit", lambda *event: said.append(event))
    with pytest.raises((KeyError, TypeError)):
        read(ByGetattr(*asked))
    assert said == [("workbook.refused",
                     "sends what runs code when it is read, builtins.getattr")]
