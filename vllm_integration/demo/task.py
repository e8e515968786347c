"""The edit that the demo asks for: an original file, instructions, and the edited file.

`EDITED` is `ORIGINAL` with `EDITS` applied one after another, so that the prompt and the expected answer cannot
drift apart.
"""

from __future__ import annotations

import json
from functools import reduce

FILE_NAME = "garden.py"

ORIGINAL = '''\
"""Plan the watering of a small garden."""

from dataclasses import dataclass, field

DRY = 0.30
WET = 0.80
LITRES = 4.5


@dataclass
class Bed:
    name: str
    plants: int
    level: float
    covered: bool = False

    def need(self):
        """Litres that bring this bed to the middle of its range."""
        middle = (DRY + WET) / 2
        missing = max(0.0, middle - self.level)
        return round(missing * LITRES * self.plants, 1)


@dataclass
class Tank:
    capacity: float
    level: float = 0.0

    def fill(self, amount):
        self.level = min(self.capacity, self.level + amount)

    def draw(self, amount):
        if amount > self.level:
            raise ValueError(f"only {self.level} litres left, {amount} wanted")
        self.level -= amount
        return amount


@dataclass
class Garden:
    tank: Tank
    beds: list = field(default_factory=list)

    def pick(self):
        """The driest bed that is below the limit, or None."""
        thirsty = [bed for bed in self.beds if bed.level < DRY]
        return min(thirsty, key=lambda bed: bed.level, default=None)

    def export(self):
        """Write the beds in the format of the old controller."""
        rows = []
        for bed in self.beds:
            flag = "C" if bed.covered else "O"
            rows.append(f"{bed.name};{bed.plants};{flag}")
        return "\\n".join(rows)

    def water(self):
        """Water beds, driest first, until none is dry or the tank is empty."""
        done = []
        bed = self.pick()
        while bed is not None and self.tank.level > 0:
            amount = self.tank.draw(min(bed.need(), self.tank.level))
            bed.level += amount / (bed.plants * LITRES)
            done.append(bed.name)
            bed = self.pick()
        return done


def main():
    garden = Garden(Tank(capacity=60.0, level=35.0))
    garden.beds.append(Bed("tomatoes", plants=6, level=0.22))
    garden.beds.append(Bed("basil", plants=4, level=0.28, covered=True))
    garden.beds.append(Bed("peppers", plants=5, level=0.51))
    for name in garden.water():
        print(f"watered {name}")
    print(f"{garden.tank.level:.1f} litres left")


if __name__ == "__main__":
    main()
'''


#: What is asked for, and which text becomes which, wherever it occurs.
EDITS = (
    ("change the constant DRY to 0.35", "DRY = 0.30", "DRY = 0.35"),
    (
        "delete the method export, the old controller is gone",
        ORIGINAL[ORIGINAL.index("    def export(") : ORIGINAL.index("    def water(")],
        "",
    ),
    ("rename the method pick to driest", "pick()", "driest()"),
    ("rename the method pick to driest", "def pick(self)", "def driest(self)"),
    (
        "after draw, insert a method days_left(self, daily) into Tank",
        """\
        self.level -= amount
        return amount
""",
        '''\
        self.level -= amount
        return amount

    def days_left(self, daily):
        """Whole days the tank lasts when `daily` litres leave it every day."""
        if daily <= 0:
            raise ValueError(f"daily use must be positive, not {daily}")
        return int(self.level // daily)
''',
    ),
    (
        "print the days left at the end of main",
        """    print(f"{garden.tank.level:.1f} litres left")\n""",
        """\
    print(f"{garden.tank.level:.1f} litres left")
    print(f"enough for {garden.tank.days_left(daily=4)} days")
""",
    ),
)

EDITED = reduce(lambda text, edit: text.replace(edit[1], edit[2]), EDITS, ORIGINAL)

#: Each once: a rename is two edits.
INSTRUCTIONS = list(dict.fromkeys(instruction for instruction, _, _ in EDITS))
_NUMBERED = "\n".join(f"{number}. {text}" for number, text in enumerate(INSTRUCTIONS, start=1))
_REQUEST = f"Here is {FILE_NAME}:\n\n{ORIGINAL}\nEdit it:\n{_NUMBERED}\n\n"
PROMPT = f"{_REQUEST}Answer with the whole edited file and nothing else: no Markdown fence, no explanation."
MESSAGES = [{"role": "user", "content": PROMPT}]

#: The same edit as an agent writes it: the text in a JSON string, whose tokens the prompt does not hold.
CALL_PROMPT = f"{_REQUEST}Answer with a JSON call of write_file(path, content) and nothing else."
CALL = json.dumps({"name": "write_file", "arguments": {"path": FILE_NAME, "content": EDITED}})
CALL_MESSAGES = [{"role": "user", "content": CALL_PROMPT}]
