"""Answers questions from their text alone, with one regular expression or loop for each task."""

import json
import re
from collections.abc import Callable

CITIES = {  # landmarks that the suites know; written again here
    "Rome": "Colosseum", "Paris": "Eiffel", "Berlin": "Brandenburg", "Moscow": "Kremlin", "Athens": "Acropolis",
    "Barcelona": "Sagrada", "New York": "Liberty", "London": "Big Ben", "Istanbul": "Hagia", "Copenhagen": "Mermaid",
    "San Francisco": "Golden Gate", "Dubai": "Khalifa", "Beijing": "Forbidden", "Brussels": "Atomium",
    "Madrid": "Prado", "Venice": "Rialto",
}  # fmt: skip


def parts(content: str) -> tuple[list[str], str]:
    """The lines before the question, and the question."""
    *lines, question = content.split("\n")
    return lines, question


def one(options: list[str]) -> str:
    (only,) = options
    return only


def password(content: str) -> str:
    lines, question = parts(content)
    key = one(re.findall(r"password of (.+)\?", question))
    return one([line.split()[-1][:-1] for line in lines if line.startswith(f"The password of {key} is ")])


def passwords(content: str) -> str:
    lines, question = parts(content)
    keys = re.split(", | and ", one(re.findall(r"passwords of (.+), in this order", question)))
    known = dict(re.findall(r"The password of (.+) is (\d+)\.", "\n".join(lines)))
    return ", ".join(known[key] for key in keys)


def values(content: str) -> str:
    lines, question = parts(content)
    key = one(re.findall(r"passwords of (.+), in the order", question))
    return ", ".join(line.split()[-1][:-1] for line in lines if f"of {key} is " in line)


def association(content: str) -> str:
    lines, question = parts(content)
    landmark = CITIES[one(re.findall(r"lives in (.+)\?", question))]
    return one([line.split()[0] for line in lines if landmark in line])


def tracing(content: str) -> str:
    lines, question = parts(content)
    known: dict[str, str] = {}
    for line in lines:
        if found := re.match(r"The variable (\w+) gets the value (?:of )?(\w+)\.", line):
            known[found[1]] = known.get(found[2], found[2])
    return known[one(re.findall(r"variable (\w+)\?", question))]


def counting(content: str) -> str:
    return str(sum("A bell rings in" in line for line in parts(content)[0]))


def documents(content: str) -> str:
    lines, question = parts(content)
    key = one(re.findall(r"keeper of (.+)\?", question))
    person = one([found[1] for line in lines if (found := re.search(f"keeper of {key} is ([^.]+)\\.", line))])
    return one([line.split()[-1][:-1] for line in lines if f"office of {person} stands" in line])


def code(content: str) -> str:
    module, _, question = content.partition("\n\n")
    function = one(re.findall(r"does (\w+)\(\)", question))
    constant = one(re.findall(rf"def {function}\(\):\n    return (\w+)", module))
    return one(re.findall(rf"^{constant} = (\d+)$", module, re.MULTILINE))


def records(content: str) -> str:
    lines, question = parts(content)
    content = "\n".join(lines)
    listed = json.loads(content[content.index("[") :])
    key = one(re.findall(r"the id (\w+)\?", question))
    return str(one([record["shelf"] for record in listed if record is not None and record["id"] == key]))


SOLVERS: dict[str, Callable[[str], str]] = {
    "needle": password, "needles": passwords, "keys": password, "values": values, "association": association,
    "tracing": tracing, "counting": counting, "documents": documents, "code": code, "records": records,
}  # fmt: skip
