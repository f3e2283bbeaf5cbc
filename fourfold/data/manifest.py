"""OUT.json, beside OUT.bin and OUT.idx: what a prepared corpus is and how its tokens were made."""

import json
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

from fourfold.data.files import write_whole
from fourfold.data.tokenizer import Tokenizer, load_tokenizer
from fourfold.errors import UserError


@dataclass(frozen=True)
class Manifest:
    """What stands in OUT.json.

    `split`: "train" or "validation"; `documents`, `tokens` (ends of documents included), `bytes` (of UTF-8 text):
    how many; `tokenizer`: "bytes", or the name of a tokenizer.json in the same folder; `fingerprint` of the
    tokenizer; `vocab_size`, `eod_id`, `dtype` of the stored tokens; `inputs` and `text_key` as the user gave them;
    `validation_fraction` and `seed` of the split; `request`: a digest of everything that decides the content;
    `format`: "text", or "sft" for conversations; `trained_tokens`: of those, the ones that an answer is made of.
    """

    split: str
    documents: int
    tokens: int
    bytes: int
    tokenizer: str
    fingerprint: str
    vocab_size: int
    eod_id: int
    dtype: str
    inputs: list[str]
    text_key: str
    validation_fraction: float
    seed: int
    request: str
    format: str = "text"
    trained_tokens: int | None = None


def manifest_path(prefix: str | Path) -> Path:
    """The manifest of a corpus."""
    return Path(f"{prefix}.json")


def validation_prefix(prefix: str | Path) -> str:
    """The prefix of the validation split that belongs to a corpus."""
    return f"{prefix}-validation"


def trained_prefix(prefix: str | Path) -> str:
    """The prefix of what is 1 for every token of a corpus of conversations that is trained, and 0 elsewhere."""
    return f"{prefix}-trained"


def write_manifest(prefix: str | Path, manifest: Manifest) -> None:
    """Write OUT.json; its presence says that OUT.bin and OUT.idx are complete."""
    write_whole(manifest_path(prefix), (json.dumps(asdict(manifest), indent=2) + "\n").encode())


def read_manifest(prefix: str | Path) -> Manifest | None:
    """The manifest of a corpus, or None where there is none (as for one that Megatron-LM made).

    Raises UserError if the file is there but is no manifest.
    """
    path = manifest_path(prefix)
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); remove it and prepare the corpus again") from error
    names = {field.name for field in fields(Manifest)}
    needed = {field.name for field in fields(Manifest) if field.default is MISSING}
    if not isinstance(content, dict) or not needed <= set(content) <= names:
        raise UserError(f"{path} is not the manifest of a corpus; remove it and prepare the corpus again")
    return Manifest(**content)


def corpus_tokenizer(prefix: str | Path) -> Tokenizer:
    """The tokenizer that made a prepared corpus.

    Raises UserError if the corpus has no manifest, or its tokenizer is missing or another one by now.
    """
    manifest = read_manifest(prefix)
    if manifest is None:
        raise UserError(f"{manifest_path(prefix)} does not exist, so the tokenizer of this corpus is unknown")
    name = "bytes" if manifest.tokenizer == "bytes" else Path(prefix).parent / manifest.tokenizer
    tokenizer = load_tokenizer(name)
    if tokenizer.fingerprint != manifest.fingerprint:
        raise UserError(f"{name} is not the tokenizer that made {prefix}.bin; prepare the corpus again")
    return tokenizer
