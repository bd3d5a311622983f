"""GGUF files: their headers, and their conversion, once, to a folder in transformers' own layout."""

import functools
import importlib
import importlib.util
import logging
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from .errors import ModelUnsupportedError
from .families import check_config, refuse_kind

LOG = logging.getLogger(__name__)
PACKAGES = ("gguf", "accelerate")
MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS: Mapping[int, str] = dict(enumerate(("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?"))) | {
    10: "<Q",
    11: "<q",
    12: "<d",
}
STRING, ARRAY = 8, 9
LONGEST_TEXT_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a file says of its model: scalar and text metadata (arrays are left out), and the tensors' names."""

    metadata: Mapping[str, object]
    tensor_names: tuple[str, ...]

    @property
    def architecture(self) -> str:
        """The model type in GGUF's spelling."""
        return str(self.metadata.get("general.architecture", "unknown"))


def read_header(path: Path) -> GgufHeader:
    """Return the header of the file at `path`. Cost: about 0.2 s for a vocabulary of 262,144.

    Raises: ModelUnsupportedError when it is no GGUF file of a version that is read here.
    """
    try:
        with path.open("rb") as file:
            magic, version, num_tensors, num_entries = struct.unpack("<4sIQQ", file.read(24))
            if magic != MAGIC or version not in VERSIONS:
                raise ModelUnsupportedError(f"{path} is no GGUF file of version 2 or 3")
            entries = [_entry(file) for _ in range(num_entries)]
            names = tuple(_tensor_name(file) for _ in range(num_tensors))
    except OSError as error:
        raise ModelUnsupportedError(f"cannot read {path}: {error.strerror}") from error
    except (struct.error, UnicodeDecodeError, KeyError) as error:
        raise ModelUnsupportedError(f"{path} is a damaged GGUF file") from error
    return GgufHeader({key: value for key, value in entries if value is not None}, names)


def check_header(header: GgufHeader) -> None:
    """Return when nothing in the header speaks against serving the model.

    transformers drops what a GGUF file says about scaled rotary positions: the tokens would be wrong, silently.
    Raises: ModelUnsupportedError.
    """
    refuse_kind(header.architecture, [], False)
    scaling = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    scaled = scaling != "none" or any(name.startswith("rope_f") for name in header.tensor_names)
    if scaled:
        raise ModelUnsupportedError(
            f"this {header.architecture} GGUF file scales its rotary positions, which is lost when it is read; "
            "use the model's safetensors"
        )


def convert(path: Path, folder: Path) -> None:
    """Write the model and tokenizer of the GGUF file at `path` to `folder` in bfloat16; it appears whole or not at all.

    Raises: ModelUnsupportedError when the model is not served or its packages are missing.
    Cost: a minute or two and the memory of the model in float32.
    """
    header = read_header(path)
    check_header(header)
    if not all(importlib.util.find_spec(name) for name in PACKAGES):
        raise ModelUnsupportedError("reading a GGUF file takes two more packages: pip install 'specserve[gguf]'")
    LOG.warning("specserve: converting %s to %s; this takes a minute or two, once", path.name, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with _one_reader():
            _write(path, header, work)
        work.chmod(0o755)
        try:
            work.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was quicker, and its folder is as good
                raise
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise ModelUnsupportedError(f"cannot read a model from {path}: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write(path: Path, header: GgufHeader, folder: Path) -> None:
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    check_config(config)
    window = header.metadata.get(f"{header.architecture}.attention.sliding_window")
    if window and window != getattr(config.get_text_config(), "sliding_window", None):
        raise ValueError(f"transformers loses its sliding window of {window} tokens")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path.parent,
        config=config,
        gguf_file=path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
        trust_remote_code=False,
        output_loading_info=True,
    )
    model, loading = loaded
    if loading["missing_keys"]:
        raise ValueError(f"weights are missing: {', '.join(sorted(loading['missing_keys'])[:3])}")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False).save_pretrained(folder)


@contextmanager
def _one_reader() -> Iterator[None]:
    """Let transformers share one reader of the file: it makes three, at 10 s each for a vocabulary of 262,144."""
    package = importlib.import_module("gguf")
    reader = package.GGUFReader
    package.GGUFReader = functools.cache(reader)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        package.GGUFReader = reader  # type: ignore[attr-defined]


def _entry(file: BinaryIO) -> tuple[str, object]:
    """Return a metadata key with its value, None for an array."""
    key = _string(file).decode()
    return key, _value(file, _number(file, "<I"))


def _value(file: BinaryIO, kind: int) -> object:
    if kind == STRING:
        return _string(file).decode(errors="replace")
    if kind != ARRAY:
        return _number(file, SCALARS[kind])
    of_kind, length = _number(file, "<I"), _number(file, "<Q")
    if of_kind in SCALARS:
        file.seek(struct.calcsize(SCALARS[of_kind]) * length, 1)
    else:
        for _ in range(length):
            _value(file, of_kind)
    return None


def _tensor_name(file: BinaryIO) -> str:
    name = _string(file).decode()
    num_dimensions = _number(file, "<I")
    file.seek(8 * num_dimensions + 4 + 8, 1)
    return name


def _string(file: BinaryIO) -> bytes:
    length = _number(file, "<Q")
    text = file.read(length) if length <= LONGEST_TEXT_BYTES else b""
    if len(text) != length:
        raise struct.error("the file ends within a text")
    return text


def _number(file: BinaryIO, form: str) -> Any:
    return struct.unpack(form, file.read(struct.calcsize(form)))[0]
