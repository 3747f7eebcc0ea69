"""One noun, one meaning: the glossary of CONTRIBUTING, held to the names of modules and classes."""

import ast
import collections
import re
from pathlib import Path

import zoo

ZOO = Path(zoo.__file__).parent
ROOT = Path(__file__).parents[1]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def glossary_in(page: str) -> dict[str, set[str]]:
    """The names that each word of the table under "Words" is in."""
    section = page.partition("\n## Words\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    words = [(word.strip(), {*re.findall(r"`([^`]+)`", names)}) for word, _, names in rows[2:]]
    assert len({word for word, _ in words}) == len(words), "a word has one meaning"
    return dict(words)


def names_in(module: str, program: str) -> set[str]:
    """A module without its room, and the public classes in it, as `room.module` and `Class`."""
    classes = {x.name for x in ast.parse(program).body if isinstance(x, ast.ClassDef)}
    return {module} | {name for name in classes if not name.startswith("_")}


def parts(name: str) -> set[str]:
    """The words that a name is made of: the last part of a module, in the singular."""
    found = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name.rpartition("/")[2])
    return {x.lower() for x in found} | {x.lower().removesuffix("s") for x in found}


MODULES = {
    path.relative_to(ZOO).with_suffix("").as_posix(): path.read_text()
    for path in ZOO.rglob("*.py")
    if not path.name.startswith("__")
}
NAMES = set().union(*(names_in(name, program) for name, program in MODULES.items()))
GLOSSARY = glossary_in(CONTRIBUTING)


def test_words_are_found():
    page = "\n## Words\n\n| a | b | c |\n|--|--|--|\n| row | tokens | `data/rows`, `Row` |\n\n## "
    assert glossary_in(page) == {"row": {"data/rows", "Row"}}
    assert parts("data/token_rows") == {"token", "rows", "row"}
    assert parts("HLOError") == {"hlo", "error"}
    assert {"data/loader", "Transformer"} <= NAMES
    assert len(GLOSSARY) > 15


def test_names_with_a_word_are_in_its_row():
    """So a new name with the word is one that means it; the others need another word."""
    found = {word: {name for name in NAMES if word in parts(name)} for word in GLOSSARY}
    assert {w: found[w] ^ names for w, names in GLOSSARY.items() if found[w] != names} == {}


def test_modules_of_one_name_are_of_one_word():
    count = collections.Counter(name.rpartition("/")[2] for name in MODULES)
    twice = {name for name, number in count.items() if number > 1}
    assert {name for name in twice if not parts(name) & set(GLOSSARY)} == set()


# Turns of phrase that nobody says aloud.
DIALECT = re.compile(
    r"\bof those\b|(?<!there )\b(is|are) none\b|\bthose that\b|\bthat there (is|are)\b"
    r"|\bwhat it is of\b|\bmay stand\b|\bstands? (beside|nowhere|there)\b"
)
PAGES = ["README.md", "CONTRIBUTING.md", "docs/**/*.md", "zoo/**/*.py", "recipes/*.py"]


def test_dialect_is_seen():
    assert DIALECT.search("an optimizer that is none")
    assert not DIALECT.search("key is None, or there is none")


def test_pages_and_programs_are_in_plain_english():
    paths = [path for pattern in PAGES for path in ROOT.glob(pattern)]
    assert len(paths) > 150
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if DIALECT.search(line)
    ]
    assert not found, "\n".join(found)
