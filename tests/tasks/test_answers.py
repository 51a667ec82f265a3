"""An answer states a value only if the value ends there."""

import pytest

from remanence.tasks.answers import contains_value


@pytest.mark.parametrize(
    "said",
    ["136", " 136.", "136 miles", "It is 136, not 7", "(136)", "136\n", "136.\n5", "Number 136", "7, 136, 9"],
)
def test_a_value_that_ends(said):
    assert contains_value(said, "136")


@pytest.mark.parametrize(
    "said", ["13608", "8136", "136.5", "2.136", "136,000", "9,136", "136th", "a136", "13", "", "136-7"]
)
def test_a_value_that_goes_on_or_is_part_of_another(said):
    assert not contains_value(said, "136")


def test_words_and_codes():
    assert contains_value("The car is Red.", "red") and not contains_value("The bored owner", "red")
    code = "0fd1-4a7b"
    assert (
        contains_value(f"is {code}.", code)
        and not contains_value(f"is {code}-9", code)
        and not contains_value(f"is {code}3", code)
    )
