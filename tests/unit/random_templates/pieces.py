"""A random template's choices, and the pieces that all its messages are made of: texts, headers and ends."""

from random import Random

from tests.unit.random_templates.expressions import CHANGED, ROLES, SAME, Expr, Part, Where, constant, quote


class Pieces:
    """The choices of one template."""

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
        self.between_only = self.after != "" and rng.random() < 0.2  # the newline only between turns
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
            self.marked = False  # a mark is about what is written at its place

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
        """One expression of several."""
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
        """Statements that write an expression in one of many ways."""
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
        elif expr.raw and way in (10, 11):  # as data between expressions
            out = f"{{{{- '' }}}}{expr.raw}{{{{ '' -}}}}"
        elif way == 9:
            out = f"{{{{- ({jinja}) | safe -}}}}"
        else:
            out = f"{{{{- {jinja} -}}}}"
        return Part(out, expr.text)

    def as_expr(self, part: Part) -> tuple[str, Expr]:
        """Statements to come first, and an expression of what a part writes."""
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
        """What ends a turn: of an assistant, or of others."""
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
