"""Text of a model in a terminal: decoded token by token, made harmless, drafted tokens coloured."""

from __future__ import annotations

import unicodedata

from rich.console import Console
from rich.text import Text

DRAFTED, OWN = "black on green", ""
HARMLESS = {"\n", "\t"}


def visible(text: str) -> str:
    """Control, zero-width, bidirectional and unassigned characters and line separators, spelled out as <U+XXXX>."""
    return "".join(
        c
        if c in HARMLESS or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
        else f"<U+{ord(c):04X}>"
        for c in text
    )


class Detokenizer:
    """Tokens in, pieces of text out; bytes of an unfinished character are held back until it is whole."""

    PATIENCE = 16  # tokens held back at most, for models that write bytes which never become a character

    def __init__(self, tokenizer):
        self.tokenizer, self.tokens = tokenizer, []
        self.begin = self.done = 0  # tokens[begin:done] are shown already and give the decoder its context

    def _decode(self, begin: int, end: int) -> str:
        return self.tokenizer.decode(self.tokens[begin:end], skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def push(self, token: int) -> str:
        """The text that this token completes, possibly none."""
        self.tokens.append(token)
        return self._take(len(self.tokens) - self.done >= self.PATIENCE)

    def flush(self) -> str:
        """What is still held back; an unfinished character shows as U+FFFD."""
        return self._take(True)

    def _take(self, anyway: bool) -> str:
        shown, text = self._decode(self.begin, self.done), self._decode(self.begin, len(self.tokens))
        if text.endswith("\ufffd") and not anyway:
            return ""
        self.begin, self.done = self.done, len(self.tokens)
        return text[len(shown) :]


class Highlighter:
    """A streamer for `generate(streamer=...)`: prints a row's tokens as they come, drafted ones on a green ground."""

    def __init__(self, tokenizer, console: Console):
        self.detokenizer, self.console, self.drafted = Detokenizer(tokenizer), console, False

    def __call__(self, row: int, tokens: list[int], drafted: list[bool]) -> None:
        piece = Text()
        for token, self.drafted in zip(tokens, drafted):
            piece.append(visible(self.detokenizer.push(token)), style=DRAFTED if self.drafted else OWN)
        self._print(piece)

    def end(self) -> None:
        self._print(Text(visible(self.detokenizer.flush()), style=DRAFTED if self.drafted else OWN))
        self.console.print()

    def _print(self, piece: Text) -> None:
        if piece.plain:
            self.console.print(piece, end="", soft_wrap=True, highlight=False)
