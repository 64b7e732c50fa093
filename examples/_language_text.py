"""English text that comes with Python, and ways to spoil it: the data of language_model_data_weights.py.

Three kinds of text are read from the standard library, and nothing is downloaded: the language reference (the topics of
`pydoc`), the docstrings and the comments of some fifty of its modules. The text is the same wherever the version of
Python is; another version has other text. `Texts.digest` tells them apart.
"""

from __future__ import annotations

import ast
import hashlib
import io
import itertools
import random
import re
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from torch import Tensor

MODULES = """
    _pydecimal _pyio argparse ast calendar codecs configparser contextlib csv dataclasses difflib doctest enum fractions
    functools gettext heapq inspect ipaddress locale mailbox mimetypes optparse os pickle pickletools platform
    pprint pydoc random shlex shutil smtplib socket statistics string subprocess tarfile tempfile textwrap threading
    timeit traceback types typing uuid warnings weakref
""".split()
PASSAGE = 512  # characters that stay together when text is divided among sources
VOCABULARY = 128  # ASCII; other characters become question marks
LAYOUT = re.compile(r"^ *(\||\+-|([-=~*])\2{3}).*\n?", re.M)  # lines of tables, and the rulers below headings
VOWELS, CONSONANTS = "aeiou", "bcdfghjklmnpqrstvwxyz"

# --- clean text -------------------------------------------------------------------------------------------------------


class Texts(NamedTuple):
    """The three kinds of clean text."""

    reference: str
    docstrings: str
    comments: str

    @property
    def digest(self) -> str:
        """What tells two texts apart: the beginning of a SHA-256."""
        return hashlib.sha256("\0".join(self).encode()).hexdigest()[:16]


def read() -> Texts:
    """Return the texts of this Python."""
    folder = Path(sysconfig.get_path("stdlib"))
    try:
        sources = [(folder / f"{name}.py").read_text("utf-8") for name in MODULES]
    except FileNotFoundError as error:
        raise SystemExit(f"The text is read from Python's standard library; not there: {error.filename}.") from None
    longest_first = sorted(topics, key=lambda name: (-len(topics[name]), name))  # "compound" contains "if", and so on
    paragraphs = (part for name in longest_first for part in LAYOUT.sub("", topics[name]).split("\n\n"))
    reference = "\n\n".join(dict.fromkeys(part.strip("\n") for part in paragraphs))
    return Texts(*map(ascii_only, (reference, "\n\n".join(docstrings(sources)), "\n".join(comments(sources)))))


def docstrings(sources: Iterable[str]) -> Iterator[str]:
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield from filter(None, [ast.get_docstring(node)])


def comments(sources: Iterable[str]) -> Iterator[str]:
    for source in sources:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT and re.search("[a-z]{3} [a-z]", token.string):  # words, not rulers
                yield token.string.lstrip("#: ")


def ascii_only(text: str) -> str:
    return text.encode("ascii", "replace").decode()


# --- spoiled text -----------------------------------------------------------------------------------------------------


def shuffle_letters(text: str, rng: random.Random) -> str:
    """Exchange the characters of every word: what a disorder of words is to a model whose tokens are words."""
    return re.sub(r"\S+", lambda word: "".join(rng.sample(word[0], len(word[0]))), text)


def shuffle_words(text: str, rng: random.Random) -> str:
    """Exchange the words of every passage; the white space stays where it is."""

    def shuffled(part: str) -> str:
        words = part.split()
        rng.shuffle(words)
        return re.sub(r"\S+", lambda _: words.pop(), part)

    return "".join(shuffled(text[i : i + PASSAGE]) for i in range(0, len(text), PASSAGE))


def another_language(text: str) -> str:
    """Replace every vowel by another vowel and every consonant by another consonant.

    It stands in for another language: the standard library has none but English.
    """
    letters, others = ("".join(kind[-shift:] + kind[:-shift] for kind in (VOWELS, CONSONANTS)) for shift in (0, 2))
    return text.translate(str.maketrans(letters + letters.upper(), others + others.upper()))


def duplicate_lines(text: str, rng: random.Random, count: int = 4) -> str:
    """Repeat a few of its longer lines, in random order, up to the length of the text."""
    lines = rng.sample([line for line in text.split("\n") if len(line) >= 50], count)
    endless = (rng.choice(lines) + "\n" for _ in itertools.count())
    found = ""
    while len(found) < len(text):
        found += next(endless)
    return found[: len(text)]


# --- what a run gets --------------------------------------------------------------------------------------------------

CLEAN = ("reference", "docstrings", "comments")
SPOILED = ("shuffled", "another language", "duplicated lines")
SHUFFLED = {"letters": shuffle_letters, "words": shuffle_words}


class Data(NamedTuple):
    """Tokens, in windows of equal length. Every passage of the text goes to one part only."""

    sources: Tensor  # (sources, windows, length), in the order of CLEAN + SPOILED
    validation: Tensor  # (windows, length): of the wanted domain, for the upper loss
    test: Tensor  # of the wanted domain, for judging
    pretraining: Tensor  # one long row: docstrings and comments


def divide(texts: Texts, length: int, windows: int, held_out: int, seed: int, shuffled: str = "letters") -> Data:
    """Return the data of one seed.

    Args:
        texts: The clean text. The wanted domain is the language reference; spoiled sources are made of it too, so that
            their words alone do not give them away.
        length: Characters of a window.
        windows: Windows of each source.
        held_out: Windows of the validation data, and half of those of the test data.
        seed: Decides which passage goes where, and how text is spoiled.
        shuffled: What is shuffled in the first spoiled source, letters or words.
    """
    rng = random.Random(seed)
    passages = [[text[i : i + PASSAGE] for i in range(0, len(text) - PASSAGE, PASSAGE)] for text in texts]
    for kind in passages:
        rng.shuffle(kind)
    reference, docs, comments = passages

    def take(kind: list[str], count: int) -> str:
        needed = -(-count * length // PASSAGE)
        if needed > len(kind):
            raise ValueError(f"there is too little text: {needed} passages are needed, and {len(kind)} are left")
        taken = [kind.pop() for _ in range(needed)]
        return "".join(taken)

    clean = [take(kind, windows) for kind in (reference, docs, comments)]
    bad = [take(reference, windows) for _ in SPOILED]
    spoiled = [SHUFFLED[shuffled](bad[0], rng), another_language(bad[1]), duplicate_lines(bad[2], rng)]
    sources = torch.stack([cut(text, length)[:windows] for text in (*clean, *spoiled)])
    validation, test = (cut(take(reference, count), length)[:count] for count in (held_out, 2 * held_out))
    return Data(sources, validation, test, encode("".join(docs + comments)))


def encode(text: str) -> Tensor:
    return torch.tensor(list(text.encode("ascii")))


def cut(text: str, length: int) -> Tensor:
    """Return as many whole windows as there are in the text."""
    tokens = encode(text)
    return tokens[: len(tokens) // length * length].view(-1, length)
