"""Text of a model, fit to be shown: decoded token by token, and made harmless."""

from __future__ import annotations

import copy
import sys
import unicodedata

from rich.console import Console

HARMLESS = {"\n", "\t"}

RACE_NOTE = "Replay at measured times: each arm ran alone, one after the other, never at once."


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

    def __init__(self, tokenizer, skip_special_tokens: bool = True):
        self.tokenizer, self.skip, self.tokens = tokenizer, skip_special_tokens, []
        self.begin = self.done = 0  # tokens[begin:done] are shown already and give the decoder its context

    def fork(self) -> Detokenizer:
        """Another one that has seen the same."""
        other = copy.copy(self)
        other.tokens = list(self.tokens)
        return other

    def _decode(self, begin: int, end: int) -> str:
        return self.tokenizer.decode(
            self.tokens[begin:end], skip_special_tokens=self.skip, clean_up_tokenization_spaces=False
        )

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


def spelled(text: str, encoding: str) -> str:
    """The text with what an encoding lacks spelled out, the marks of line ends and tabs as \\n and \\t."""
    return text.encode(encoding, "backslashreplace").decode(encoding).replace("\\u21b5", "\\n").replace("\\u21e5", "\\t")


def printed(text: str, encoding: str | None = None) -> str:
    """The text as `print` can write it on standard output, or in another encoding."""
    return spelled(text, encoding or getattr(sys.stdout, "encoding", None) or "utf-8")


class Spelled:
    """A stream on which characters that its encoding lacks are spelled out."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        return self.stream.write(spelled(text, self.stream.encoding))


def own_console() -> Console:
    """One on standard output that prints any text, in any locale."""
    console = Console(highlight=False)
    return console if console.encoding.startswith("utf") else Console(highlight=False, file=Spelled(sys.stdout))


def has_colour(console: Console) -> bool:
    return console.color_system is not None and not console.no_color
