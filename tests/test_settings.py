"""A setting says in one sentence what it may be, whatever it is given."""

from __future__ import annotations

import re

import pytest

from st_reba.settings import Setting, choice, described, flag, optional, whole

SETTINGS = {
    "whole": (whole("count", 1, 3), [1, 3], [0, 4, 2.0, True, "2", None, [2]], "give a whole number from 1 to 3."),
    "open": (whole("count", 0, says="give 0 or more."), [0, 10**12], [-1, 1.5], "give 0 or more."),
    "flag": (flag("on"), [True, False], [1, 0, "yes", None], "use True or False."),
    "choice": (choice("way", "a", "b", "c"), ["a", "c"], ["d", 1, ["a"], None], 'use "a", "b" or "c".'),
    "optional": (optional(whole("count", 1, 3)), [None, 2], [0, False], "give a whole number from 1 to 3."),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting(setting):
    declared, allowed, refused, says = SETTINGS[setting]
    assert isinstance(declared, Setting)
    for value in allowed:
        assert declared.check(value) is value
    for value in refused:
        with pytest.raises(ValueError, match="^" + re.escape(f"{declared.name}={value!r}: {says}") + "$"):
            declared.check(value)


def test_the_settings_of_a_module():
    class Module:
        count, way = 2, "a"

    assert described(Module(), ["count", "way"]) == "count=2, way='a'"
