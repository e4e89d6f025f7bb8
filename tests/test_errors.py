import pickle

import pytest

from bigunet import errors
from bigunet.errors import BigUNetError, ShapeError, fail


def test_an_error_says_rule_value_and_remedy():
    with pytest.raises(ShapeError) as seen:
        fail(ShapeError, rule="a tile is even", got=3, remedy="Use 4.")
    assert str(seen.value) == "a tile is even; got 3. Use 4."
    assert (seen.value.rule, seen.value.got, seen.value.remedy) == ("a tile is even", 3, "Use 4.")


def test_an_error_survives_the_way_between_processes():
    error = pickle.loads(pickle.dumps(ShapeError("a rule", 3, "A remedy.")))
    assert type(error) is ShapeError
    assert str(error) == "a rule; got 3. A remedy."


@pytest.mark.parametrize("name", [n for n in errors.__all__ if n != "fail"])
def test_every_error_is_ours(name):
    assert issubclass(getattr(errors, name), BigUNetError)
