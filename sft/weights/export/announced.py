"""Says before a run in which form it will export its model, and refuses forms that do not fit the model."""

from sft.config import RANDOM, Config
from sft.hf.architecture import architecture, read
from sft.hf.export_format import choose
from sft.hf.family import views_by_tensor
from sft.hf.hub import CONFIG
from sft.hf.model_family import model_family
from sft.hf.source import open_source


def export_lines(config: Config, vocab_size: int | None) -> list[str]:
    """Lines about quantised exports of the run; [] with checkpoint.export_format = bf16.  Reads only headers of files.

    vocab_size: rows of the embedding without padding; None if they are unknown
    Raises ConfigError if no reader reads the format for this model, or if no matrix fits it.
    """
    format, pretrained, model = config.checkpoint.export_format, config.model.pretrained, config.model
    if format == "bf16":
        return []
    scheme = None
    if pretrained is not None and (pretrained.folder / CONFIG).is_file():
        scheme = architecture(read(pretrained.folder), str(pretrained.folder / CONFIG)).scheme
    if format == "as_source":
        if pretrained is None:
            return ["as_source: the recipe names no Hugging Face model, so the export decides"]
        if scheme is None:
            return [f"as_source: {pretrained.name} is not quantised, so exports are not"]
        return [
            f"as_source: exports need the quantised files of {pretrained.name}; tensors that the run changes are "
            "quantised again"
        ]
    if pretrained is not None and model.init_from != RANDOM and any(pretrained.folder.glob("*.safetensors")):
        source = open_source(pretrained.folder, pretrained.name, compare=False, has_mtp=model.has_mtp)
        family, mappings = source.architecture.family, source.mappings
    else:
        known, rows = model_family(model), model.vocab_size or vocab_size
        if known is None or rows is None or known.other_rules:
            return [f"{format}: which tensors are quantised is known when the run exports"]
        family, mappings = known, list(known.mappings(model, rows))
    choice = choose(format, views_by_tensor(mappings), family, "BF16" if scheme is None else scheme.dtype)
    return [f"{format}: {len(choice.names):,} tensors are quantised", *([choice.left_out] if choice.left else [])]
