"""Read and write a corpus's manifest, the file OUT.json. It describes the corpus (OUT.bin and OUT.idx), and how the
tokens were made. OUT is the prefix of the corpus."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from fourfold.data.atomic_files import is_file_name, write_whole
from fourfold.data.indexed import token_dtype
from fourfold.data.tokenizer import HFTokenizer, NoSuchToken, Tokenizer, load_tokenizer
from fourfold.errors import UserError
from fourfold.parsing import parse_json


@dataclass(frozen=True)
class Manifest:
    """Content of OUT.json."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    split: str
    """Split of the corpus: "train" or "validation"."""
    documents: int
    tokens: int
    """Number of tokens, including end-of-document tokens."""
    bytes: int
    """Number of UTF-8 bytes of the text."""
    tokenizer: str
    """Tokenizer: "bytes", or the name of a tokenizer.json in the same folder."""
    fingerprint: str
    """Fingerprint of the tokenizer."""
    vocab_size: int
    eod_id: int
    dtype: str
    """Dtype of the stored tokens."""
    inputs: list[str]
    """Inputs as the user gave them."""
    text_key: str
    validation_fraction: float
    seed: int
    request: str
    """Digest of everything that determines the content of the corpus."""
    format: str = "text"
    """Format of the rows: "text", "sft", or "preferences"."""
    trained_tokens: int | None = None
    """Number of trained tokens. None for text, because all its tokens are trained."""
    bos_id: int | None = None
    """Token that begins every document. None if documents begin with their text."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user about how the input was read. Skipped files are not listed here."""


_MANIFEST = TypeAdapter(Manifest)


@dataclass
class CorpusSplit:
    """A corpus that is being created: its prefix, and its numbers of documents, tokens, and bytes so far."""

    prefix: Path
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    """Number of bytes of text."""
    trained_tokens: int | None = None
    """Number of trained tokens. None for text, because all its tokens are trained."""

    def count(self, documents: int, tokens: int, text_bytes: int = 0, trained: int = 0) -> None:
        """Add to the counts of documents, tokens, bytes of text, and trained tokens."""
        self.documents += documents
        self.tokens += tokens
        self.bytes += text_bytes
        if self.trained_tokens is not None:
            self.trained_tokens += trained


def manifest_path(prefix: str | Path) -> Path:
    """Return the path of a corpus's manifest."""
    return Path(f"{prefix}.json")


def validation_prefix(prefix: str | Path) -> str:
    """Return the prefix of a corpus's validation split."""
    return f"{prefix}-validation"


def trained_prefix(prefix: str | Path) -> str:
    """Return the prefix of the files with the flags of a corpus of conversations. There is a flag for each token: 1 if
    the token is trained, and 0 if it is not."""
    return f"{prefix}-trained"


def write_manifests(
    splits: dict[str, CorpusSplit], prefix: Path, tokenizer: Tokenizer, **request: Any
) -> tuple[Manifest, Manifest | None]:
    """Write the tokenizer's file and a manifest for each corpus, next to the corpora.

    The manifest of "train" is written last. If it exists, the corpus is complete.

    Args:
        splits: The corpora "train" and, if documents were held out, "validation".
        prefix: Prefix of the train split.
        tokenizer: The tokenizer of the corpus.
        request: More fields of the manifest: how the corpus was requested, and notes.

    Returns:
        The manifests of the train split and the validation split (or None).
    """
    tokenizer_name = "bytes"
    if isinstance(tokenizer, HFTokenizer):
        tokenizer_name = f"{prefix.name}-tokenizer.json"
        write_whole(prefix.with_name(tokenizer_name), tokenizer.path.read_bytes())
    manifests: dict[str, Manifest] = {}
    for name in reversed(splits):
        counts = asdict(splits[name])
        del counts["prefix"]
        manifests[name] = manifest = Manifest(
            split=name,
            **counts,
            tokenizer=tokenizer_name,
            fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id,
            bos_id=tokenizer.bos_id if tokenizer.begins_documents else None,
            dtype=token_dtype(tokenizer.vocab_size).name,
            **request,
        )
        path = manifest_path(prefix if name == "train" else validation_prefix(prefix))
        write_whole(path, (json.dumps(asdict(manifest), indent=2) + "\n").encode())
    return manifests["train"], manifests.get("validation")


def read_manifest(prefix: str | Path) -> Manifest | None:
    """Read the manifest of a corpus. Return None if there is no manifest, for example because Megatron-LM made the
    corpus.

    Raises:
        UserError: The file is not a valid manifest.
    """
    path = manifest_path(prefix)
    if not path.is_file():
        return None
    try:
        content = parse_json(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); remove it and prepare the corpus again") from error
    try:
        manifest = _MANIFEST.validate_python(content)
    except ValidationError as error:
        mistake = error.errors()[0]
        place = f" ({mistake['loc'][0]}: {mistake['msg'].lower()})" if mistake["loc"] else ""
        raise UserError(
            f"{path} is not the manifest of a corpus{place}; remove it and prepare the corpus again"
        ) from None
    if not is_file_name(manifest.tokenizer):
        raise UserError(f"{path}: its tokenizer is not a file in the same folder; prepare the corpus again")
    return manifest


def corpus_tokenizer(prefix: str | Path) -> Tokenizer:
    """Open the tokenizer that made a prepared corpus.

    Raises:
        UserError: The corpus has no manifest, or its tokenizer is missing or was replaced.
    """
    manifest = read_manifest(prefix)
    if manifest is None:
        raise UserError(
            f"{manifest_path(prefix)} does not exist, so its tokenizer is unknown; prepare the corpus again"
        )
    name = "bytes" if manifest.tokenizer == "bytes" else Path(prefix).parent / manifest.tokenizer
    tokenizer = open_as_made(name, manifest)
    if tokenizer is None:
        raise UserError(f"{name} is not the tokenizer that made {prefix}.bin; prepare the corpus again")
    return tokenizer


def open_as_made(name: str | Path, manifest: Manifest) -> Tokenizer | None:
    """Open a tokenizer if it made the corpus of a manifest. Documents get the begin and end tokens of this corpus.

    Args:
        name: "bytes", or the path of a tokenizer.json or its folder.
        manifest: The manifest of the corpus.

    Returns:
        The tokenizer, or None if another tokenizer made the corpus.

    Raises:
        UserError: The tokenizer cannot be opened.
    """
    try:
        ends = () if str(name) == "bytes" else (manifest.eod_id, manifest.bos_id)
        tokenizer = load_tokenizer(name, *ends)
    except NoSuchToken:
        return None
    return tokenizer if tokenizer.fingerprint == manifest.fingerprint else None
