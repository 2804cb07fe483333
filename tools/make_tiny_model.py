"""Makes a Hugging Face folder with a small random Qwen3 and a byte-level tokenizer, to try commands without a download.

python -m tools.make_tiny_model models/tiny
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def make(folder: Path, *, layers: int = 2, hidden: int = 64, seed: int = 0) -> None:
    """Write config.json, generation_config.json, model.safetensors, the tokenizer and its chat template.

    The model has heads of width 16, half as many key heads as query heads, and about 100,000 weights in fp32.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(CONTROL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16,
        num_key_value_heads=hidden // 32,
        head_dim=16,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to create")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64, help="width, a multiple of 32")
    arguments = parser.parse_args(argv)
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists")
    if arguments.layers < 1 or arguments.hidden < 32 or arguments.hidden % 32:
        parser.error("--layers must be at least 1, and --hidden a multiple of 32")
    make(arguments.folder, layers=arguments.layers, hidden=arguments.hidden)
    print(f"{arguments.folder}: {', '.join(sorted(path.name for path in arguments.folder.iterdir()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
