"""A served model behaves as trained: in transformers, an export gives the ids of training, and stops at its ends of
turns."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sft.api import checks
from sft.config import CheckpointConfig, ModelConfig
from sft.console import QUIET, Console
from sft.data.chat.encode_chat import encode_chat
from sft.data.chat.tokenizer import FolderTokenizer, load_tokenizer
from sft.data.rows.formats import Chat
from sft.recipe.tokenizer import same_ids
from sft.weights import kept, run_folder
from sft.weights.export.export_hf import export_hf
from sft.weights.import_hf import import_hf
from sft.weights.serving import flags as serving
from sft.weights.serving.served import Served, served_of
from tests.builders import pretrained
from tests.unit.fixtures import folder as folders
from tests.unit.fixtures import hf
from tests.unit.fixtures.adapters import trained
from tests.unit.fixtures.folder import make_folder

VOCAB = 640
CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
OTHER = CHATML.replace("im_start", "start_header_id").replace("im_end", "eot_id")
MARKED = CHATML.replace(
    "%}{{-",
    "%}{%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\\n' }}"
    "{%- generation %}{{- m.content + '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}{%- continue %}{%- endif %}{{-",
    1,
)
SWITCHED = "{{- '[deep]' if think is defined and think else '[brief]' if think is defined else '[unset]' }}" + CHATML
DATED = "{{- '[' + strftime_now('%d %b %Y') + ']' }}" + CHATML
USER, ANSWER = {"role": "user", "content": "How are you?"}, {"role": "assistant", "content": "I am fine."}
SYSTEM = {"role": "system", "content": "Be brief."}
CHATS = [[USER, ANSWER], [SYSTEM, USER, ANSWER], [USER, ANSWER, USER, ANSWER]]


class Export:
    """A run that starts from a small base model, and its export, without a training step.

    model, tokenizer: chat templates of model.hf and of data.tokenizer (None: that of model.hf); data: keys of the
    section
    """

    def __init__(self, folder: Path) -> None:
        self.run, self.out, self.base = folder / "run", folder / "out", folder / "base"

    def make(self, model: str | None, tokenizer: str | None = None, **data: Any) -> "Export":
        self.base_model(model)
        folder = self.base
        if tokenizer is not None:
            folder = make_folder(self.base.with_name("tokenizer"), tokenizer, vocab_size=400)
        served = self.decide(folder, **data)
        imported = self.base.with_name("imported")
        import_hf(self.base, imported, QUIET)
        shutil.copytree(imported / "iter_0000000", self.run / "checkpoints" / "iter_0000001")
        shutil.rmtree(imported)
        self.prepare(served)
        export_hf(self.run, self.out, QUIET)
        return self

    def base_model(self, template: str | None) -> None:
        hf.save(self.base, "llama", vocab_size=VOCAB, eos_token_id=0)
        make_folder(self.base, template)

    def decide(self, folder: Path, **data: Any) -> Served:
        """`served_of` for a run with this tokenizer; chat_template: the text of the template file."""
        if "chat_template" in data:
            file = self.base.with_name("mine.jinja")
            file.write_bytes(data["chat_template"].encode())
            data["chat_template"] = str(file)
        config = folders.config(tokenizer=str(folder), **data)
        loaded = load_tokenizer(config)
        assert isinstance(loaded, FolderTokenizer)
        self.trained_with = loaded
        names: Any = SimpleNamespace(
            data=config, tokenizer=str(folder), model=SimpleNamespace(hf=str(self.base), pretrained=None)
        )
        served = served_of(names, loaded)
        assert served is not None
        return served

    def prepare(self, served: Served | None, *, is_new: bool = True) -> str:
        said, sizes = io.StringIO(), dict(num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=8)
        model = ModelConfig(**sizes, hf=str(self.base), pretrained=pretrained(self.base))
        run_folder.prepare(self.run, model, CheckpointConfig(), Console(0, said), served, is_new=is_new)
        return said.getvalue()

    @property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.out)

    def json(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.out / name).read_text())
        return content

    def check_prompts(self, **variables: Any) -> None:
        """Whole chats and their prompts have the ids of training; a prompt ends where supervision begins."""
        exported = self.tokenizer
        for messages in CHATS:
            encoding = encode_chat(Chat(messages, None, None), self.trained_with, "last")
            ids = exported.apply_chat_template(messages, return_dict=False, **variables)
            assert ids == encoding.tokens.tolist()
            prompt = exported.apply_chat_template(
                messages[:-1], add_generation_prompt=True, return_dict=False, **variables
            )
            first = int(encoding.weights.nonzero()[0][0])
            assert prompt == encoding.tokens[:first].tolist()

    def check_stops(self, end: str) -> None:
        """The export's generation_config stops a model that writes an answer and the trained end."""
        from transformers import AutoModelForCausalLM

        exported, model = self.tokenizer, AutoModelForCausalLM.from_pretrained(self.out)
        prompt = exported.apply_chat_template(CHATS[0][:-1], add_generation_prompt=True, return_tensors="pt")
        answer = exported.encode("I am fine.", add_special_tokens=False) + [exported.convert_tokens_to_ids(end), 70, 71]
        position = iter(answer)

        def rigged(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
            logits = torch.zeros_like(logits)
            logits[..., next(position)] = 1.0
            return logits

        model.lm_head.register_forward_hook(rigged)
        length = prompt["input_ids"].shape[1]
        written = model.generate(**prompt, max_new_tokens=len(answer), do_sample=False)[0, length:].tolist()
        assert written == answer[:-2]


@pytest.fixture
def export(tmp_path: Path) -> Export:
    return Export(tmp_path)


def test_a_base_model_without_a_template(export: Export) -> None:
    export.make(None, chat_template=CHATML)
    export.check_prompts()
    export.check_stops("<|im_end|>")
    assert (export.out / "chat_template.jinja").read_text() == CHATML
    assert export.json("tokenizer_config.json")["eos_token"] == "<|im_end|>", "its own never ends a turn"
    im_end, own = (export.tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>"))
    assert (im_end, own) == (2, 0)
    assert same_ids(load_tokenizer(folders.config(tokenizer=str(export.out))), export.trained_with), "for sft eval"
    for name in ("generation_config.json", "config.json"):
        assert export.json(name)["eos_token_id"] == [2, 0], "the template never writes <|endoftext|>"
    card = (export.out / "README.md").read_text()
    assert "- Chat template: `chat_template.jinja`, which writes the prompts of the training." in card
    assert "- Generation stops at `<|im_end|>` (2), `<|endoftext|>` (0)" in card and "vllm" not in card


def test_a_template_in_place_of_the_models(export: Export) -> None:
    export.make(OTHER, chat_template=CHATML)
    export.check_prompts()
    export.check_stops("<|im_end|>")
    assert (export.out / "chat_template.jinja").read_text() == CHATML


def test_the_models_own_template_is_copied_byte_for_byte(export: Export) -> None:
    export.make(CHATML.replace("<|im_end|>", "<|endoftext|>"))
    export.check_prompts()
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "config.json"):
        assert (export.out / name).read_bytes() == (export.base / name).read_bytes()
    assert export.json("generation_config.json")["eos_token_id"] == 0


@pytest.mark.parametrize("think", [True, False])
def test_switches_are_defaults(export: Export, think: bool) -> None:
    export.make(SWITCHED, chat_template_kwargs={"think": think})
    export.check_prompts()
    other = export.tokenizer.apply_chat_template([USER], tokenize=False, think=not think)
    assert other.startswith("[brief]" if think else "[deep]")
    assert f"`think` is {'true' if think else 'false'} in the template" in (export.out / "README.md").read_text()


def test_the_date_is_that_of_the_training(export: Export) -> None:
    export.make(DATED, date="2025-03-09")
    text = export.tokenizer.apply_chat_template([USER], tokenize=False)
    assert text.startswith("[09 Mar 2025]<|im_start|>")
    assert "2025-03-09 as today's date" in (export.out / "README.md").read_text()


def test_another_tokenizer(export: Export) -> None:
    """The export has the files, the added tokens and the template of this tokenizer, and none of the model's."""
    export.make(OTHER, tokenizer=CHATML)
    export.check_prompts()
    export.check_stops("<|im_end|>")
    folder = export.base.with_name("tokenizer")
    assert (export.out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert (export.base / "tokenizer.json").read_bytes() != (folder / "tokenizer.json").read_bytes()
    assert not same_ids(load_tokenizer(folders.config(tokenizer=str(export.base))), export.trained_with)
    assert export.tokenizer.get_added_vocab() == export.trained_with.files.added_ids


def test_marks_do_not_go_out(export: Export) -> None:
    export.make(None, chat_template=MARKED)
    export.check_prompts()
    assert "{%- generation" not in (export.out / "chat_template.jinja").read_text()


def test_a_file_takes_the_place_of_all_named_templates(export: Export) -> None:
    """For a request with tools, transformers would choose tool_use, which the run never rendered."""
    export.base_model(OTHER)
    (export.base / "additional_chat_templates").mkdir()
    (export.base / "additional_chat_templates" / "tool_use.jinja").write_text("tools" + OTHER)
    shutil.move(export.base, export.base.with_name("saved"))
    export.make(OTHER, tokenizer=None, chat_template=CHATML)
    served = export.decide(export.base.with_name("saved"), chat_template=CHATML)
    shutil.rmtree(export.run / "hf")
    export.prepare(served)
    names = {path.name for path in (export.run / "hf").rglob("*.jinja")}
    assert names == {"chat_template.jinja"}
    own = export.decide(export.base.with_name("saved"), chat_template_kwargs={})
    assert own.templates == {"default": OTHER, "tool_use": "tools" + OTHER}
    shutil.rmtree(export.run / "hf")
    export.prepare(own)
    assert (export.run / "hf/additional_chat_templates/tool_use.jinja").read_text() == "tools" + OTHER


def test_named_templates_all_get_the_defaults(export: Export) -> None:
    export.base_model(SWITCHED)
    (export.base / "additional_chat_templates").mkdir()
    (export.base / "additional_chat_templates" / "tool_use.jinja").write_text("tools" + SWITCHED)
    export.prepare(export.decide(export.base, chat_template_kwargs={"think": False}))
    written = [path.read_text() for path in sorted((export.run / "hf").rglob("*.jinja"))]
    line = "{%- if think is not defined %}{%- set think = false %}{%- endif %}\n"
    assert written == [line + "tools" + SWITCHED, line + SWITCHED]
    files = kept.read(export.run / "hf")
    assert files is not None and files.served is not None
    assert files.served.templates == ("chat_template.jinja", "additional_chat_templates/tool_use.jinja")


@pytest.mark.parametrize("old", ["list", "text"])
def test_a_template_in_the_configuration_of_the_tokenizer_is_not_left_beside_the_files(
    export: Export, old: str
) -> None:
    export.base_model(None)
    path = export.base / "tokenizer_config.json"
    template = OTHER if old == "text" else [{"name": "default", "template": OTHER}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    export.prepare(export.decide(export.base, chat_template=CHATML))
    assert "chat_template" not in json.loads((export.run / "hf/tokenizer_config.json").read_text())


def test_a_name_of_a_template_that_is_a_path_is_refused(export: Export) -> None:
    export.base_model(None)
    path = export.base / "tokenizer_config.json"
    named = [{"name": "default", "template": OTHER}, {"name": "../../x", "template": OTHER}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": named}))
    served = export.decide(export.base, chat_template_kwargs={})
    with pytest.raises(Exception, match="is called '../../x', which cannot be the name of a file"):
        export.prepare(served)
    assert not (export.run / "hf").exists()


def test_damage_is_repaired_with_the_template_of_the_run(export: Export) -> None:
    export.base_model(OTHER)
    served = export.decide(export.base, chat_template=CHATML)
    export.prepare(served)
    before = {path.name: path.read_bytes() for path in (export.run / "hf").iterdir() if path.is_file()}
    (export.run / "hf/chat_template.jinja").unlink()
    assert "was copied anew from" in export.prepare(served, is_new=False)
    assert before == {path.name: path.read_bytes() for path in (export.run / "hf").iterdir() if path.is_file()}
    assert not export.prepare(served, is_new=False)


def exported(source: Path, target: Path, **options: Any) -> str:
    """The printed text of `sft export`."""
    said = io.StringIO()
    export_hf(source, target, Console(0, said), **options)
    return said.getvalue()


def test_a_run_of_an_earlier_version(tmp_path: Path) -> None:
    """Its export has the model's template, and says so; once the run has been resumed, the export has the run's
    template."""
    export = Export(tmp_path)
    export.base_model(OTHER)
    trained(export.run, export.base)
    export.prepare(None)
    said = exported(export.run, tmp_path / "old")
    assert f"WARNING: tokenizer, chat template and end tokens are those of {export.base}" in said
    assert (tmp_path / "old/chat_template.jinja").read_text() == OTHER
    served = export.decide(export.base, chat_template=CHATML)
    assert "now has the tokenizer, the chat template and the end tokens of this run" in export.prepare(
        served, is_new=False
    )
    said = exported(export.run, export.out)
    assert "template      chat_template.jinja of the run; ends with <|im_end|>" in said and "WARNING" not in said
    export.check_prompts()
    export_hf(export.run, tmp_path / "named", QUIET, like=export.base)
    assert (tmp_path / "named/chat_template.jinja").read_text() == CHATML, "--hf names the weights' folder"
    (export.run / "hf/chat_template.jinja").write_text(OTHER)
    assert "WARNING: tokenizer, chat template" in exported(export.run, tmp_path / "damaged", like=export.base)


def test_adapters_have_the_template_and_the_flags(tmp_path: Path) -> None:
    import peft
    from transformers import AutoTokenizer

    export = Export(tmp_path)
    export.base_model(OTHER)
    trained(export.run, export.base, **{"data.chat_template": "/home/me/mine.jinja"})
    export.prepare(export.decide(export.base, chat_template=SWITCHED, chat_template_kwargs={"think": False}))
    export_hf(export.run, export.out, QUIET, merged=False)
    export.check_prompts()
    assert AutoTokenizer.from_pretrained(export.out).eos_token == "<|im_end|>"
    assert export.json("generation_config.json")["eos_token_id"] == [2, 0]
    model = peft.AutoPeftModelForCausalLM.from_pretrained(export.out)
    assert model.get_base_model().get_input_embeddings().weight.shape[0] == VOCAB
    card = (export.out / "README.md").read_text()
    assert (
        f"vllm serve {export.base} \\\n    --enable-lora \\\n    --lora-modules NAME=ADAPTER \\\n"
        "    --chat-template ADAPTER/chat_template.jinja \\\n    --generation-config ADAPTER\n" in card
    )
    assert '`"stop_token_ids": [2, 0]`' in card
    assert "data.chat_template: chat_template.jinja" in card and "/home/me" not in card


def test_check_says_the_flags_for_adapters(export: Export) -> None:
    export.base_model(CHATML)
    data = folders.config(tokenizer=str(export.base))
    model = SimpleNamespace(hf=str(export.base), pretrained=None)
    lora = SimpleNamespace(is_used=True, export="adapter", rank=8)
    config = SimpleNamespace(data=data, tokenizer=str(export.base), model=model, lora=lora)
    recipe: Any = SimpleNamespace(config=config)
    (subject,) = checks._serving(recipe, load_tokenizer(data))
    printed = " ".join(subject.lines)
    flags = "--enable-lora --lora-modules NAME=ADAPTER --chat-template ADAPTER/chat_template.jinja"
    assert f"ADAPTER: vllm serve {export.base} {flags} --generation-config ADAPTER" in printed
    assert 'each request needs "stop_token_ids": [2, 0]' in printed
    lora.export = "merged"
    assert not [*checks._serving(recipe, load_tokenizer(data))], "a whole model needs no flags"


def test_flags_of_other_adapters(export: Export) -> None:
    export.base_model(OTHER)
    export.prepare(export.decide(export.base, chat_template=CHATML))
    files = kept.read(export.run / "hf")
    assert files is not None and files.served is not None
    record = replace(files.served, is_other=True, requests={"think": False})
    assert serving.flags(record, "Qwen/Qwen3-8B", 48)[3:6] == [
        "--max-lora-rank 64",
        "--tokenizer ADAPTER",
        "--chat-template ADAPTER/chat_template.jinja",
    ]
    assert """--default-chat-template-kwargs '{"think": false}'""" in serving.flags(record, "Qwen/Qwen3-8B", 8)


def test_the_byte_tokenizer_has_no_files() -> None:
    config: Any = SimpleNamespace(data=folders.config())
    assert served_of(config, load_tokenizer(folders.config())) is None
