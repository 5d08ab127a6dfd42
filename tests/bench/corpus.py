"""Real Wikipedia articles for measurements, from the test data of the gensim wheel.

Development-time data: downloaded with pip, unpacked in a cache folder, never part of the project.
"""

from __future__ import annotations

import bz2
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from xml.etree import ElementTree

MEMBER = (
    "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
)
LONG = 11_000  # characters: articles below this are too short for a window
KEPT = 14_000


def articles(cache: Path) -> list[str]:
    """Return the long articles in file order, markup stripped, cut to the first 14,000 characters."""
    root = ElementTree.fromstring(bz2.decompress(_dump(cache)))
    texts = (element.text or "" for element in root.iter() if element.tag.endswith("}text"))
    plain = (strip_markup(text) for text in texts)
    return [text[:KEPT] for text in plain if len(text) > LONG]


def strip_markup(text: str) -> str:
    """Return the prose of *text*: no templates, tables, references, files, headings' signs or link targets."""
    text = re.sub(r"<!--.*?-->|<ref[^>/]*/>|<ref.*?</ref>", "", text, flags=re.DOTALL)
    for pattern in (r"\{\{[^{}]*\}\}", r"\{\|[^{}]*?\|\}"):
        while (shorter := re.sub(pattern, "", text, flags=re.DOTALL)) != text:
            text = shorter
    text = re.sub(
        r"\[\[(?:File|Image|Category):[^\[\]]*(?:\[\[[^\[\]]*\]\][^\[\]]*)*\]\]", "", text
    )
    text = re.sub(r"\[\[(?:[^|\]]*\|)?([^\]]*)\]\]", r"\1", text)
    text = re.sub(r"\[https?://\S+\s?([^\]]*)\]", r"\1", text)
    text = re.sub(r"<[^>]+>|'{2,}|={2,}", "", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _dump(cache: Path) -> bytes:
    path = cache / "wikipedia.xml.bz2"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary",
            ":all:",
            "-d",
            str(cache),
        ]
        subprocess.run([*command, "gensim==4.4.0"], check=True)
        (wheel,) = cache.glob("gensim-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            path.write_bytes(archive.read(MEMBER))
        wheel.unlink()
    return path.read_bytes()
