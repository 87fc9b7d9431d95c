"""The tokenizer of `make_tiny`: byte-level BPE over a few lines of text, with the family's control tokens.

Ids follow the released model where a small vocabulary allows: bos, eos and pad are 0, 1 and 2; the other control tokens
stand at the end.
"""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

TOKENIZER_FILE = "tokenizer.json"

_FIRST = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
_LAST = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜System｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜deepseek_image｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    "<｜noise｜>",
)

# words in several cases and accents, so that the compressed vocabulary of Engram has something to fold
_TEXT = """\
The first answer is the right answer. THE FIRST ANSWER. What is the weather in Paris today? It is sunny, and the wind is
weak. Please write a short story about a small robot that learns to read, and then answer the question in one sentence.
A model reads one token after another and predicts the next token; the next token is then part of the text it reads.
Café, cafe, CAFÉ; naïve, naive; résumé, resume. Zürich, zurich. Ångström, angstrom. ﬁne, fine. ２０２５, 2025.
def add(left, right):\n    return left + right\n\nfor number in range(10):\n    print(number, add(number, 100))
{"name": "weather", "arguments": {"city": "Paris", "unit": "celsius"}} <tool_result>{"temperature": 21}</tool_result>
1 2 3 10 20 30 100 200 300 1000 2000 3000. 12 + 30 = 42. 3.14159 is about 22 / 7.
你好，世界。你好，朋友。今天的天气很好。模型读一个字，再读一个字。 Привет, мир. Привет, друг. مرحبا بالعالم.
The question, the answer, the token, the text, the story, the robot, the sentence, the weather, the model, the wind.
"""


class TinyVocabulary:
    """A `models.interface.Vocabulary` over the library's own tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to `vocab_size` - 1."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def bos_token_id(self) -> int:
        """The token that begins a sequence."""
        return self.id_of(_FIRST[0])

    @property
    def eos_token_id(self) -> int:
        """The token that ends one."""
        return self.id_of(_FIRST[1])

    @property
    def pad_token_id(self) -> int:
        """The token that pads."""
        return self.id_of(_FIRST[2])

    def raw_spelling(self, token_id: int) -> str:
        """The token as the vocabulary spells it."""
        return str(self._tokenizer.id_to_token(token_id))

    def decode_single_with_special(self, token_id: int) -> str:
        """The text of the token on its own, control tokens included."""
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def id_of(self, token: str) -> int:
        """The id of a token by its spelling.

        Raises:
            KeyError: the vocabulary has no such token.
        """
        return self._tokenizer.get_vocab(with_added_tokens=True)[token]


def build_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer of `vocab_size` ids, control tokens included; at least 256 + their number."""
    tokenizer = Tokenizer(models.BPE())
    pieces = Regex(r"\d{1,3}| ?\p{L}+| ?[^\s\p{L}\d]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pieces, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(_LAST),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in _FIRST],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _LAST])
    return tokenizer
