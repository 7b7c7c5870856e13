"""Data recipe: fetches Debian packages, turns them into documents of three kinds, trains the tokenizer.

Writes into the scratch folder: tokenizer.json, {train,test}_{kind}.npy (uint16 token streams, each document
preceded by the end-of-text token) and manifest.json (package versions, licences, sizes). Writes the held-out
sample texts for the project's tests. Nothing is installed: packages are unpacked under the scratch folder.
"""
import argparse
import gzip
import hashlib
import json
import re
import struct
import subprocess
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

KINDS = ("prose", "code", "manual")
END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 4096
SAMPLE_BYTES = 24 * 1024
SAMPLE_BYTES_PER_DOCUMENT = 8 * 1024

# package -> (kind, licence of the text used, files used); kind "tool" is used to read other packages only
PACKAGES = {
    "bible-kjv-text": ("prose", "public domain (copyright expired)", "usr/lib/bible.data, one document a chapter"),
    "r-cran-janeaustenr": ("prose", "public domain novels in an MIT package",
                           "data/Rdata.rdb: six novels, one document a chapter"),
    "libpython3.11-minimal": ("code", "PSF-2.0", "every .py but encodings/"),
    "libpython3.11-stdlib": ("code", "PSF-2.0", "every .py but pydoc_data/ and lib2to3/"),
    "python3-networkx": ("code", "BSD-3-Clause", "every .py under usr/lib"),
    "manpages": ("manual", "free, by page: Linux-man-pages-copyleft, GPL, BSD, MIT, public domain", "man1 to man8"),
    "manpages-dev": ("manual", "free, by page: Linux-man-pages-copyleft, GPL, BSD, MIT, public domain",
                     "man2 to man8"),
    "git-man": ("manual", "GPL-2.0-only", "man1 to man7"),
    "bible-kjv": ("tool", "GPL-2.0-or-later", "usr/bin/bible prints the text"),
    "mandoc": ("tool", "ISC", "usr/bin/mandoc renders manual pages"),
}
CODE_EXCLUDED = ("encodings/", "pydoc_data/", "lib2to3/")
PUBLIC_DOMAIN_PAGE = re.compile(r'^\.\\" (This (page|text|file)?\s?is|Placed) in the Public Domain', re.M | re.I)


@dataclass
class Document:
    kind: str
    name: str
    licence: str
    text: str


