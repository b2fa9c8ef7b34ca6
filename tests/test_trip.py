"""The trip of a call through the package never gets longer: ceilings of what `trip.py` counts."""

from __future__ import annotations

import re
import warnings

import processes
import pytest
import torch
import trip

from flashtile.problem import dtype_name

pytestmark = pytest.mark.slow

# They may only fall: whoever shortens a trip writes the new number here.
CEILINGS = {
    "cpu": {
        "first": trip.Counts(files=17, functions=74, moves=35),
        "repeated": trip.Counts(files=12, functions=31, moves=16),
    },
    "cache": {
        "first": trip.Counts(files=20, functions=100, moves=50),
        "repeated": trip.Counts(files=17, functions=55, moves=26),
    },
    "context": {
        "first": trip.Counts(files=23, functions=179, moves=245),
        "repeated, with backward": trip.Counts(files=17, functions=110, moves=123),
    },
}


@pytest.mark.parametrize("call", trip.CALLS)
def test_no_trip_is_longer_than_its_ceiling(call):
    alone = call != "context"
    table = processes.python(trip.__file__, call).stdout if alone else trip.of_ranks()
    rows = re.findall(r"^(.*\S) +(\d+) +(\d+) +(\d+)$", table, re.MULTILINE)
    counted = {what: trip.Counts(*map(int, counts)) for what, *counts in rows}
    assert counted.keys() == CEILINGS[call].keys()
    for what, ceiling in CEILINGS[call].items():
        for name, most in ceiling._asdict().items():
            count = getattr(counted[what], name)
            assert count <= most, (
                f"{call}, {what}: {count} {name}, at most {most}; compare the lists of "
                f"`python tests/trip.py {call} --list` before and after the change"
            )
            if count < most:
                warnings.warn(
                    f"{call}, {what}: {count} {name}; lower the ceiling {most}", stacklevel=1
                )


def test_a_trip_counts_functions_once_and_moves_every_time():
    one, two, three = (
        trip.Entered(file, name, 1) for file, name in (("a", "one"), ("b", "two"), ("a", "three"))
    )
    assert trip.Counts.of([one, three, two, one, one]) == (2, 3, 2)
    assert trip.Counts.of([]) == (0, 0, 0)


def test_a_trip_has_functions_of_the_package_only():
    entered = trip.traced(lambda: sorted(map(dtype_name, (torch.half, torch.int))))
    assert [(stop.file, stop.name) for stop in entered] == [("problem.py", "dtype_name")] * 2
