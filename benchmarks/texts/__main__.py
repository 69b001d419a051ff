"""Writes every passage into its document: ``python -m benchmarks.texts``."""

from __future__ import annotations

from benchmarks.texts.render import DOCUMENTS, passages, with_passages


def main() -> None:
    for template, document in DOCUMENTS.items():
        before = document.read_text()
        after = with_passages(before, passages(template), document.name)
        if after != before:
            document.write_text(after)
            print(f"{document.name}: written")


if __name__ == "__main__":
    main()