def fetch(scratch: Path) -> dict[str, str]:
    """Downloads and unpacks every package; returns their versions."""
    debs, versions = scratch / "debs", {}
    debs.mkdir(parents=True, exist_ok=True)
    (scratch / "packages").mkdir(exist_ok=True)
    for package in PACKAGES:
        if not list(debs.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", package], cwd=debs, check=True)
        deb = next(debs.glob(f"{package}_*.deb"))
        subprocess.run(["dpkg", "-x", str(deb), str(scratch / "packages" / package)], check=True)
        shown = subprocess.run(["dpkg-deb", "-f", str(deb), "Version"], capture_output=True, text=True, check=True)
        versions[package] = shown.stdout.strip()
    return versions


def bible_documents(packages: Path):
    """King James Bible, one document a chapter, one verse a line."""
    program = packages / "bible-kjv/usr/bin/bible"
    shown = subprocess.run([str(program.resolve()), "-f", "gen1:1-rev22:21"], cwd=packages / "bible-kjv-text/usr/lib",
                           capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL).stdout
    chapters: dict[str, list[str]] = {}
    for line in shown.splitlines():
        reference, _, verse = line.partition(" ")
        chapters.setdefault(reference.split(":")[0], []).append(verse.strip())
    for chapter, verses in chapters.items():
        yield Document("prose", f"bible-kjv-text/{chapter}", "public domain", "\n".join(verses) + "\n")


def r_strings(block: bytes) -> list[str]:
    """Reads a serialised (XDR version 3) R character vector."""
    encoding_length = struct.unpack(">I", block[14:18])[0]
    at = 18 + encoding_length + 4
    count = struct.unpack(">I", block[at:at + 4])[0]
    at, strings = at + 4, []
    for _ in range(count):
        length = max(struct.unpack(">i", block[at + 4:at + 8])[0], 0)
        strings.append(block[at + 8:at + 8 + length].decode())
        at += 8 + length
    return strings


def novels(packages: Path):
    """Yields the lines of each novel: the .rdb file is a row of zlib streams with a four-byte length before each."""
    rdb = next(packages.glob("r-cran-janeaustenr/**/data/Rdata.rdb")).read_bytes()
    at = 0
    while at < len(rdb):
        stream = zlib.decompressobj()
        block = stream.decompress(rdb[at + 4:])
        at = len(rdb) - len(stream.unused_data)
        yield r_strings(block)


def novel_documents(packages: Path):
    """The novels, one document a chapter, each paragraph joined into one line."""
    for lines in novels(packages):
        for number, chapter in enumerate(re.split(r"\n(?=CHAPTER |Chapter )", "\n".join(lines))):
            paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", chapter)]
            text = "\n\n".join(p for p in paragraphs if p) + "\n"
            if len(text) > 1000:
                yield Document("prose", f"r-cran-janeaustenr/{lines[0].title()} {number}", "public domain", text)


def code_documents(packages: Path):
    """Python source files, one document a file."""
    for package, (kind, licence, _) in PACKAGES.items():
        if kind != "code":
            continue
        root = packages / package / "usr/lib"
        for path in sorted(root.rglob("*.py")):
            if any(part in str(path) for part in CODE_EXCLUDED) or path.is_symlink():
                continue
            text = path.read_text(encoding="utf-8", errors="ignore").expandtabs(8)
            if len(text) > 200:
                name = path.relative_to(root).as_posix()
                yield Document("code", f"{package}/{name}", licence, text)


def page_licence(package: str, source: str) -> str:
    if PUBLIC_DOMAIN_PAGE.search(source):
        return "public domain"
    found = re.search(r"SPDX-License-Identifier:\s*(\S+)", source)
    return found.group(1) if found else PACKAGES[package][1]


def manual_documents(packages: Path):
    """Manual pages rendered to plain text 80 columns wide, one document a page."""
    mandoc = packages / "mandoc/usr/bin/mandoc"
    for package, (kind, _, _) in PACKAGES.items():
        if kind != "manual":
            continue
        for path in sorted((packages / package).glob("usr/share/man/man*/*.gz")):
            source = gzip.decompress(path.read_bytes())
            if path.is_symlink() or source.startswith(b".so "):
                continue
            shown = subprocess.run([str(mandoc), "-T", "ascii", "-O", "width=80"], input=source, capture_output=True)
            text = re.sub(r".\x08", "", shown.stdout.decode("ascii", "ignore")).strip("\n") + "\n"
            if len(text) > 200:
                licence = page_licence(package, source.decode("utf-8", "ignore"))
                yield Document("manual", f"{package}/{path.stem}", licence, text)


def all_documents(scratch: Path) -> list[Document]:
    packages, seen, documents = scratch / "packages", set(), []
    for reader in (bible_documents, novel_documents, code_documents, manual_documents):
        for document in reader(packages):
            digest = hashlib.sha1(document.text.encode()).digest()
            if digest not in seen:
                seen.add(digest)
                documents.append(document)
    return documents


def order_key(document: Document) -> bytes:
    return hashlib.sha1(document.name.encode()).digest()


def is_held_out(document: Document) -> bool:
    """One document in 20, by a hash of its name; and every manual page in the public domain (the test samples)."""
    if document.kind == "manual" and document.licence == "public domain":
        return True
    return int.from_bytes(order_key(document)[:4], "big") % 20 == 0


def may_be_sample(document: Document) -> bool:
    """The sample texts are from public-domain documents and PSF-licensed files without another copyright line."""
    if document.kind == "code":
        return document.licence == "PSF-2.0" and "copyright" not in document.text.lower()
    return document.licence == "public domain"


def sample_text(documents: list[Document]) -> tuple[str, list[Document]]:
    pieces, used, left = [], [], SAMPLE_BYTES
    for document in sorted(filter(may_be_sample, documents), key=order_key):
        if left < 1024 or not 2000 < len(document.text) < SAMPLE_BYTES:
            continue
        cut = document.text.encode()[:min(left, SAMPLE_BYTES_PER_DOCUMENT)].decode(errors="ignore")
        piece = cut[:cut.rfind("\n") + 1]
        pieces.append(piece)
        used.append(document)
        left -= len(piece.encode()) + 1
    return "\n".join(pieces), used


def write_samples(folder: Path, test: list[Document]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    table = ["# Held-out sample texts", "", "Not in the training data. Written by training/data.py.", "",
             "| file | document | licence |", "| --- | --- | --- |"]
    for kind in KINDS:
        text, used = sample_text([d for d in test if d.kind == kind])
        (folder / f"{kind}.txt").write_text(text, encoding="utf-8")
        table += [f"| {kind}.txt | {d.name} | {d.licence} |" for d in used]
    (folder / "SOURCES.md").write_text("\n".join(table) + "\n", encoding="utf-8")


def train_tokenizer(train: list[Document]) -> Tokenizer:
    """Byte-level BPE; ByteLevel(use_regex) splits like llama.cpp's "gpt-2" pre-tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=[END_OF_TEXT],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator((d.text for d in train), trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, documents: list[Document]) -> np.ndarray:
    end = tokenizer.token_to_id(END_OF_TEXT)
    rows = []
    for document in sorted(documents, key=order_key):
        rows.append(np.array([end] + tokenizer.encode(document.text).ids, dtype=np.uint16))
    return np.concatenate(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", type=Path, required=True, help="folder for packages and token arrays")
    parser.add_argument("--samples", type=Path, help="folder for the held-out sample texts")
    options = parser.parse_args()

    versions = fetch(options.scratch)
    documents = all_documents(options.scratch)
    train = [d for d in documents if not is_held_out(d)]
    test = [d for d in documents if is_held_out(d)]
    tokenizer = train_tokenizer(train)
    tokenizer.save(str(options.scratch / "tokenizer.json"))

    sizes = {}
    for split, chosen in (("train", train), ("test", test)):
        for kind in KINDS:
            of_kind = [d for d in chosen if d.kind == kind]
            stream = token_stream(tokenizer, of_kind)
            np.save(options.scratch / f"{split}_{kind}.npy", stream)
            sizes[f"{split}_{kind}"] = {"documents": len(of_kind), "bytes": sum(len(d.text.encode()) for d in of_kind),
                                        "tokens": len(stream)}
    packages = {p: {"version": versions[p], "kind": k, "licence": l, "files": f} for p, (k, l, f) in PACKAGES.items()}
    manifest = {"packages": packages, "sizes": sizes}
    (options.scratch / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    print(json.dumps(sizes, indent=1))
    if options.samples:
        write_samples(options.samples, test)


if __name__ == "__main__":
    main()
