"""A whole random template: its Jinja text, and its rendering with labels in Python alone."""

from tests.unit.fixtures.model_folder import Tokens
from tests.unit.random_templates.expressions import EITHER, ROLES, Expr, Message, Part, Where, constant, tojson
from tests.unit.random_templates.pieces import Pieces


class Draw(Pieces):
    """One random template."""

    def result_parts(self) -> tuple[list[Part], Part]:
        """The header and the content of a tool's message, and its end."""
        content = self.changed(self.field("content"))
        wrapped = self.joined([constant("<tool_response>"), content, constant("</tool_response>")])
        after = self.after_turn()
        end = self.end_of_others()
        if self.result == "grouped" and self.end_style != "none":
            head = self.part(self.header("tool"))
            tail = self.part(self.joined([end, after]))
            header = Part(
                f"{{%- if previous != 'tool' -%}}{head.jinja}{{%- endif -%}}",
                lambda w: head.text(w) if w.role_at(w.index - 1) != "tool" else "",
            )
            ending = Part(
                f"{{%- if following != 'tool' -%}}{tail.jinja}{{%- endif -%}}",
                lambda w: tail.text(w) if w.role_at(w.index + 1) != "tool" else "",
            )
            return [header, self.part(wrapped)], ending
        body = wrapped if self.result == "wrapped" else content
        return [self.part(self.header("tool")), self.part(body)], self.part(self.joined([end, after]))

    def end_of_others(self) -> Expr:
        """The end of a message of another role.  An end that depends on `last` considers the assistant only."""
        if self.end_style == "none":
            return constant("")
        return constant(self.before_end + ("<|eos|>" if self.end_style == "eos" else "<|end|>"))

    def compose(self) -> None:
        """Draws all parts."""
        known = self.headers == "literal" or self.rng.random() < 0.5
        self.assistant_header = self.part(self.header("assistant" if known else None))
        self.assistant_body = self.body()
        self.assistant_end = self.part(self.end())
        self.assistant_after = self.part(self.after_turn())
        self.tool_body, self.tool_end = self.result_parts()
        self.others, end = {}, self.end_of_others()
        for role in ("system", "user"):
            header = self.header(role if self.headers == "literal" or self.rng.random() < 0.5 else None)
            content = self.changed(self.field("content"))
            pieces = [header, content, end, self.after_turn()]
            if role == "user" and self.system == "user":
                system = Expr(
                    "(system ~ '\\n\\n' if first and system else '')",
                    lambda w: f"{self.hoisted}\n\n" if w.first and self.hoisted else "",
                )
                pieces.insert(1, system)
            is_one = self.rng.random() < 0.5
            self.others[role] = [self.part(piece) for piece in ([self.joined(pieces)] if is_one else pieces)]
        self.system_text = self.changed(Expr("system", lambda w: self.hoisted), same=True)
        self.system_block = self.part(
            self.joined([constant(self.header_text("system")), self.system_text, end, constant(self.after)])
        )
        self.prompt = self.part(constant(self.header_text("assistant") + self.prompt_think))

    def template(self) -> str:
        """The Jinja text."""
        gather = self.style in ("gather", "list")

        def write(part: Part) -> str:
            """Writes the part in place, or collects it to be written later."""
            if not gather:
                return part.jinja
            before, expr = self.as_expr(part)
            if self.style == "gather":
                return f"{before}{{%- set ns.out = ns.out ~ {expr.jinja} -%}}"
            return f"{before}{{%- set ns.out = ns.out + [{expr.jinja}] -%}}"

        body = "".join(write(part) for part in [*self.assistant_body, self.assistant_end])
        if self.marked:
            body = f"{{%- generation -%}}{body}{{%- endgeneration -%}}"
        answer = f"{write(self.assistant_header)}{body}{write(self.assistant_after)}"
        result = "".join(write(part) for part in [*self.tool_body, self.tool_end])
        turn = f"{{%- if m.role == 'assistant' -%}}{answer}{{%- elif m['role'] == 'tool' -%}}{result}"
        for role, parts in self.others.items():
            turn += f"{{%- elif m.role == '{role}' -%}}{''.join(write(part) for part in parts)}"
        turn += "{%- endif -%}"
        start = "{%- set ns = namespace(question=-1, out=" + ("[]" if self.style == "list" else "''") + ") -%}"
        first = write(Part("{{- bos_token -}}", lambda w: "")) if self.bos else ""
        first += "{%- set system = '' -%}{%- set turns = messages -%}"
        if self.system in ("first", "user"):
            first += (
                "{%- if messages[0].role == 'system' -%}{%- set system = messages[0].content -%}"
                "{%- set turns = messages[1:] -%}{%- endif -%}"
            )
        elif self.system == "all":
            first += (
                "{%- set system = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') "
                "| join('\\n') -%}"
                "{%- set turns = messages | rejectattr('role', 'equalto', 'system') | list -%}"
            )
        if self.system in ("first", "all"):
            first += f"{{%- if system -%}}{write(self.system_block)}{{%- endif -%}}"
        if self.tools:
            first += f"{{%- if tools -%}}{write(self.tools_part)}{{%- endif -%}}"
        first += "{%- for m in turns -%}{%- if m.role == 'user' -%}{%- set ns.question = loop.index0 -%}{%- endif -%}"
        first += "{%- endfor -%}"
        names = (
            "{%- set index = loop.index0 -%}{%- set last = loop.last -%}{%- set first = loop.first -%}"
            "{%- set previous = turns[index - 1].role if index > 0 else none -%}"
            "{%- set following = turns[index + 1].role if not last else none -%}"
        )
        if self.style == "macro":
            arguments = "m, index, last, first, previous, following, system, ns"
            self.macros.append(f"{{%- macro turn({arguments}) -%}}{turn}{{%- endmacro -%}}")
            turn = f"{{{{- turn({arguments}) -}}}}"
        if self.loop == "range":
            loop = f"{{%- for i in range(turns | length) -%}}{{%- set m = turns[i] -%}}{names}{turn}{{%- endfor -%}}"
        else:
            loop = f"{{%- for m in {self.loop.replace('messages', 'turns')} -%}}{names}{turn}{{%- endfor -%}}"
        prompt = f"{{%- if add_generation_prompt -%}}{write(self.prompt)}{{%- endif -%}}"
        end = "{{- ns.out -}}" if self.style == "gather" else "{{- ns.out | join -}}" if self.style == "list" else ""
        return f"{''.join(self.macros)}{start}{first}{loop}{prompt}{end}"

    def draw_tools(self) -> None:
        if not self.tools:
            return
        head = self.header_text("system")
        end, after = self.end_of_others().raw, self.after
        opening, closing = self.part(constant(head + "<tools>\n")), self.part(constant("</tools>" + end + after))
        one = {
            "json": ("{{- t | tojson -}}", tojson),
            "function": (
                "{{- t.function | tojson(ensure_ascii=True) -}}",
                lambda t: tojson(t["function"], ensure_ascii=True),
            ),
            "lines": (
                "{{- t.function.name ~ ': ' ~ t.function.description -}}",
                lambda t: f"{t['function']['name']}: {t['function']['description']}",
            ),
            "indent": ("{{- t | tojson(indent=2) -}}", lambda t: tojson(t, indent=2)),
            "all": ("", tojson),
        }[self.tools]
        if self.tools == "all":
            jinja = "{{- (tools | tojson) ~ '\\n' -}}"
        else:
            jinja = f"{{%- for t in tools -%}}{one[0]}{{{{- '\\n' -}}}}{{%- endfor -%}}"

        def text(w: Where) -> str:
            lines = [w.tools] if self.tools == "all" else w.tools
            return f"{head}<tools>\n{''.join(one[1](line) + chr(10) for line in lines)}</tools>{end}{after}"

        self.tools_part = Part(f"{opening.jinja}{jinja}{closing.jinja}", text)

    def render(self, messages: list[Message], tools: list[dict] | None) -> tuple[str, list[int]]:
        """Text and labels of a chat, in Python alone."""
        text, labels = [], []

        def write(piece: str, label: int | list[int] = 0) -> None:
            text.append(piece)
            labels.extend(label if isinstance(label, list) else [label] * len(piece))

        turns = messages
        self.hoisted = ""
        if self.system in ("first", "user") and messages[0]["role"] == "system":
            self.hoisted, turns = messages[0]["content"], messages[1:]
        elif self.system == "all":
            self.hoisted = "\n".join(m["content"] for m in messages if m["role"] == "system")
            turns = [m for m in messages if m["role"] != "system"]
        nowhere = Where({}, 0, turns, tools)
        if self.bos:
            write("<|bos|>")
        if self.system in ("first", "all") and self.hoisted:
            write(self.system_block.text(nowhere))
        if self.tools and tools:
            write(self.tools_part.text(nowhere))
        handed_over = None  # an answer that only the header of the next message ends
        for index, message in enumerate(turns):
            w = Where(message, index, turns, tools)
            if message["role"] == "assistant":
                header, body = self.assistant_header.text(w), "".join(part.text(w) for part in self.assistant_body)
                at = len(labels)
                write(header)
                write(body + self.assistant_end.text(w), self.labels_of(body, w))
                write(self.assistant_after.text(w))
            else:
                at = len(labels)
                parts = [*self.tool_body, self.tool_end] if message["role"] == "tool" else self.others[message["role"]]
                write("".join(part.text(w) for part in parts))
            if handed_over:
                token = f"<|{self.role_name(message['role'])}|>"
                strict = message["role"] in ("user", "tool")
                labels[at : at + len(token)] = [1 if strict else EITHER] * len(token)
            handed_over = self.end_style == "none" and message["role"] == "assistant"
        return "".join(text), labels

    def tokens(self) -> Tokens:
        roles = [f"<|{self.role_name(role)}|>" for role in ROLES] if self.headers in ("literal", "role token") else []
        special = ["<|bos|>", "<|eos|>", "<|end|>", "<|call|>", "<|im_start|>", "<|head|>", *roles]
        stops = {
            "token": "<|end|>",
            "eos": "<|eos|>",
            "last": "<|eos|>",
            "call": "<|end|> <|call|>",
            "none": "<|eos|> <|user|> <|tool|>",
        }
        eos = {"token": "<|end|>", "call": "<|end|>"}.get(self.end_style, "<|eos|>")
        ends = tuple(stops[self.end_style].split())
        ordinary = ("<think>", "</think>", "<tool_call>", "</tool_call>")
        return Tokens(tuple(special), ordinary, eos, bos="<|bos|>", stops=ends)
