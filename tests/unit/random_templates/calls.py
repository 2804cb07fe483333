"""The forms in which templates write calls of tools: Jinja statements, and Python that gives the same text."""

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from tests.unit.random_templates.expressions import Part, Where, tojson

Call = dict[str, Any]


class OneCall(NamedTuple):
    """Statements that write the call `c`, and Python that gives the same text."""

    jinja: str
    text: Callable[[Call], str]


class Json(NamedTuple):
    """A form of JSON: the filter of Jinja, and the options of json.dumps."""

    name: str
    options: dict[str, Any]

    def text(self, value: Any) -> str:
        return tojson(value, **self.options)


def draw_json(rng: Random) -> Json:
    return rng.choice(
        (
            Json("tojson", {}),
            Json("tojson(ensure_ascii=False)", {}),
            Json("tojson(ensure_ascii=True)", {"ensure_ascii": True}),
        )
    )


def all_calls(rng: Random, json: Json) -> Part:
    """All calls, written by one expression."""
    form = rng.randrange(3)
    jinja = (
        f"{{{{- m.tool_calls | {json.name} -}}}}",
        "{{- m.tool_calls | map(attribute='function') | map('tojson') | join(', ') -}}",
        "{{- m.tool_calls | map(attribute='function') | map(attribute='name') | join(',') -}}",
    )[form]

    def text(w: Where) -> str:
        calls = w.m.get("tool_calls") or []
        functions = [call["function"] for call in calls]
        names = ",".join(function["name"] for function in functions)
        return (json.text(calls), ", ".join(map(tojson, functions)), names)[form] if calls else ""

    return Part(f"{{%- if m.tool_calls -%}}{jinja}{{%- endif -%}}", text)


def one_call(kind: str, rng: Random, json: Json) -> OneCall:
    """One call in the format `kind`."""
    if kind == "function":
        return OneCall(f"{{%- set f = c.function -%}}{{{{- f | {json.name} -}}}}", lambda c: json.text(c["function"]))
    if kind == "call":
        return OneCall(f"{{{{- (c | {json.name}) ~ '' -}}}}", json.text)
    return {"json": _json, "xml": _xml, "python": _python, "items": _items}[kind](rng, json)


def _json(rng: Random, json: Json) -> OneCall:
    name = '{{- \'{"name": "\' + c.function.name + \'", "arguments": \' -}}'

    def text(c: Call) -> str:
        return f'{{"name": "{c["function"]["name"]}", "arguments": {json.text(c["function"]["arguments"])}}}'

    return OneCall(f"{name}{{{{- c.function.arguments | {json.name} -}}}}{{{{- '}}' -}}}}", text)


def _xml(rng: Random, json: Json) -> OneCall:
    forms = (f"v if v is string else (v | {json.name})", f"v | {json.name} if v is not string else v")
    value = rng.choice(forms)
    pair = f"{{{{- '<arg_key>' ~ k ~ '</arg_key><arg_value>' -}}}}{{{{- {value} -}}}}{{{{- '</arg_value>' -}}}}"
    items = rng.choice(("c.function.arguments.items()", "c.function.arguments | items"))

    def text(c: Call) -> str:
        values = {k: v if isinstance(v, str) else json.text(v) for k, v in c["function"]["arguments"].items()}
        pairs = [f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in values.items()]
        return "".join([c["function"]["name"], "\n", *pairs])

    return OneCall(f"{{{{- c.function.name ~ '\\n' -}}}}{{%- for k, v in {items} -%}}{pair}{{%- endfor -%}}", text)


def _python(rng: Random, json: Json) -> OneCall:
    pair = f"{{{{- k ~ '=' ~ (v | {json.name}) -}}}}{{%- if not loop.last -%}}{{{{- ', ' -}}}}{{%- endif -%}}"
    pairs = f"{{%- for k, v in c['function']['arguments'].items() -%}}{pair}{{%- endfor -%}}"

    def text(c: Call) -> str:
        arguments = ", ".join(f"{k}={json.text(v)}" for k, v in c["function"]["arguments"].items())
        return f"{c['function']['name']}({arguments})"

    return OneCall(f"{{{{- c['function']['name'] + '(' -}}}}{pairs}{{{{- ')' -}}}}", text)


def _items(rng: Random, json: Json) -> OneCall:
    value = rng.choice(("c.function.arguments[k]", "c.function.arguments[k] | string"))
    pair = f"{{{{- k + ': ' -}}}}{{{{- {value} -}}}}{{{{- ';' -}}}}"

    def text(c: Call) -> str:
        return f"{c['function']['name']} " + "".join(f"{k}: {v};" for k, v in c["function"]["arguments"].items())

    jinja = f"{{{{- c.function.name ~ ' ' -}}}}{{%- for k in c.function.arguments -%}}{pair}{{%- endfor -%}}"
    return OneCall(jinja, text)
