"""Words of errors that leave the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridindex.errors import without_path


@pytest.mark.parametrize(
    ("path", "text", "told"),
    [
        ("/data/idx", "/data/idx/gen-000001/a differs; see '/data/idx'.", "INDEX/gen-000001/a differs; see 'INDEX'."),
        ("/data/idx", "/data/idx-2, /data/idx.old, /more/data/idx", "/data/idx-2, /data/idx.old, /more/data/idx"),
        ("my/idx", "hybridindex compress my/idx: anew", "hybridindex compress INDEX: anew"),
        ("y", "y/rabitq.json: hybridindex compress y", "INDEX/rabitq.json: hybridindex compress y"),
        (".", "rabitq.json is damaged. See ./gen-1", "rabitq.json is damaged. See INDEX/gen-1"),
    ],
)
def test_clients_are_told_no_paths_and_whole_words(path, text, told):
    assert without_path(text, Path(path)) == told
