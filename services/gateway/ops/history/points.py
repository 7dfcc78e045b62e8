"""A ring of points in time, each with a number for each column, and further columns for each engine. Pure."""

import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence


class Columns:
    """Numbers of the last `capacity` points. What was not set is NaN."""

    def __init__(self, names: Sequence[str], capacity: int) -> None:
        self._columns = {name: array("d", [math.nan]) * capacity for name in names}

    def set(self, place: int, values: Mapping[str, float | None]) -> None:
        """Overwrites all numbers of one place of the ring; a missing value, or None, becomes NaN."""
        for name, column in self._columns.items():
            value = values.get(name)
            # Six digits are enough for a chart, and make the answers half as long.
            column[place] = math.nan if value is None else float(f"{value:.6g}")

    def read(self, places: Sequence[slice]) -> dict[str, list[float]]:
        """Returns the numbers of each column at these places, in their order."""
        return {name: [x for part in places for x in column[part]] for name, column in self._columns.items()}


class Points:
    """The points, the oldest first. Times must not decrease."""

    def __init__(self, names: Sequence[str], group_names: Sequence[str], *, capacity: int, groups_max: int) -> None:
        """`group_names`: the columns that each group (engine) has. The groups gone longest give way to new ones."""
        self._capacity, self._groups_max, self._group_names = capacity, groups_max, group_names
        self._time = array("d", [0.0]) * capacity
        self._columns = Columns(names, capacity)
        self._groups: dict[str, Columns] = {}
        """The group that has been without values for the longest time comes first."""
        self._added = 0

    def add(self, time: float, values: Mapping[str, float | None], groups: Mapping[str, Mapping[str, float]]) -> None:
        """Adds a point. `groups`: values of the groups that exist now; more than `groups_max` are left out."""
        place = self._added % self._capacity
        self._time[place] = time
        self._columns.set(place, values)
        for name in [*groups][: self._groups_max]:
            columns = self._groups.pop(name, None)
            self._groups[name] = columns or Columns(self._group_names, self._capacity)
        while len(self._groups) > self._groups_max:
            del self._groups[next(iter(self._groups))]
        for name, columns in self._groups.items():
            columns.set(place, groups.get(name, {}))
        self._added += 1

    def since(self, time: float) -> tuple[list[float], dict[str, list[float]], dict[str, dict[str, list[float]]]]:
        """Returns times, values and values of groups of the points that are later than `time`."""
        places = self._places(0)
        times = [x for part in places for x in self._time[part]]
        first = bisect_right(times, time)
        places = self._places(first)
        groups = {name: columns.read(places) for name, columns in self._groups.items()}
        return times[first:], self._columns.read(places), groups

    def _places(self, first: int) -> list[slice]:
        """Returns the places of the ring that have points, without the `first` oldest ones."""
        count = min(self._added, self._capacity) - first
        end = self._added % self._capacity
        if count <= end:
            return [slice(end - count, end)]
        return [slice(self._capacity - (count - end), self._capacity), slice(0, end)]
