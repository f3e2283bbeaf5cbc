"""Check a Hugging Face model's tokenizer.json against a model and a corpus, and write it with an export."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from fourfold.config.model import ModelConfig
from fourfold.data.atomic_files import write_whole
from fourfold.data.tokenizer import HFTokenizer, begin_of
from fourfold.data.tokenizer import Tokenizer as AnyTokenizer
from fourfold.errors import UserError
from fourfold.huggingface.architectures.config_json import local_folder
from fourfold.huggingface.model_folder import GENERATION_FILE, TOKENIZER_FILE
from fourfold.parsing import parse_json


def check_same_tokenizer(name: str, tokenizer: AnyTokenizer | None) -> None:
    """Raise ``UserError`` if the vocabulary of the corpus is not the vocabulary of the model ``name``.

    If the corpus names no tokenizer or the model has no tokenizer.json, nothing is checked.
    """
    file = local_folder(name, (TOKENIZER_FILE,)) / TOKENIZER_FILE
    if tokenizer is None or not file.is_file():
        return
    if isinstance(tokenizer, HFTokenizer) and _opened(file).get_vocab() == _opened(tokenizer.path).get_vocab():
        return
    raise UserError(
        f"the corpus was made with another tokenizer than {file}, which is the model's; prepare the corpus with "
        f"--tokenizer {file}"
    )


def tokens_beyond(file: Path, vocab_size: int) -> list[str]:
    """Return the added tokens in a tokenizer.json whose ids are at least ``vocab_size``, such as a pad token without an
    embedding row.

    Raises:
        UserError: The file is not a tokenizer.json, or an ordinary token has such an id.
    """
    tokenizer = _opened(file)
    vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_tokens_decoder()
    if any(number >= vocab_size and number not in added for number in vocabulary.values()):
        raise UserError(
            f"{file} has {max(vocabulary.values()) + 1} tokens, but the model's embedding has {vocab_size} rows: it "
            "is another model's tokenizer"
        )
    return [token.content for number, token in sorted(added.items()) if number >= vocab_size]


def added_beyond(model: ModelConfig) -> int:
    """Return how many added tokens of the tokenizer of ``model.from_hf`` have no row in the embedding."""
    file = local_folder(str(model.from_hf), (TOKENIZER_FILE,)) / TOKENIZER_FILE
    return len(tokens_beyond(file, model.vocab_size)) if file.is_file() else 0


def check_tokenizer_fits(file: Path, model: ModelConfig) -> None:
    """Warn if a tokenizer.json exists and adds tokens that have no row in the model's embedding.

    Raises:
        UserError: The file is not a tokenizer.json, or an ordinary token has no row.
    """
    beyond = tokens_beyond(file, model.vocab_size) if file.is_file() else []
    if beyond:
        print(
            f"warning: {file} adds {', '.join(map(repr, beyond))} beyond the {model.vocab_size} rows of the model's "
            "embedding; texts must not use them",
            file=sys.stderr,
        )


def _opened(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # The tokenizers library raises plain Exceptions, so catch them all.
        raise UserError(f"{file} is not a tokenizer.json of the tokenizers library: {error}") from error


def write_tokenizer(folder: Path, tokenizer: AnyTokenizer | None, model: ModelConfig) -> dict[str, Any]:
    """Write a tokenizer in the form that transformers reads. The bytes tokenizer has no such form, so only its special
    token ids are written.

    Args:
        folder: The folder to write to.
        tokenizer: The tokenizer. If it is None, nothing is written.
        model: The model.

    Returns:
        The keys to add to config.json.
    """
    if tokenizer is None:
        return {}
    begin = next(iter(begin_of(tokenizer)), None)
    ids = {"eos_token_id": tokenizer.eod_id} | ({} if begin is None else {"bos_token_id": begin})
    write_whole(folder / GENERATION_FILE, (json.dumps(ids) + "\n").encode())
    if isinstance(tokenizer, HFTokenizer):
        check_tokenizer_fits(tokenizer.path, model)
        shutil.copyfile(tokenizer.path, folder / TOKENIZER_FILE)
        written = Tokenizer.from_file(str(tokenizer.path))
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": written.id_to_token(tokenizer.eod_id)}
        if begin is not None:
            about["bos_token"] = name = written.id_to_token(begin)
            if written.encode("").ids[:1] != [begin]:
                written.post_processor = TemplateProcessing(single=[name, "$A"], special_tokens=[(name, begin)])
                written.save(str(folder / TOKENIZER_FILE))
        write_whole(folder / "tokenizer_config.json", (json.dumps(about) + "\n").encode())
    return {"bos_token_id": None, **ids}


def add_end_token(folder: Path, config: dict[str, Any], end: int) -> dict[str, Any]:
    """Add a token to the ids that end a generated text, unless these ids already include the token. The new token comes
    first, before the original model's ids.

    The function also changes the folder's generation_config.json, if there is one.

    Args:
        folder: The model's folder.
        config: The content of config.json.
        end: The token that ended documents in training.

    Returns:
        The content of config.json with the token.
    """
    file = folder / GENERATION_FILE
    settings = parse_json(file.read_bytes()) if file.is_file() else None
    if isinstance(settings, dict) and (changed := _with_end(settings, end)) != settings:
        write_whole(file, (json.dumps(changed, indent=2) + "\n").encode())
    return _with_end(config, end)


def _with_end(keys: dict[str, Any], end: int) -> dict[str, Any]:
    own = keys.get("eos_token_id")
    ids = own if isinstance(own, list) else [] if own is None else [own]
    return keys if end in ids else keys | {"eos_token_id": [end, *ids] if ids else end}
