"""The choices of a random template, the pieces of its messages, and the labels of an answer's characters."""

from random import Random

from tests.unit.random_templates.calls import all_calls, draw_json, one_call
from tests.unit.random_templates.expressions import CHANGED, EITHER, ROLES, SAME, Expr, Part, Where, constant, quote


class Pieces:
    """The choices of one template, and the pieces of its messages."""

    assistant_body: list[Part]  # in the order in which this template writes them
    assistant_end: Part

    def __init__(self, rng: Random):
        self.rng = rng
        self.number = 0
        self.macros: list[str] = []
        choose = rng.choice
        self.headers = choose(("literal", "role token", "chatml", "plain", "table"))
        self.gap = choose(("", "\n", " ", "\n\n")) if self.headers != "chatml" else "\n"
        self.end_style = choose(("token", "token", "eos", "last", "call", "none"))
        if self.end_style == "none" and self.headers not in ("literal", "role token"):
            self.end_style = "token"
        self.after = "" if self.end_style == "none" else choose(("", "\n", "\n", " ", "\n\n"))
        self.before_end = "" if self.end_style == "none" else choose(("", "", "\n"))
        self.between_only = self.after != "" and rng.random() < 0.2  # the newline stands between turns only
        self.bos = rng.random() < 0.5
        self.system = choose(("loop", "loop", "first", "all", "user"))
        self.nullable = rng.random() < 0.3
        self.reasoning = choose((None, None, "always", "last", "inserted"))
        self.key = choose(("reasoning_content", "reasoning", "thinking"))
        self.calls = choose((None, "json", "function", "call", "xml", "python", "items", "all"))
        self.calls_first = self.calls is not None and rng.random() < 0.1
        self.result = choose(("plain", "wrapped", "grouped"))
        self.tools = choose((None, "json", "function", "lines", "all", "indent"))
        self.prompt_think = choose(("", "", "<think>\n", "<think>\n\n</think>\n\n"))
        self.marked = rng.random() < 0.15
        self.style = choose(("write", "write", "write", "gather", "list", "macro"))
        self.assistant = choose(("assistant", "assistant", "model"))
        self.loop = choose(("messages", "messages", "messages[:]", "range"))
        if self.style in ("gather", "list"):
            self.marked = False  # a mark refers to the text at its place

    # Expressions

    def name(self) -> str:
        self.number += 1
        return f"v{self.number}"

    def changed(self, expr: Expr, many: int = 2, *, same: bool = False) -> Expr:
        """The expression with up to `many` random operations."""
        for _ in range(self.rng.randint(0, many)):
            form, change = self.rng.choice(SAME if same or self.rng.random() < 0.6 else CHANGED)
            inner = expr
            simple = all(letter.isalnum() or letter in "._" for letter in inner.jinja)
            jinja = form.format(inner.jinja if simple else f"({inner.jinja})")
            expr = Expr(jinja, lambda w, inner=inner, change=change: change(inner.text(w)))
        return expr

    def field(self, key: str) -> Expr:
        """A text of the message; "" if it may be null."""
        form = self.rng.choice(("m.{}", "m['{}']", "m.get('{}')")).format(key)
        if self.nullable or key != "content":
            return Expr(f"({form} or '')", lambda w: w.m.get(key) or "")
        return Expr(form, lambda w: w.m[key])

    def joined(self, exprs: list[Expr]) -> Expr:
        """A single expression for the joined texts of several expressions."""
        texts = [expr.text for expr in exprs]
        parts = [f"({expr.jinja})" for expr in exprs]
        form = self.rng.randrange(6)
        if form == 0:
            jinja = " + ".join(parts)
        elif form in (1, 2):
            jinja = " ~ ".join(parts)
        elif form == 3:
            jinja = f"[{', '.join(parts)}] | join"
        elif form == 4:
            jinja = f"'{'%s' * len(parts)}' % ({', '.join(parts)},)"
        else:
            jinja = f"'{'{}' * len(parts)}'.format({', '.join(parts)})"
        return Expr(jinja, lambda w: "".join(text(w) for text in texts))

    def part(self, expr: Expr) -> Part:
        """Statements that write an expression, in one of many forms."""
        name = self.name()
        way = self.rng.randrange(13)
        jinja = expr.jinja
        if way == 0:
            out = f"{{%- set {name} -%}}{{{{- {jinja} -}}}}{{%- endset -%}}{{{{- {name} -}}}}"
        elif way == 1:
            out = f"{{%- set {name} = {jinja} -%}}{{{{- {name} -}}}}"
        elif way == 2:
            self.macros.append(f"{{%- macro {name}(x) -%}}{{{{- x -}}}}{{%- endmacro -%}}")
            out = f"{{{{- {name}({jinja}) -}}}}"
        elif way == 3:
            self.macros.append(f"{{%- macro {name}(x, y='') -%}}{{{{- x ~ y -}}}}{{%- endmacro -%}}")
            out = f"{{{{- {name}('', {jinja}) -}}}}"
        elif way == 4:
            self.macros.append(f"{{%- macro {name}() -%}}{{{{- caller() -}}}}{{%- endmacro -%}}")
            out = f"{{%- call {name}() -%}}{{{{- {jinja} -}}}}{{%- endcall -%}}"
        elif way == 5:
            out = f"{{%- with {name} = {jinja} -%}}{{{{- {name} -}}}}{{%- endwith -%}}"
        elif way == 6:
            out = f"{{%- filter replace('zz', 'zz') -%}}{{{{- {jinja} -}}}}{{%- endfilter -%}}"
        elif way == 7:
            inside = "{{- p -}}{%- if not loop.last -%}{{- '\\n' -}}{%- endif -%}"
            out = f"{{%- for p in ({jinja}).split('\\n') -%}}{inside}{{%- endfor -%}}"
        elif way == 8:
            space = f"{{%- set {name} = namespace(text='') -%}}{{%- set {name}.text = {name}.text ~ ({jinja}) -%}}"
            out = f"{space}{{{{- {name}.text -}}}}"
        elif expr.raw and way in (10, 11):  # as template text between expressions
            out = f"{{{{- '' }}}}{expr.raw}{{{{ '' -}}}}"
        elif way == 9:
            out = f"{{{{- ({jinja}) | safe -}}}}"
        else:
            out = f"{{{{- {jinja} -}}}}"
        return Part(out, expr.text)

    def as_expr(self, part: Part) -> tuple[str, Expr]:
        """Statements that must come first, and an expression for the text that a part writes."""
        name = self.name()
        return f"{{%- set {name} -%}}{part.jinja}{{%- endset -%}}", Expr(name, part.text)

    # Headers and ends

    def role_name(self, role: str) -> str:
        return self.assistant if role == "assistant" and self.headers in ("literal", "table") else role

    def header_text(self, role: str) -> str:
        if self.headers in ("literal", "role token"):
            return f"<|{self.role_name(role)}|>{self.gap}"
        if self.headers == "chatml":
            return f"<|im_start|>{role}\n"
        if self.headers == "plain":
            return f"<|head|>{role.capitalize()}:{self.gap}"
        return (
            f"<|head|>{ {'system': 'Setting', 'user': 'Human', 'assistant': 'Bot', 'tool': 'Result'}[role] }:{self.gap}"
        )

    def header(self, role: str | None) -> Expr:
        """The header of a message of a known role, or of m.role."""
        if role is not None:
            return constant(self.header_text(role))

        def text(w: Where) -> str:
            return self.header_text(w.m["role"])

        gap = quote(self.gap)
        if self.headers == "role token":
            return Expr(self.rng.choice((f"'<|' ~ m.role ~ '|>' ~ {gap}", f"'<|' + m['role'] + '|>' + {gap}")), text)
        if self.headers == "chatml":
            return Expr(self.rng.choice(("'<|im_start|>' + m.role + '\\n'", "'<|im_start|>%s\\n' % m['role']")), text)
        if self.headers == "plain":
            return Expr(f"'<|head|>' ~ (m.role | capitalize) ~ ':' ~ {gap}", text)
        table = {role: self.header_text(role) for role in ROLES}
        pairs = ", ".join(f"{quote(key)}: {quote(value)}" for key, value in table.items())
        return Expr(f"{{{pairs}}}[m.role]", text)

    def end(self) -> Expr:
        """The text that ends a turn: for an assistant, and for other roles."""
        before = self.before_end
        if self.end_style == "token":
            return Expr(quote(before + "<|end|>"), lambda w: before + "<|end|>")
        if self.end_style == "eos":
            return Expr(f"{quote(before)} ~ eos_token", lambda w: before + "<|eos|>")
        if self.end_style == "last":
            return Expr(
                f"{quote(before)} + ('<|eos|>' if last else '<|end|>')",
                lambda w: before + ("<|eos|>" if w.last and w.m["role"] == "assistant" else "<|end|>"),
            )
        if self.end_style == "call":
            return Expr(
                f"{quote(before)} + ('<|call|>' if m.tool_calls else '<|end|>')",
                lambda w: before + ("<|call|>" if w.m.get("tool_calls") else "<|end|>"),
            )
        return Expr("''", lambda w: "")

    def after_turn(self) -> Expr:
        if self.between_only:
            return Expr(f"('' if last else {quote(self.after)})", lambda w: "" if w.last else self.after)
        return constant(self.after)

    # Answers

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
        """The labels of an assistant's text and of its end."""
        end = self.assistant_end.text(w)
        labels = [1] * len(body + end)
        if self.end_style == "last" and not w.last:  # in the last message, the same turn ends with <|eos|>
            labels[len(body + self.before_end) :] = [EITHER if self.marked else 0] * len("<|end|>")
        shown = self.prompt_think
        common = next(
            (k for k, (a, b) in enumerate(zip(body + end, shown, strict=False)) if a != b),
            min(len(shown), len(body + end)),
        )
        # The prompt already shows text of the template that both share; a content that happens to begin like the prompt
        # may have either label.
        written = len("<think>\n") if self.reasoning and self.assistant_body[0].text(w) else 0
        for k in range(common):
            labels[k] = EITHER if common < len(shown) and k >= written else 0
        return labels
