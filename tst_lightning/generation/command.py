"""Text from a checkpoint, as it is generated.

Loads torch and tokenizers when it runs, and Lightning never.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tst_lightning.config import TransformerConfig
from tst_lightning.data.corpus import TOKENIZER
from tst_lightning.data.stores import StoreError, StorePath, locate
from tst_lightning.errors import UserError
from tst_lightning.phases import PhaseSchedule

if TYPE_CHECKING:
    import torch

    from tst_lightning.model import Transformer

UNKNOWN_WINDOW_TOKENS = 256
"""Tokens to generate where neither the command line nor the checkpoint says how many."""

_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}  # not tab and newline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint's file, or a run's directory for its newest"
    )
    parser.add_argument("--prompt", default="", metavar="TEXT", help="what a document begins with (default: nothing)")
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="tokens to add at most (default: what fills a training window)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="divides the logits; 0: always the likeliest (default: 0.8)"
    )
    parser.add_argument(
        "--top-p", type=float, default=0.95, help="draw among the likeliest tokens of this share (default: 0.95)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="tokenizer.json (default: that of the corpus that the run's config.yaml names)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ... (default: auto)")


def run(arguments: argparse.Namespace) -> int:
    """Print the prompt and what the network makes of it.

    Raises:
        UserError: for everything that the user can mend, before the first token.
    """
    import torch

    from tst_lightning.checkpoints import RECORD, read_checkpoint
    from tst_lightning.data.tokenise import load_tokenizer
    from tst_lightning.generation.decoding import decode_stream
    from tst_lightning.generation.sampling import generate, sampling_faults

    faults = sampling_faults(
        max_new_tokens=1 if arguments.max_new_tokens is None else arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
    )
    if not 0 <= arguments.seed < 2**63:
        faults.append(f"seed={arguments.seed} must lie in [0, 2**63)")
    device = _device(arguments.device, faults)
    path = _checkpoint_file(arguments.checkpoint, faults)
    if arguments.tokenizer is not None and not arguments.tokenizer.is_file():
        faults.append(f"--tokenizer {arguments.tokenizer}: there is no such file")
    if faults:
        raise UserError(faults)

    checkpoint = read_checkpoint(path)
    record, state = checkpoint[RECORD], checkpoint.get("state_dict")
    try:
        schedule, step = PhaseSchedule.from_dict(record["schedule"]), int(record["step"])
        phase = schedule.at(max(step - 1, 0))  # of the last step done
        shape, data = record["network"], dict(record["data"])
        latent_length, end_of_text = data.get("latent_length"), data.get("end_of_text")
        if not (isinstance(latent_length, int | None) and isinstance(end_of_text, str | None)):
            raise TypeError(f"latent_length {latent_length!r}, end_of_text {end_of_text!r}")
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"the record in {path} is damaged ({type(error).__name__}: {error})") from error
    tokenizer_file = arguments.tokenizer or _tokenizer_of_run(path)
    _check_tokenizer(tokenizer_file, data.get("tokenizer_sha256"))
    text = load_tokenizer(tokenizer_file, end_of_text)
    try:
        ids = [text.end_of_text_id, *text.tokenizer.encode(arguments.prompt, add_special_tokens=False).ids]
    except Exception as error:  # tokenizers 0.23 raises nothing more specific
        raise UserError(f"the prompt is not text that the tokenizer can read ({error})") from error
    count = _tokens_to_add(arguments.max_new_tokens, len(ids), latent_length)
    network = _network(path, shape, state).to(device)

    _note(f"{path}: step {step} of {schedule.total_steps}")
    if phase.bag_size > 1:
        _note(
            f"up to here it was trained on bags only, of {phase.bag_size} last, to predict the next one: what it "
            "generates means little before the recovery phase"
        )
    new = generate(
        network,
        torch.tensor(ids),
        count,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        generator=torch.Generator().manual_seed(arguments.seed),
        stop_id=text.end_of_text_id,
    )
    if isinstance(sys.stdout, io.TextIOWrapper):  # whatever the model writes, a terminal of any encoding can show
        sys.stdout.reconfigure(errors="backslashreplace")
    control = _VISIBLE if sys.stdout.isatty() else {}  # random bytes may also be commands to a terminal
    pieces = decode_stream(text.tokenizer, ids[1:], (int(token) for token in new), text.end_of_text_id)
    try:
        sys.stdout.write(arguments.prompt)
        for piece in pieces:
            sys.stdout.write(piece.translate(control))
            sys.stdout.flush()
    except FloatingPointError as error:
        raise UserError(f"{path}: {error}: take an earlier checkpoint") from error
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return 0


def _device(name: str, faults: list[str]) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        zero = torch.zeros((), device=name)
        zero.item()  # which the meta device cannot
        return zero.device
    except Exception as error:  # noqa: BLE001  # each backend has its own kind
        faults.append(f"--device {name} cannot be used here ({str(error).splitlines()[0]}): take auto or cpu")
        return torch.device("cpu")


def _checkpoint_file(given: Path, faults: list[str]) -> Path:
    from tst_lightning.checkpoints import list_checkpoints

    path = given
    if not given.exists():
        faults.append(f"{given}: there is no such checkpoint or run directory")
    elif given.is_dir() and given.suffix != ".ckpt":
        found = list_checkpoints(given / "checkpoints") or list_checkpoints(given)
        if not found:
            faults.append(f"{given} has no checkpoint in {given / 'checkpoints'}: name a run that has one, or its file")
            return path
        path = found[-1]
    if path.is_dir():
        faults.append(
            f"{path} is a sharded checkpoint: tst-lightning consolidate {path} --output FILE makes one file of it"
        )
    return path


def _tokenizer_of_run(checkpoint: Path) -> Path | StorePath:
    """The tokenizer of the corpus that the run was trained on, by the recipe that lies beside its checkpoints."""
    import yaml  # type: ignore[import-untyped]

    way_out = "name the corpus's tokenizer.json by --tokenizer"
    folder = checkpoint.absolute().parent
    config = next((path for path in (folder.parent / "config.yaml", folder / "config.yaml") if path.is_file()), None)
    if config is None:
        raise UserError(f"there is no config.yaml of a run beside {checkpoint}, which would name its corpus: {way_out}")
    try:
        data = yaml.safe_load(config.read_text(encoding="utf-8"))["data"]
        corpus = locate(data["path"] or data["sources"][0]["path"])  # the sources of a mixture have one tokenizer
    except (OSError, ValueError, TypeError, LookupError, yaml.YAMLError) as error:
        raise UserError(f"{config} names no corpus in data.path ({type(error).__name__}): {way_out}") from error
    if isinstance(corpus, Path) and not (corpus / TOKENIZER).is_file():
        here = "" if corpus.is_absolute() else " from here (that path counts from the folder in which fit was run)"
        raise UserError(f"{corpus / TOKENIZER}, of the corpus in {config}, is not found{here}: {way_out}")
    return corpus / TOKENIZER


def _check_tokenizer(path: Path | StorePath, expected: str | None) -> None:
    try:
        content = path.read_bytes()
    except StoreError as error:
        raise UserError(f"{error}, or name the corpus's tokenizer.json by --tokenizer") from error
    if expected is None:
        _note("the checkpoint does not say which tokenizer it was trained with: with another one the text is nonsense")
    elif hashlib.sha256(content).hexdigest() != expected:
        raise UserError(
            f"{path} is not the tokenizer that this checkpoint was trained with (its hash differs): name the "
            "tokenizer.json of the run's corpus by --tokenizer"
        )


def _tokens_to_add(asked: int | None, prompt: int, latent_length: int | None) -> int:
    """How many, and a word where that goes beyond what the model has seen."""
    if latent_length is None:
        return UNKNOWN_WINDOW_TOKENS if asked is None else asked
    if asked is None and prompt >= latent_length:
        raise UserError(
            f"the prompt takes {prompt} tokens, the end-of-text token before it included, and the model was trained on "
            f"windows of {latent_length}: shorten it, or go beyond them by --max-new-tokens"
        )
    count = latent_length - prompt if asked is None else asked
    if prompt + count > latent_length:
        _note(
            f"{prompt + count} tokens go beyond the windows of {latent_length} that the model was trained on: the text "
            "may fall apart there"
        )
    return count


def _network(path: Path, shape: Mapping[str, Any], state: Any) -> Transformer:
    import torch

    from tst_lightning.model import Transformer

    try:
        config = TransformerConfig.from_dict(shape)
        with torch.device("meta"):  # nothing is drawn only to be overwritten
            network = Transformer(config)
        weights = {name.removeprefix("network."): tensor for name, tensor in state.items()}
        network.load_state_dict(weights, assign=True)
    except (UserError, RuntimeError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} does not hold a tst_lightning.Transformer ({str(error).splitlines()[0]}): build its network in "
            "Python, load the checkpoint's state_dict into it and call tst_lightning.generate(network, ...)"
        ) from error
    return network


def _note(text: str) -> None:
    sys.stderr.write(f"note: {text}\n")
