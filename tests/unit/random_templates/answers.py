"""The assistant's turns of a random template, and which of their characters are supervised."""

from tests.unit.random_templates.calls import all_calls, draw_json, one_call
from tests.unit.random_templates.expressions import EITHER, Part, Where, constant
from tests.unit.random_templates.pieces import Pieces


class Answers(Pieces):
    """Reasoning, content and calls of a message."""

    assistant_body: list[Part]  # as the template that was drawn writes it
    assistant_end: Part

    def reasoning_part(self) -> Part:
        thought = self.changed(self.field(self.key))
        write = self.part(self.joined([constant("<think>\n"), thought, constant("\n</think>\n\n")]))
        key, kind = self.key, self.reasoning
        shown = {"always": f"m.{key}", "last": f"m.{key} and index > ns.question", "inserted": "index > ns.question"}[
            kind
        ]

        def text(w: Where) -> str:
            questions = [i for i, m in enumerate(w.messages) if m["role"] == "user"]
            after = w.index > (questions[-1] if questions else -1)
            is_shown = {"always": w.m.get(key), "last": w.m.get(key) and after, "inserted": after}[kind]
            return write.text(w) if is_shown else ""

        return Part(f"{{%- if {shown} -%}}{write.jinja}{{%- endif -%}}", text)

    def calls_part(self) -> Part:
        json = draw_json(self.rng)
        if self.calls == "all":
            return all_calls(self.rng, json)
        one = one_call(self.calls, self.rng, json)
        edges = (("<tool_call>\n", "\n</tool_call>"), ("\n[", "]"), ("<tool_call>", "</tool_call>\n"))
        opening, closing = self.rng.choice(edges)
        opened, closed = self.part(constant(opening)), self.part(constant(closing))
        jinja = f"{{%- for c in m.tool_calls or [] -%}}{opened.jinja}{one.jinja}{closed.jinja}{{%- endfor -%}}"
        return Part(jinja, lambda w: "".join(opening + one.text(c) + closing for c in w.m.get("tool_calls") or []))

    def body(self) -> list[Part]:
        content = self.part(self.changed(self.field("content")))
        if self.reasoning is None and self.calls is None and self.rng.random() < 0.3:
            content = self.part(self.joined([self.changed(self.field("content")), constant("")]))
        parts = [self.reasoning_part()] if self.reasoning else []
        calls = [self.calls_part()] if self.calls else []
        return [*parts, *calls, content] if self.calls_first else [*parts, content, *calls]

    def labels_of(self, body: str, w: Where) -> list[int]:
        """Labels of an assistant's text and end."""
        end = self.assistant_end.text(w)
        labels = [1] * len(body + end)
        if self.end_style == "last" and not w.last:  # in last place the same turn ends with <|eos|>
            labels[len(body + self.before_end) :] = [EITHER if self.marked else 0] * len("<|end|>")
        shown = self.prompt_think
        common = next(
            (k for k, (a, b) in enumerate(zip(body + end, shown, strict=False)) if a != b),
            min(len(shown), len(body + end)),
        )
        # The template's text in both is shown; a text that happens to begin like the prompt may have either.
        written = len("<think>\n") if self.reasoning and self.assistant_body[0].text(w) else 0
        for k in range(common):
            labels[k] = EITHER if common < len(shown) and k >= written else 0
        return labels
