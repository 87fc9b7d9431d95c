"""Whether a tokenizer is that of a configuration: prompts and ends of another model's would be quietly wrong."""

from __future__ import annotations

from deepinfer.models.deepseek_v41_flash.config import ModelConfig
from deepinfer.models.interface import Vocabulary


def vocabulary_problems(config: ModelConfig, vocabulary: Vocabulary) -> list[str]:
    """What the two do not agree on, one line each; empty when they fit."""
    problems = []
    ends = config.eos_token_ids
    for name, found, wanted in (
        ("bos_token_id", vocabulary.bos_token_id, (config.bos_token_id,)),
        ("eos_token_id", vocabulary.eos_token_id, ends),
        ("pad_token_id", vocabulary.pad_token_id, (config.pad_token_id,)),
    ):
        if found not in wanted:
            said = ", ".join(map(str, wanted))
            problems.append(f"{name}: config.json says {said}, and the tokenizer's is {found}; {_REMEDY}")
    size = config.text.vocab_size
    if vocabulary.vocab_size > size:
        problems.append(
            f"text_config.vocab_size: is {size}, and the tokenizer has ids up to {vocabulary.vocab_size - 1}; {_REMEDY}"
        )
    return problems


_REMEDY = "use the tokenizer.json that belongs to this checkpoint"
